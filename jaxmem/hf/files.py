"""The files of a Hugging Face directory besides its weights: model settings, generation settings, tokenizer."""

import json
import shutil
from pathlib import Path

from jaxmem.config.hf_values import read_json
from jaxmem.config.hub import local_directory
from jaxmem.data.chat_template import CHAT_TEMPLATE, template_in
from jaxmem.errors import UserError
from jaxmem.typing import JsonDict

TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE,
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
SETTINGS = ("config.json", "generation_config.json")


def copy_metadata(source: str | Path, target: Path) -> None:
    """Copies the files of settings and tokenizer that exist."""
    target.mkdir(parents=True, exist_ok=True)
    for name in (*SETTINGS, *TOKENIZER):
        file = Path(source).expanduser() / name
        if file.is_file():
            _copy(file, target / name)


def copy_tokenizer(name: str, target: Path) -> None:
    """Copies the tokenizer that `data.tokenizer` names; for `bytes`, writes a tokenizer.json with the same ids."""
    if name == "bytes":
        from jaxmem.data.tokenizer import END_TEXT

        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_TEXT,
            "clean_up_tokenization_spaces": False,
        }
        for file, content in (("tokenizer.json", byte_tokenizer()), ("tokenizer_config.json", settings)):
            text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
            (target / file).write_text(text, encoding="utf-8")
        return
    source = Path(local_directory(name, "data.tokenizer")).expanduser()
    if source.is_file():
        shutil.copyfile(source, target / "tokenizer.json")  # named by the user: any link is followed
        source = source.parent
    for file in TOKENIZER:
        if (source / file).is_file() and not (target / file).exists():
            _copy(source / file, target / file)


def copy_chat_template(name: str, target: Path) -> None:
    """Copies the file that `data.chat_template` names: a Jinja file, or the tokenizer_config.json of an adapter."""
    try:
        if name.endswith(".json"):
            template = template_in(read_json(Path(name).expanduser()))
            (target / CHAT_TEMPLATE).write_text(template or "", encoding="utf-8")
        else:
            shutil.copyfile(Path(name).expanduser(), target / CHAT_TEMPLATE)
    except OSError as error:
        raise UserError(f"data.chat_template={name} cannot be read: {error.strerror}; restore the file") from error


def _copy(file: Path, target: Path) -> None:
    """Copies a file. Links are followed only to files of the same directory or, as in the cache of Hugging Face, to
    `../../blobs`; any other link could copy private files of this machine into an export."""
    place = file.parent.resolve()
    real = file.resolve()
    if real.parent not in (place, place.parent.parent / "blobs"):
        raise UserError(f"{file}: a link to {real}, outside of its directory; copy the file itself into the directory")
    shutil.copyfile(real, target)


def storage_dtype(directory: str | Path) -> str:
    """The dtype of the weights of a directory, from its config.json; with experts in MXFP4, the dtype of the others."""
    settings = read_json(Path(directory).expanduser() / "config.json")
    default = "bfloat16" if "quantization_config" in settings else "float32"
    return str(settings.get("dtype") or settings.get("torch_dtype") or default)


def byte_tokenizer() -> JsonDict:
    """`data.tokenizer: bytes` as a tokenizer.json: byte-level BPE without merges, each byte its own id."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from jaxmem.data.tokenizer import END_TEXT, Bytes

    # In this format, printable bytes are their characters; the others are, in order, characters from 256 on.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    others = iter(letter for letter in alphabet if ord(letter) > 255)
    letters = [chr(byte) if chr(byte) in alphabet else next(others) for byte in range(256)]
    vocab = {letter: byte for byte, letter in enumerate(letters)} | {END_TEXT: Bytes.end}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_TEXT, normalized=False, special=True)])
    return json.loads(tokenizer.to_str())
