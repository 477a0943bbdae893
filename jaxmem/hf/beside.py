"""What lies beside the weights in a Hugging Face directory: tokenizer, settings of generation, the model's shape."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from jaxmem.config.hugging_face import read_json
from jaxmem.data.tokenizer import END_TEXT, Bytes
from jaxmem.errors import UserError

TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
SETTINGS = ("config.json", "generation_config.json")
DTYPES = ("float32", "float16", "bfloat16")


def copy_beside(source: str | Path, target: Path) -> None:
    """Copies what of these there is."""
    target.mkdir(parents=True, exist_ok=True)
    for name in (*SETTINGS, *TOKENIZER):
        file = Path(source).expanduser() / name
        if file.is_file():
            _copied(file, target / name)


def copy_tokenizer(name: str, target: Path) -> None:
    """The tokenizer that `data.tokenizer` names; of bytes, a tokenizer.json that gives the same ids."""
    if name == "bytes":
        _write(target / "tokenizer.json", byte_tokenizer())
        _write(
            target / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": END_TEXT,
                "clean_up_tokenization_spaces": False,
            },
        )
        return
    given = Path(name).expanduser()
    if given.is_file():
        shutil.copyfile(given, target / "tokenizer.json")  # which was named as it is
        given = given.parent
    for one in TOKENIZER:
        if (given / one).is_file() and not (target / one).exists():
            _copied(given / one, target / one)


def _copied(file: Path, target: Path) -> None:
    """A link may lead to another file of its directory or, as in the cache of Hugging Face, to `../../blobs`: no other,
    or somebody else's directory would take files of this machine along."""
    place, real = file.parent.resolve(), file.resolve()
    if real.parent not in (place, place.parent.parent / "blobs"):
        raise UserError(f"{file}: a link that leads out of its directory, to {real}; put the file itself there")
    shutil.copyfile(real, target)


def storage_dtype(directory: str | Path) -> str:
    """What the weights of a directory are kept in, as its config.json says."""
    file = Path(directory).expanduser() / "config.json"
    given = read_json(file)
    found = str(given.get("dtype") or given.get("torch_dtype") or "float32")
    if found not in DTYPES:
        raise UserError(f"{file}: dtype {found!r} is not one of {', '.join(DTYPES)}")
    return found


def byte_tokenizer() -> dict[str, Any]:
    """`data.tokenizer: bytes` as a tokenizer.json: byte-level BPE without a merge, each byte its own id.

    The format writes a byte as a character: itself where that can be seen, one from 256 on where not.
    """
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unseen = [byte for byte in range(256) if byte not in seen]
    letters = {byte: chr(byte) for byte in seen} | {byte: chr(256 + n) for n, byte in enumerate(unseen)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    end = {"id": Bytes.end, "content": END_TEXT, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | flags],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {letters[byte]: byte for byte in range(256)} | {END_TEXT: Bytes.end},
            "merges": [],
        },
    }


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
