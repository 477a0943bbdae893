"""Batches from text and images: sources, tokenizers, packing, the position to resume from.

    tokenizer_for     bytes, or a tokenizer.json
    Loader            batches of a split, this process's rows only
    merge_states      one position of all processes' positions
    tokenize          the pre-tokenized cache, for `data.source: tokens`
    fingerprint       whether the data is still the same

A record is a document, or a piece of one longer than max(16 KiB, 8 * sequence_length) bytes (`text`);
records are ordered by arithmetic (`order`), and rows of a batch are streams over them (`packing`), or those of alike
length together (`buckets`).
"""

from jaxmem.data.corpus import Corpus, Split, fingerprint, tokenize
from jaxmem.data.loader import Loader, merge_states
from jaxmem.data.tokenizer import tokenizer_for

__all__ = ["Corpus", "Loader", "Split", "fingerprint", "merge_states", "tokenize", "tokenizer_for"]
