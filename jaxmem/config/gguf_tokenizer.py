"""The tokenizer in a GGUF file as a `tokenizer.json`, and the names of llama.cpp's pre-tokenizers in both directions.

llama.cpp has two kinds of BPE: byte-level (`gpt2`), with merges and the name of a pre-tokenizer, and SentencePiece's
(`llama`), with a score for each token from which the merges follow.
"""

import json
from collections.abc import Mapping, Sequence
from typing import TypeVar

from jaxmem.config.hf_values import UnsupportedError
from jaxmem.typing import JsonDict, JsonView

Item = TypeVar("Item")
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # types of tokens
ENDS = ("eos", "eot", "eom")  # tokens that end a document, a turn, a message
MAX_TOKENS = 1 << 20  # limits what a damaged file can make of a vocabulary
MAX_TOKEN_LENGTH = 512  # characters; the longest tokens of usual vocabularies are 128 spaces
SPACE = "▁"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTER = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASHES = _PUNCTUATION.replace(r"[\r\n]*", r"[\r\n/]*")
LLAMA3 = rf"{_CONTRACTIONS}|{_LETTER}\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION}"
QWEN2 = rf"{_CONTRACTIONS}|{_LETTER}\p{{L}}+|\p{{N}}|{_PUNCTUATION}"
O200K = (
    rf"{_LETTER}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_LETTER}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|"
    rf"\p{{N}}{{1,3}}|{_SLASHES}"
)
TEKKEN = rf"{_LETTER}{_UPPER}*{_LOWER}+|{_LETTER}{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHES}"
# Cased letters of DeepSeek's tokenizers, which leave out some scripts and the letters of formulas.
_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10C7-\u10FF\u1C80-\u1C8A\u2D00-\u2D2D\uA790-\uA7FA\uAB30-\uAB68"
    r"\x{10570}-\x{105BC}\x{10D50}-\x{10D85}\x{16E40}-\x{16E7F}\x{1D400}-\x{1DF28}]]"
)
_FULL_WIDTH = "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"  # punctuation, and letters
_SYLLABLES = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK = (r"[\r\n]", rf"\s?{_CASED}+", rf"\s?[!-/:-~{_FULL_WIDTH}]+", r"\s+$", _SYLLABLES, r"\p{N}")

# How each pre-tokenizer of llama.cpp splits text before byte-level BPE: by a regular expression or one after the other,
# into single digits and then as GPT-2, or as GPT-2 (None).
DIGITS = "digits"
_OF_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral")
PRE_TOKENIZERS: dict[str, str | tuple[str, ...] | None] = {
    "gpt-2": None, "phi-2": None, "olmo": None, "mpt": None,
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), DIGITS),
    **dict.fromkeys((*_OF_LLAMA3, "dbrx", "smaug-bpe"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2),
    **dict.fromkeys(("gpt-4o", "llama4"), O200K),
    "tekken": TEKKEN, "deepseek-llm": DEEPSEEK,
}  # fmt: skip
WITH_BEGIN = (*_OF_LLAMA3, "tekken")  # where `add_bos_token` is absent
WHOLE_TOKENS_FIRST = (*WITH_BEGIN, "gpt-4o")  # `ignore_merges`
_BYTE_LEVEL: JsonDict = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def pre_tokenizer_name(pre_tokenizer: JsonView | None) -> str | None:
    """llama.cpp's name for the pre-tokenizer of a tokenizer.json; None: it has none. Of names that split alike, the
    first of PRE_TOKENIZERS."""
    steps = list(map(_usual_form, _steps(pre_tokenizer)))
    return next((name for name, split in PRE_TOKENIZERS.items() if _pre_tokenizers(split) == steps), None)


