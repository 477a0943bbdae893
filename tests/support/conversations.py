"""A tokenizer with a chat template, and a file of conversations, as a user may have them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.demo_tokenizer import train_tokenizer

SAMPLE_BYTES = 2 << 20  # bytes of text that the tokenizer is trained on
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|user|>", "<|assistant|>")  # the end of a turn, and the beginnings of turns


def write_tokenizer(files: Sequence[Path], place: Path, vocab: int = 512) -> None:
    """Writes tokenizer.json, and the chat template next to it."""
    place.mkdir(parents=True, exist_ok=True)
    train_tokenizer(files, vocab, SPECIAL, SAMPLE_BYTES // len(files)).save(str(place / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0]}
    (place / "tokenizer_config.json").write_text(json.dumps(settings) + "\n")
    (place / "chat_template.jinja").write_text(TEMPLATE)


def write_conversations(answers: Mapping[str, str], file: Path) -> None:
    """JSONL with `messages`, as OpenAI's API has them."""
    with file.open("w", encoding="utf-8") as opened:
        for question, answer in answers.items():
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            opened.write(json.dumps({"messages": messages}) + "\n")
