"""The colours of memory bands, on the page and in figures, distinct also with colour blindness (Okabe and Ito, "Color
Universal Design", 2008)."""

from jaxmem.planning.history import BANDS, PASSES

COLOURS = dict(
    zip(
        BANDS,
        ("#0072b2", "#56b4e9", "#9aa0a6", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#e8d84a"),
        strict=True,
    )
)
COLOURS["activations in passing"] = COLOURS["other activations"]  # its name in runs of version 0.1.0
SHADES = dict(zip(PASSES, ("#64798c", "#3d5063", "#4f6477", "#7a8c9c"), strict=True))
