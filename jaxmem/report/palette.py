"""The colours of what lies in memory, on the page and in figures: told apart also by people who see fewer (Okabe and
Ito, "Color Universal Design", 2008)."""

from __future__ import annotations

from jaxmem.planning.history import BANDS, PASSES

COLOURS = dict(
    zip(
        BANDS,
        ("#0072b2", "#56b4e9", "#9aa0a6", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#e8d84a"),
        strict=True,
    )
)
SHADES = dict(zip(PASSES, ("#64798c", "#3d5063", "#4f6477", "#7a8c9c"), strict=True))