def _pre_tokenizers(split: str | tuple[str, ...] | None) -> list[JsonDict]:
    """The pre-tokenizers of a tokenizer.json for a value of PRE_TOKENIZERS."""
    if split is None:
        return [_BYTE_LEVEL]
    if split == DIGITS:
        return [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL]
    regexes = (split,) if isinstance(split, str) else split
    isolated = {"type": "Split", "behavior": "Isolated", "invert": False}
    return [*({**isolated, "pattern": {"Regex": regex}} for regex in regexes), {**_BYTE_LEVEL, "use_regex": False}]


def _usual_form(step: JsonView) -> JsonView:
    """A pre-tokenizer as `_pre_tokenizers` writes one that splits alike."""
    if step.get("type") == "ByteLevel":
        return {**_BYTE_LEVEL, **step, "trim_offsets": True}  # offsets are not tokens
    if (step.get("behavior"), step.get("invert")) == ("Removed", True):  # all but matches, of which texts consist
        return {**step, "behavior": "Isolated", "invert": False}
    return step


def _steps(part: JsonView | None) -> Sequence[JsonView]:
    """The normalizers or pre-tokenizers of which one of a tokenizer.json consists."""
    if part is None:
        return []
    return part.get("normalizers") or part.get("pretokenizers") or [part]


def has_space_prefix(content: JsonView) -> bool:
    """Whether a tokenizer.json adds a space before a text."""
    steps = [*_steps(content.get("normalizer")), *_steps(content.get("pre_tokenizer"))]

    def adds_space(step: JsonView) -> bool:
        scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")  # older files
        return step["type"] == "Prepend" or (step["type"] == "Metaspace" and scheme != "never")

    return any(map(adds_space, steps))


