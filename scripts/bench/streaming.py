"""Time and bytes until the first batch of a dataset of the hub, fetched completely and with `data.streaming`.

    python -m scripts.bench.streaming [MEGABYTES_PER_FILE]

50 JSONL files are served on this machine, at the speed of the machine.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.hf.hub_server import serving

FILES = 50
PROGRAM = """
import json, sys, time
from jaxmem.config import load_config
from jaxmem.data.loader import Loader
import grain.experimental, huggingface_hub

data = {"source": "jsonl", "path": "org/texts", "sequence_length": 1024, "streaming": sys.argv[1] == "true"}
model = {"vocab": 257, "layers": 1, "embed": 8, "mlp": 8, "heads": 1, "kv_heads": 1, "head_dim": 8}
cfg = load_config({"name": "x", "model": model, "data": data, "train": {"steps": 1}})
start = time.perf_counter()
with Loader(cfg) as loader:
    next(loader)
    print(time.perf_counter() - start)
"""


def main(megabytes: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory, "hub/org/texts")
        place.mkdir(parents=True)
        for file in range(FILES):
            line = json.dumps({"text": f"file {file:02d} " + "the cat sat on the mat " * 43}) + "\n"
            (place / f"{file:02d}.jsonl").write_text(line * (megabytes * 10**6 // len(line)))
        with serving(place.parent.parent) as (endpoint, seen):
            for streaming in ("false", "true"):
                seen.clear()
                environment = {"HF_ENDPOINT": endpoint, "HF_HOME": f"{directory}/{streaming}", "HF_HUB_OFFLINE": "0"}
                command = [sys.executable, "-c", PROGRAM, streaming]
                done = subprocess.run(
                    command, env={**os.environ, **environment}, capture_output=True, text=True, check=True
                )
                files = sum(line.startswith("GET") and ".jsonl" in line for line in seen)
                print(f"streaming={streaming}: {float(done.stdout):.1f} s, {files} files, {files * megabytes} MB")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
