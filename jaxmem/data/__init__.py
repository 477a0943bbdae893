"""Batches from text and images: sources, tokenizers, packing, the position to resume from.

    tokenizer_for     bytes, or a tokenizer.json
    Loader            batches of a split; only the rows of this process
    merge_states      one position from the positions of all processes
    tokenize          writes a token cache, for `data.source: tokens`
    fingerprint       whether the data is still the same

A record is a document, or a piece of a document that is longer than max(16 KiB, 8 * sequence_length) bytes. The order
of records is computed from their numbers (`record_order`); rows of a batch are streams of records (`packing`). With
`data.streaming`, files are read one after the other (`streaming`).
"""

from jaxmem.lazy import lazy_names

__getattr__, __all__ = lazy_names(
    __name__,
    cache="tokenize",
    corpus="Corpus Split fingerprint",
    loader="Loader merge_states",
    tokenizer="tokenizer_for",
)