def tokenizer_json(metadata: JsonView, size: int) -> JsonDict:
    """The tokenizer.json of a file. `size`: the number of embeddings."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedError(f"tokenizer.ggml.model={json.dumps(kind)[:60]} is not supported; expected gpt2 or llama")
    tokens = _list_of(metadata, "tokens", str)
    types = _list_of(metadata, "token_type", int, default=[NORMAL] * len(tokens))
    _check_tokens(tokens, types, size)
    added = [
        {
            "id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": types[number] != USER,
        }
        for number, token in enumerate(tokens)
        if types[number] in (CONTROL, USER, UNKNOWN)
    ]  # fmt: skip
    vocabulary = {token: number for number, token in enumerate(tokens)}
    parts = _byte_level if kind == "gpt2" else _sentencepiece
    begin = _begin_token(metadata, tokens)
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "post_processor": None if begin is None else _template(begin, vocabulary[begin]),
        **parts(metadata, vocabulary, types),
    }  # fmt: skip


def _check_tokens(tokens: Sequence[str], types: Sequence[int], size: int) -> None:
    if not 0 < len(tokens) <= min(size, MAX_TOKENS) or len(types) != len(tokens):
        raise UnsupportedError(
            f"tokenizer.ggml.tokens has {len(tokens):,} tokens and tokenizer.ggml.token_type {len(types):,}, but "
            f"token_embd.weight has {size:,} rows"
        )
    if long := [number for number, token in enumerate(tokens) if not 0 < len(token) <= MAX_TOKEN_LENGTH]:
        raise UnsupportedError(f"token {long[0]} has {len(tokens[long[0]]):,} characters, not 1 to {MAX_TOKEN_LENGTH}")
    if len(set(tokens)) != len(tokens):
        numbers: dict[str, int] = {}
        second = next(number for number, token in enumerate(tokens) if numbers.setdefault(token, number) != number)
        raise UnsupportedError(f"tokens {numbers[tokens[second]]} and {second} are equal; use another file")


def _byte_level(metadata: JsonView, vocabulary: Mapping[str, int], _: Sequence[int]) -> JsonDict:
    name = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if name not in PRE_TOKENIZERS:
        expected = ", ".join(PRE_TOKENIZERS)
        raise UnsupportedError(f"tokenizer.ggml.pre={json.dumps(name)[:60]} is not supported; use one of {expected}")
    merges = [merge.split(" ") for merge in _list_of(metadata, "merges", str, default=[])]
    if wrong := [merge for merge in merges if len(merge) != 2 or "".join(merge) not in vocabulary]:
        raise UnsupportedError(f"tokenizer.ggml.merges: {' '.join(wrong[0])[:60]!r} does not result in a token")
    split = PRE_TOKENIZERS[name]
    steps = _pre_tokenizers(split)
    return {
        "normalizer": {"type": "NFC"} if split == QWEN2 else None,
        "pre_tokenizer": steps[0] if split is None else {"type": "Sequence", "pretokenizers": steps},
        "decoder": _BYTE_LEVEL,
        "model": _bpe(vocabulary, merges, ignore_merges=name in WHOLE_TOKENS_FIRST),
    }


def _sentencepiece(metadata: JsonView, vocabulary: Mapping[str, int], types: Sequence[int]) -> JsonDict:
    scores = _list_of(metadata, "scores", float)
    if len(scores) != len(vocabulary):
        raise UnsupportedError(f"tokenizer.ggml.scores has {len(scores):,} values for {len(vocabulary):,} tokens")
    pieces = {token: number for token, number in vocabulary.items() if types[number] == NORMAL}
    # A merge has the rank of the token that it results in.
    ordered = sorted(pieces, key=lambda token: (-scores[pieces[token]], pieces[token]))
    merges = [
        [token[:cut], token[cut:]]
        for token in ordered
        for cut in range(1, len(token))
        if token[:cut] in pieces and token[cut:] in pieces
    ]
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [{"type": "Prepend", "prepend": SPACE}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    unknown = next((token for token, number in vocabulary.items() if types[number] == UNKNOWN), None)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    decoded = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [*decoded, {"type": "Fuse"}, *strip]},
        "model": _bpe(vocabulary, merges, unk_token=unknown, byte_fallback=True, fuse_unk=True),
    }


def _bpe(vocabulary: Mapping[str, int], merges: Sequence[Sequence[str]], **options: object) -> JsonDict:
    defaults = {
        "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
    }  # fmt: skip
    return {"type": "BPE", **defaults, **options, "vocab": vocabulary, "merges": merges}


def _begin_token(metadata: JsonView, tokens: Sequence[str]) -> str | None:
    """The token before each document."""
    is_usual = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") in WITH_BEGIN
    if not metadata.get("tokenizer.ggml.add_bos_token", is_usual):
        return None
    return _special_token(metadata, "bos", tokens)


def _special_token(metadata: JsonView, name: str, tokens: Sequence[str]) -> str | None:
    number = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None


def _template(token: str, number: int) -> JsonDict:
    begin = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": kind}} for kind, name in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [begin, first, begin, second],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def special_token_ids(metadata: JsonView) -> JsonDict:
    """Keys of config.json: the token before a document, and the tokens that end an answer."""
    numbers = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ENDS]
    ends = sorted({number for number in numbers if isinstance(number, int)})
    begin = metadata.get("tokenizer.ggml.bos_token_id")
    ids: JsonDict = {"eos_token_id": ends} if ends else {}
    return ids | ({"bos_token_id": begin} if isinstance(begin, int) else {})


def tokenizer_config(metadata: JsonView) -> JsonDict:
    """The tokenizer_config.json of a file: its chat template, and the texts of the tokens that templates use."""
    tokens = _list_of(metadata, "tokens", str)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {key: _special_token(metadata, name, tokens) for key, name in names.items()}
    texts = {key: token for key, token in special.items() if token is not None}
    template = metadata.get("tokenizer.chat_template")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **texts}
    return settings | ({"chat_template": template} if isinstance(template, str) else {})


def _list_of(metadata: JsonView, name: str, kind: type[Item], default: list[Item] | None = None) -> list[Item]:
    values = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise UnsupportedError(f"tokenizer.ggml.{name} must be a list of {kind.__name__}; use a file with a tokenizer")
    return values
