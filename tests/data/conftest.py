"""Small data sets and the configs that read them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxmem.config.sections import Config
from jaxmem.data.records import TokenizedText

DECODER = {
    "family": "decoder",
    "layers": 1,
    "embed": 8,
    "mlp": 8,
    "heads": 1,
    "kv_heads": 1,
    "head_dim": 8,
}


def make_config(
    *,
    global_size: int = 4,
    accumulate: int = 1,
    objective: str = "next_token",
    seed: int = 0,
    vocab: int = 300,
    model: dict[str, Any] | None = None,
    **data: Any,
) -> Config:
    data = {"source": "jsonl", "sequence_length": 16, "held_out": 0.0} | data
    return Config.model_validate(
        {
            "name": "test",
            "seed": seed,
            "objective": {"name": objective},
            "model": model or DECODER | {"vocab": vocab},
            "data": data,
            "batch": {"global_size": global_size, "accumulate": accumulate},
            "train": {"steps": 1},
        }
    )


def join(records: TokenizedText) -> list[bytes]:
    """The documents, put together from their pieces."""
    found: list[bytes] = []
    for i in range(len(records)):
        piece = records.piece(i)
        part = piece.text.encode() if isinstance(piece.text, str) else piece.text
        found = [*found, part] if piece.is_first else [*found[:-1], found[-1] + part]
        if i + 1 < len(records):
            assert piece.is_last == records.piece(i + 1).is_first
    assert records.piece(len(records) - 1).is_last
    return found


@pytest.fixture(scope="session")
def joined() -> Callable[[TokenizedText], list[bytes]]:
    return join


@pytest.fixture
def config() -> Callable[..., Config]:
    return make_config


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes texts, one a line; returns the path."""

    def write(texts: list[str], name: str = "data.jsonl", **dump: Any) -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": text}, **dump) + "\n" for text in texts), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def numbered(jsonl: Callable[..., str]) -> str:
    """120 documents of 0 to 40 bytes, each naming its number."""
    return jsonl([(f"{i:03d} " * 10)[: (i * 7) % 41] for i in range(120)])


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small byte-level BPE whose template begins each text with <|begin_of_text|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the hat"] * 5, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        special_tokens=[("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))],
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)
