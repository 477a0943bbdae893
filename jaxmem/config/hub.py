"""Models and datasets of the Hugging Face hub by their id, `org/name` or `org/name@revision`, through the cache of
huggingface_hub.

Reading a config fetches the settings and the tokenizer; loading the weights fetches them, only as safetensors. The name
of the directory in the cache is the commit, so the config of a run records it. Without a network the cache is used.

A part of a dataset is `hf://datasets/org/name@revision/directory` or a pattern, `hf://datasets/org/name/data/*.jsonl`.
"""

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import lru_cache
from glob import has_magic
from pathlib import Path

from jaxmem.errors import UserError, one_line

SETTINGS = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]
WEIGHTS = ["model*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"]
FILES = (".json", ".yaml", ".yml")
ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")
DATASETS = "hf://datasets/"
DATASET = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w.-]+))?(?:/(.*))?")
SPLIT = re.compile(r"(?:^|[/_.-])(train|test|validation|valid|dev|eval)(?=[/_.-])")


def is_id(name: str) -> bool:
    """Whether a name can only be an id of the hub: it has the form of an id, and no directory `org` exists here."""
    path = Path(name)
    return bool(ID.fullmatch(name)) and path.suffix not in FILES and not path.parent.exists()


def local_directory(name: str, key: str) -> str:
    """The directory of a model with its settings and tokenizer: `name`, or for an id its directory in the cache."""
    if not is_id(name):
        return name
    found = ID.fullmatch(name)
    assert found is not None
    return _fetch(found[1], found[2], SETTINGS, f"{key}={name}")


def fetch_weights(directory: Path) -> None:
    """Fetches the weights of a directory in the cache: .../models--org--name/snapshots/COMMIT."""
    if directory.parent.name == "snapshots" and directory.parent.parent.name.startswith("models--"):
        repository = directory.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
        _fetch(repository, directory.name, WEIGHTS, repository)


def is_dataset(path: str) -> bool:
    """Whether `data.path` names a dataset of the hub. An id with a suffix, org/name-1.5, needs `hf://datasets/`."""
    return path.startswith(DATASETS) or (is_id(path) and not Path(path).suffix)


@lru_cache
def dataset_path(path: str, suffixes: Sequence[str]) -> str:
    """Fetches the files of a dataset that end with one of `suffixes`. Returns their directory in the cache, or the
    pattern of `path` there."""
    found = DATASET.fullmatch(path.removeprefix(DATASETS))
    if found is None:
        raise UserError(
            f"data.path={path} is not a dataset of the hub; use {DATASETS}org/name or {DATASETS}org/name/*.jsonl"
        )
    repository, revision, inside = found[1], found[2], (found[3] or "").rstrip("/")
    is_pattern = has_magic(inside) or bool(Path(inside).suffix)
    patterns = [inside] if is_pattern else [f"{inside}/*{end}".lstrip("/") for end in suffixes or ("",)]
    directory = Path(_fetch(repository, revision, patterns, f"data.path={path}", "dataset"))
    every = (file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file())
    files = [name for name in every if any(fnmatch(name, pattern) for pattern in patterns)]
    if not files:
        raise UserError(f"data.path={path}: the dataset has no file that matches {' or '.join(patterns)}")
    splits = {split[1]: name for name in files if (split := SPLIT.search(name))}
    if len(splits) > 1:
        first, example = max(splits.items())
        use = (Path(example).parent / f"*{first}*{Path(example).suffix}").as_posix()
        raise UserError(
            f"data.path={path} contains the splits {', '.join(sorted(splits))}; set one, for example "
            f"data.path={DATASETS}{repository}/{use}"
        )
    return str(directory / inside)


def _fetch(repository: str, revision: str | None, patterns: list[str], what: str, kind: str = "model") -> str:
    from huggingface_hub import constants as hub
    from huggingface_hub import errors, snapshot_download

    try:
        others = ["*/*"] if kind == "model" else None
        return snapshot_download(
            repository, repo_type=kind, revision=revision, allow_patterns=patterns, ignore_patterns=others
        )
    except errors.GatedRepoError:
        page = f"{hub.ENDPOINT}/{'' if kind == 'model' else 'datasets/'}{repository}"
        raise UserError(f"{what}: requires permission; request it at {page}, and set HF_TOKEN to your token") from None
    except errors.RevisionNotFoundError:
        raise UserError(
            f"{what}: the {kind} has no revision {revision}; leave out @{revision} for the newest"
        ) from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{what} is neither a local path nor a {kind} on the hub; check the name, or set HF_TOKEN if it is private"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise UserError(
            f"{what} is neither a local path nor in the cache ({hub.HF_HUB_CACHE}), and the hub cannot be"
            f" reached; copy the {kind}'s files to a directory, and use its path"
        ) from None
    except errors.HFValidationError:
        raise UserError(
            f"{what} is neither a local path nor a valid {kind} id; use a path, or org/name of the hub"
        ) from None
    except (errors.HfHubHTTPError, OSError) as error:
        raise UserError(
            f"{what}: unexpected answer of the hub: {one_line(error)}; try again, or use a local directory"
        ) from error
