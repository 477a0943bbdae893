"""Models of the Hugging Face hub by their id, `org/name` or `org/name@revision`, through the cache of huggingface_hub.

Reading a config fetches the settings and the tokenizer; loading the weights fetches them, only as safetensors. The name
of the directory in the cache is the commit, so the config of a run records it. Without a network the cache is used.
"""

import re
from pathlib import Path

from jaxmem.errors import UserError, one_line

SETTINGS = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]
WEIGHTS = ["model*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"]
FILES = (".json", ".yaml", ".yml")
ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")


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
    return _fetch(found[1], found[2], SETTINGS, f"{key}: {name}")


def fetch_weights(directory: Path) -> None:
    """Fetches the weights of a directory in the cache: .../models--org--name/snapshots/COMMIT."""
    if directory.parent.name == "snapshots" and directory.parent.parent.name.startswith("models--"):
        repository = directory.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
        _fetch(repository, directory.name, WEIGHTS, repository)


def _fetch(repository: str, revision: str | None, patterns: list[str], what: str) -> str:
    from huggingface_hub import constants as hub
    from huggingface_hub import errors, snapshot_download

    try:
        return snapshot_download(repository, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"])
    except errors.GatedRepoError:
        page = f"{hub.ENDPOINT}/{repository}"
        raise UserError(f"{what}: needs permission; ask for it at {page}, and set HF_TOKEN to your token") from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{what}: the model has no revision {revision}; leave out @{revision} for the newest") from None
    except errors.RepositoryNotFoundError:
        raise UserError(
            f"{what}: is neither a directory here nor a model of the hub; a private model needs HF_TOKEN"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise UserError(
            f"{what}: is neither a directory here nor in the cache ({hub.HF_HUB_CACHE}), and the hub cannot be"
            " reached; copy the model's files to a directory and use its path instead"
        ) from None
    except errors.HFValidationError:
        raise UserError(f"{what}: is neither a directory here nor a valid id of the hub, org/name") from None
    except (errors.HfHubHTTPError, OSError) as error:
        raise UserError(f"{what}: the hub does not answer as expected: {one_line(error)}") from error
