"""Batches from text and images: sources, tokenizers, packing, the position to resume from.

    tokenizer.tokenizer_for     bytes, or a tokenizer.json
    loader.Loader               batches of a split; only the rows of this process
    loader.merge_states         one position from the positions of all processes
    cache.tokenize              writes a token cache, for `data.source: tokens`
    corpus.fingerprint          whether the data is still the same

A record is a document, or a piece of a document that is longer than max(16 KiB, 8 * sequence_length) bytes. The order
of records is computed from their numbers (`record_order`); rows of a batch are streams of records (`packing`). With
`data.streaming`, files are read one after the other (`streaming`).
"""
