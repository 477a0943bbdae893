"""Models of the hub by their id, from a local server that speaks its protocol, and from the cache without it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmem.config import load_config
from jaxmem.config.hub import is_id, local_directory
from jaxmem.config.methods import is_model
from jaxmem.errors import UserError
from tests.hf.hub_server import COMMIT, serving

# Loads each config, then the weights of the first; prints the directory or the error of each, and a sum of weights.
PROGRAM = """
import json, sys
from jaxmem.config import load_config
from jaxmem.config.methods import is_model
from jaxmem.errors import UserError

found = []
for name in sys.argv[1:]:
    try:
        found.append(load_config({"name": "x", "model": {"hf": name}, "train": {"steps": 1}}).model.hf)
    except UserError as error:
        found.append(str(error))
        continue
    assert is_model(name)
try:
    from jaxmem.hf.tensors import Tensors

    found.append(min(Tensors(found[0]).entries))
except UserError as error:
    found.append(str(error))
print(json.dumps(found))
"""


def answers(environment: dict[str, str], *names: str, program: str = PROGRAM) -> list[str]:
    own = {**os.environ, "HF_HUB_OFFLINE": "0", **environment}
    done = subprocess.run([sys.executable, "-c", program, *names], env=own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.exhaustive
def test_from_the_hub_then_from_the_cache(tmp_path: Path, compare) -> None:
    for name in ("tiny", "no-weights"):
        compare.write_directory("llama3", tmp_path / "hub/org" / name)
    weights = tmp_path / "hub/org/no-weights/model.safetensors"
    weights.rename(weights.with_suffix(".pth"))
    with serving(tmp_path / "hub") as (endpoint, seen):
        environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home")}
        bare = answers(environment, "org/no-weights", "org/tiny@absent", "org/absent", "gated/model")
        assert not any("pth" in line for line in seen)
        before = len(seen)
        directory, _, tensor = answers(environment, f"org/tiny@{COMMIT}", "org/tiny")
        fetched = [line for line in seen[before:] if line.startswith("GET") and "/resolve/" in line]
    assert directory == bare[0].replace("no-weights", "tiny")
    assert Path(directory).name == COMMIT
    assert tensor == "lm_head.weight"
    assert [line.rpartition("/")[2] for line in fetched] == ["config.json", "model.safetensors"]
    assert ["no revision absent" in bare[1], "HF_TOKEN" in bare[2], "permission" in bare[3]] == [True] * 3
    assert "contains no *.safetensors" in bare[4]
    without, absent, again = answers(environment, "org/tiny", "org/absent")  # the server is gone
    assert (without, again) == (directory, tensor)
    assert str(tmp_path / "home") in absent
    assert "copy" in absent


def test_what_is_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    ids = ["org/name", "org/na.me-2@main"]
    paths = [
        "name",
        "configs/name",
        "./org/name",
        "/org/name",
        "org/name/more",
        "org/name.yaml",
        "org/name.toml",
        "~/name",
    ]
    paths.append("runs/name")  # the default directory of runs, which does not exist
    assert [name for name in ids + paths if is_id(name)] == ids
    assert [local_directory(name, "model.hf") for name in paths] == paths
    assert [is_model(name) for name in (*ids, "configs/name")] == [True, True, False]
    with pytest.raises(UserError, match=r"model.hf=org/na--me .* nor a valid model id"):
        local_directory("org/na--me", "model.hf")
    with pytest.raises(UserError, match=r"model.hf=org/name .* cannot be reached"):
        load_config({"name": "x", "model": {"hf": "org/name"}, "train": {"steps": 1}})


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied")])
def test_an_error_of_the_disk_is_not_reported_as_one_of_the_network(
    error: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(UserError, match=rf"model.hf=org/name: the model cannot be fetched: .*{error.strerror}"):
        local_directory("org/name", "model.hf")


DATA = """
import json, sys
from jaxmem.config import load_config
from jaxmem.data.loader import Loader
from jaxmem.errors import UserError

