"""Models and datasets of the Hugging Face hub by their id, `org/name` or `org/name@revision`, through the cache of
huggingface_hub.

Reading a config fetches the settings and the tokenizer; loading the weights fetches them, only as safetensors. The name
of the directory in the cache is the commit, so the config of a run records it. Without a network the cache is used.

A part of a dataset is `hf://datasets/org/name@revision/directory` or a pattern, `hf://datasets/org/name/data/*.jsonl`.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import lru_cache
from glob import has_magic
from pathlib import Path
from tempfile import TemporaryDirectory

from jaxmem.config.base import RUNS
from jaxmem.errors import UserError, abridge, one_line

SETTINGS_FILES = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]
WEIGHT_FILES = ["model*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"]
FILES = (".json", ".yaml", ".yml", ".toml")
HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")
DATASETS = "hf://datasets/"
DATASET_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w.-]+))?(?:/(.*))?")
SPLIT_PATTERN = re.compile(
    r"(?:^|[/_. -])(train(?:ing)?|test(?:ing)?|validation|valid|val|dev|eval(?:uation)?)(?=[/_. 0-9-])", re.IGNORECASE
)


def is_id(name: str) -> bool:
    """Whether a name can only be an id of the hub: it has the form of an id, and no directory `org` exists here.
    `runs/name` is always a run, also one that does not exist."""
    path = Path(name)
    is_local = path.parent.exists() or path.parts[:1] == (RUNS,)
    return not is_gguf(name) and bool(HUB_ID.fullmatch(name)) and path.suffix not in FILES and not is_local


def is_gguf(name: str | os.PathLike[str]) -> bool:
    """Whether a name is that of a GGUF file."""
    return Path(name).suffix == ".gguf"


def local_directory(name: str, key: str) -> str:
    """The directory of a model: `name`, or for an id or a GGUF file its directory in the cache."""
    if is_gguf(name):
        from jaxmem.config.gguf import gguf_directory

        return gguf_directory(name, key)
    if not is_id(name):
        return name
    hub_id = HUB_ID.fullmatch(name)
    assert hub_id is not None
    return _fetch(hub_id[1], hub_id[2], SETTINGS_FILES, f"{key}={name}")


def is_tokenizer_of(tokenizer: str, directory: str | os.PathLike[str]) -> bool:
    """Whether `data.tokenizer` names the tokenizer of a model's directory: the directory, or the file in it."""
    place = Path(tokenizer).expanduser()
    place = place.parent if place.name == "tokenizer.json" else place
    return place.absolute() == Path(directory).expanduser().absolute()  # links stay: those of the cache lead elsewhere


def cached_id(directory: Path) -> tuple[str, str] | None:
    """The id and the commit of a directory in the cache: .../models--org--name/snapshots/COMMIT."""
    folder = directory.parent.parent.name
    if directory.parent.name != "snapshots" or not folder.startswith("models--"):
        return None
    return folder.removeprefix("models--").replace("--", "/", 1), directory.name


def fetch_weights(directory: Path) -> None:
    """Fetches the weights of a directory in the cache."""
    if (id_and_commit := cached_id(directory)) is not None:
        repository, commit = id_and_commit
        _fetch(repository, commit, WEIGHT_FILES, repository)


def is_dataset(path: str) -> bool:
    """Whether `data.path` names a dataset of the hub. An id with a suffix, org/name-1.5, needs `hf://datasets/`."""
    return path.startswith(DATASETS) or (is_id(path) and not Path(path).suffix)


@lru_cache
def fetched_files(path: str, suffixes: Sequence[str]) -> list[Path]:
    """Fetches the files of a dataset that `dataset_files` names. Returns their paths in the cache."""
    repository, revision, patterns = _dataset(path, suffixes)
    directory = Path(_fetch(repository, revision, patterns, f"data.path={path}", "dataset"))
    names = (file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file())
    return [directory / name for name in _matching(path, repository, names, patterns)]


@dataclass(frozen=True)
class DatasetFiles:
    """The names of the files of a dataset at a commit, none of which is fetched yet."""

    path: str  # data.path
    repository: str
    commit: str
    names: tuple[str, ...]

    def new_directory(self) -> TemporaryDirectory[str]:
        """A directory next to the cache, for files that are deleted after use."""
        from huggingface_hub import constants

        place = Path(constants.HF_HOME)
        place.mkdir(parents=True, exist_ok=True)
        return TemporaryDirectory(prefix="streaming-", dir=place)

    def fetch(self, name: str, directory: str) -> Path:
        """The path of a file in the cache; a file that is not there is fetched into `directory`."""
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        cached = try_to_load_from_cache(self.repository, name, revision=self.commit, repo_type="dataset")
        if isinstance(cached, str):
            return Path(cached)
        with _explaining_errors(self.repository, self.commit, f"data.path={self.path}", "dataset"):
            file = hf_hub_download(
                self.repository, name, repo_type="dataset", revision=self.commit, local_dir=directory
            )
        return Path(file)


