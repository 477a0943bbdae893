"""Makes configs/demo-tokenizer.json: byte-level BPE of 1,024 tokens, from beginnings of the standard library's files.

python scripts/measure/demo_tokenizer.py
"""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxmem.data.text import stdlib_files

FILE = Path(__file__).parents[2] / "configs/demo-tokenizer.json"
BYTES = 4000  # of each file

if __name__ == "__main__":
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    beginnings = (file.read_bytes()[:BYTES].decode(errors="ignore") for file in stdlib_files())
    tokenizer.train_from_iterator(beginnings, trainer)
    tokenizer.save(str(FILE), pretty=False)