found = []
for path in sys.argv[1:]:
    data = {"source": "jsonl", "path": path, "sequence_length": 16, "held_out": 0, "shuffle": False}
    model = {"vocab": 257, "layers": 1, "embed": 8, "mlp": 8, "heads": 1, "kv_heads": 1, "head_dim": 8}
    cfg = load_config({"name": "x", "model": model, "data": data, "batch": {"global_size": 2}, "train": {"steps": 1}})
    try:
        with Loader(cfg) as loader:
            next(loader)
            state = loader.state()
            second = next(loader)["inputs"]
            loader.restore(state)
            assert (next(loader)["inputs"] == second).all()
            found.append(bytes(second[0, 0].clip(0, 255).astype("uint8").tolist()).decode("latin1"))
    except UserError as error:
        found.append(str(error))
print(json.dumps(found))
"""


@pytest.mark.exhaustive
def test_a_dataset_of_the_hub_then_of_the_cache(tmp_path: Path) -> None:
    for split in ("train-0", "train-1", "test-0"):
        file = tmp_path / f"hub/org/texts/data/{split}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps({"text": f"{split} {number}"}) + "\n" for number in range(9)))
    (tmp_path / "hub/org/texts/README.md").write_text("texts")
    train = "hf://datasets/org/texts/data/*train*.jsonl"
    with serving(tmp_path / "hub") as (endpoint, seen):
        environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home")}
        first, more, absent, none = answers(
            environment, train, "org/texts", "hf://datasets/org/texts@absent", "org/texts@main", program=DATA
        )
        assert not any("README" in line for line in seen)
    assert "train-" in first
    assert "splits test, train" in more
    assert train in more
    assert "dataset has no revision absent" in absent
    assert none == more.replace("org/texts contains", "org/texts@main contains")
    without, missing = answers(environment, train, "org/others", program=DATA)  # the server is gone
    assert without == first
    assert "copy the dataset" in missing


STREAM = """
import json, sys
from jaxmem.config import load_config
from jaxmem.data.loader import Loader
from jaxmem.errors import UserError

found = []
for path in sys.argv[1:]:
    data = {"source": "jsonl", "path": path, "sequence_length": 16, "held_out": 0, "streaming": True, "epochs": 1}
    model = {"vocab": 257, "layers": 1, "embed": 8, "mlp": 8, "heads": 1, "kv_heads": 1, "head_dim": 8}
    cfg = load_config({"name": "x", "model": model, "data": data, "batch": {"global_size": 2}, "train": {"steps": 1}})
    try:
        with Loader(cfg) as loader:
            print("first", next(loader)["mask"].shape, len(list(loader)), file=sys.stderr)
        found.append("read")
    except UserError as error:
        found.append(str(error))
print(json.dumps(found))
"""


@pytest.mark.exhaustive
def test_a_dataset_is_streamed_file_by_file(tmp_path: Path) -> None:
    place = tmp_path / "hub/org/texts/data"
    place.mkdir(parents=True)
    for file in range(5):
        lines = (json.dumps({"text": f"{file} {number}"}) + "\n" for number in range(50))
        (place / f"train-{file}.jsonl").write_text("".join(lines))
    with serving(tmp_path / "hub") as (endpoint, seen):
        environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home")}
        names = (
            "org/texts",
            "org/absent",
            "hf://datasets/org/texts/*test*",
            "gated/texts",
            "hf://datasets/org/texts@v1",
        )
        read, absent, split, gated, revision = answers(environment, *names, program=STREAM)
        fetched = [line for line in seen if line.startswith("GET") and "/resolve/" in line]
    assert read == "read"
    assert sorted(line.rpartition("/")[2] for line in fetched) == [f"train-{file}.jsonl" for file in range(5)]
    assert not list((tmp_path / "home").rglob("*.jsonl"))  # each file is deleted after it has been read
    for error, text in (
        (absent, "neither a local path nor a dataset on the hub"),
        (split, "data/train-0.jsonl"),
        (gated, "requires permission"),
        (revision, "no revision v1"),
    ):
        assert text in error
        assert "\n" not in error
    [offline] = answers(environment, "org/texts", program=STREAM)  # the server is gone
    assert "cannot be reached" in offline
    assert "\n" not in offline