@lru_cache
def dataset_files(path: str, suffixes: Sequence[str]) -> DatasetFiles:
    """The files of a dataset that end with one of `suffixes`, or match the pattern of `path`."""
    from huggingface_hub import HfApi

    repository, revision, patterns = _dataset(path, suffixes)
    with _explaining_errors(repository, revision, f"data.path={path}", "dataset"):
        info = HfApi().dataset_info(repository, revision=revision)
    names = (file.rfilename for file in info.siblings or ())
    return DatasetFiles(path, repository, str(info.sha), _matching(path, repository, names, patterns))


def _dataset(path: str, suffixes: Sequence[str]) -> tuple[str, str | None, list[str]]:
    """The id, the revision and the patterns of files of a dataset. `*` includes directories, as in the hub's tools."""
    dataset_id = DATASET_ID.fullmatch(path.removeprefix(DATASETS))
    if dataset_id is None:
        raise UserError(f"data.path={path} is not a dataset; use {DATASETS}org/name or {DATASETS}org/name/*.jsonl")
    inside = (dataset_id[3] or "").rstrip("/")
    is_pattern = has_magic(inside) or bool(Path(inside).suffix)
    patterns = [inside] if is_pattern else [f"{inside}/*{end}".lstrip("/") for end in suffixes or ("",)]
    return dataset_id[1], dataset_id[2], patterns


def _matching(path: str, repository: str, names: Iterable[str], patterns: Sequence[str]) -> tuple[str, ...]:
    """The files that match a pattern, of one split."""
    in_order = sorted(names)
    files = tuple(name for name in in_order if any(fnmatch(name, pattern) for pattern in patterns))
    if not files:
        raise UserError(f"data.path={path}: no file matches {' or '.join(patterns)}; it has {abridge(in_order)}")
    refuse_splits(path, files, f"{DATASETS}{repository}/")
    return files


def refuse_splits(path: str, names: Sequence[str], root: str = "") -> None:
    """Refuses files of several splits, such as train.jsonl and val.jsonl. Only the parts of their names below their
    common directory count. `path`: `data.path`; `root`: what it has before a name."""
    below = len(os.path.commonpath(names))
    matches = (match for name in names if (match := SPLIT_PATTERN.search(name, below)))
    splits = {match[1][:2].lower(): match for match in matches}  # synonyms begin with the same two letters
    if len(splits) < 2:
        return
    example = splits.get("tr") or min(splits.items())[1]
    name = example.string
    folder, slash, _ = name[example.end() :].partition("/")
    pattern = Path(name).with_name(f"*{example[1]}*{Path(name).suffix}").as_posix()
    use = name[: example.end()] + folder if slash else pattern
    words = ", ".join(sorted(split[1] for split in splits.values()))
    raise UserError(f"data.path={path} contains the splits {words}; set one, for example data.path={root}{use}")


def _fetch(repository: str, revision: str | None, patterns: list[str], what: str, kind: str = "model") -> str:
    from huggingface_hub import snapshot_download

    with _explaining_errors(repository, revision, what, kind):
        others = ["*/*"] if kind == "model" else None
        return snapshot_download(
            repository, repo_type=kind, revision=revision, allow_patterns=patterns, ignore_patterns=others
        )


@contextmanager
def _explaining_errors(repository: str, revision: str | None, what: str, kind: str) -> Iterator[None]:
    """Errors of the hub as errors of the user. `what`: the setting that names the repository."""
    from huggingface_hub import constants as hub
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        page = f"{hub.ENDPOINT}/{'' if kind == 'model' else 'datasets/'}{repository}"
        raise UserError(f"{what}: requires permission; request it at {page}, and set HF_TOKEN to your token") from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{what}: the {kind} has no revision {revision}; leave it out for the newest") from None
    except errors.RepositoryNotFoundError:
        use = "check the name, or set HF_TOKEN if it is private"
        raise UserError(f"{what} is neither a local path nor a {kind} on the hub; {use}") from None
    except errors.HFValidationError:
        use = "use a path, or org/name of the hub"
        raise UserError(f"{what} is neither a local path nor a valid {kind} id; {use}") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise UserError(
            f"{what} is neither a local path nor in the cache ({hub.HF_HUB_CACHE}), and the hub cannot be"
            f" reached; copy the {kind}'s files to a directory, and use its path"
        ) from None
    except (errors.HfHubHTTPError, OSError) as error:  # an answer such as 429, or a full disk
        use = f"try again, or use a local copy of the {kind}"
        raise UserError(f"{what}: the {kind} cannot be fetched: {one_line(error)}; {use}") from error
    except Exception as error:  # of the HTTP client, another one in each version of huggingface_hub
        use = f"try again, or copy the {kind}'s files here"
        raise UserError(f"{what}: the hub cannot be reached: {one_line(error)}; {use}") from error
