"""Makes configs/demo-tokenizer.json: byte-level BPE of 1,024 tokens, from beginnings of the standard library's files.

python -m tests.support.demo_tokenizer
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxmem.data.text import stdlib_files


def train_tokenizer(files: Sequence[Path], vocab: int, special: Sequence[str], length: int) -> Any:
    """A byte-level BPE tokenizer, trained on the first `length` bytes of every file."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    beginnings = (file.read_bytes()[:length].decode(errors="ignore") for file in files)
    tokenizer.train_from_iterator(beginnings, trainer)
    return tokenizer


if __name__ == "__main__":
    tokenizer = train_tokenizer(stdlib_files(), 1024, ["<|endoftext|>"], 4000)
    tokenizer.save(str(Path(__file__).parents[2] / "configs/demo-tokenizer.json"), pretty=False)
