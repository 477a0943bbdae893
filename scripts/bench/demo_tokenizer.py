"""Makes configs/demo-tokenizer.json: byte-level BPE of 1,024 tokens, from beginnings of the standard library's files.

python scripts/bench/demo_tokenizer.py
"""

from pathlib import Path

from jaxmem.data.text import stdlib_files
from scripts.course.docstrings import train_tokenizer

if __name__ == "__main__":
    tokenizer = train_tokenizer(stdlib_files(), 1024, ["<|endoftext|>"], 4000)
    tokenizer.save(str(Path(__file__).parents[2] / "configs/demo-tokenizer.json"), pretty=False)
