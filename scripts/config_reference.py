"""The reference of the config, from its schema: docs/config.md; and configs/README.md, a table of the files there.

python scripts/config_reference.py            # writes the pages
python scripts/config_reference.py --check    # names the pages that are out of date; exit code 1 if there are any
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from jaxmem.config.recompute import NUMBERED
from jaxmem.typing import JsonDict

DOCS = Path(__file__).parents[1] / "docs"

CONFIG = """# Config

Every key of a config file. `jaxmem train CONFIG section.key=value` sets a key on the command line. An unknown key, a
wrong value or a key without effect is an error before the run starts. `jaxmem schema` prints the keys as a JSON schema,
for completion in editors. `python scripts/config_reference.py` writes this page.
"""


def config_page() -> str:
    """docs/config.md: a table for each section of a config."""
    from jaxmem.config.optimizers import OPTIMIZERS
    from jaxmem.config.schema import json_schema

    schema = json_schema()
    sections = schema["$defs"]
    parts = [CONFIG, *[*_keys("", {"": schema, **sections})][1:]]
    for name, key in schema["properties"].items():
        if name == "model":
            for family, at in key["discriminator"]["mapping"].items():
                parts += [f"## model, family: {family}", *_keys(at.rpartition("/")[2], sections)]
            for part in ("rope", "latent", "experts", "quantization"):
                parts += [f"## model.{part}", *_keys(part.capitalize(), sections)]
        elif at := _section(key):
            parts += [f"## {name}", *_keys(at, sections)]
        if name == "optimizer":
            rows = [
                (f"`{name}`", entry.summary, _settings({"learning_rate": entry.learning_rate} | entry.fields))
                for name, entry in OPTIMIZERS.items()
            ]
            parts.append(
                _table(("optimizer.name", "method, bytes per parameter", "hyperparameters and defaults"), rows)
            )
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _keys(name: str, sections: JsonDict) -> Iterator[str]:
    section = sections[name]
    yield " ".join(section["description"].split())
    required = section.get("required", ())
    rows = []
    for key, value in section["properties"].items():
        if not _section(value) and key != "model":
            default = f"`{_value(value['default'])}`" if "default" in value else "by `preset` or `hf`"
            description = value["description"].partition("; only with optimizer.name")[0]  # the table below has that
            rows.append((f"`{key}`", _type(value), "required" if key in required else default, description))
    yield _table(("key", "values", "default", ""), rows)


def _section(key: JsonDict) -> str:
    """The name of a key's section, if it is one."""
    refs = [key, *key.get("anyOf", ())]
    return next((ref["$ref"].rpartition("/")[2] for ref in refs if "$ref" in ref and "Save" not in ref["$ref"]), "")


def _type(value: JsonDict) -> str:
    if "enum" in value or "const" in value:
        return ", ".join(
            f"`{_value(choice)}`" for choice in value.get("enum", [value.get("const")]) if choice is not None
        )
    if "anyOf" in value:
        return ", ".join(_type(kind) for kind in value["anyOf"] if kind.get("type") != "null")
    if "$ref" in value:
        return "`{save: [...]}`" if value["$ref"].endswith("Save") else "sections of the kind of `data`"
    limits = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limit = ",".join(f" {sign} {value[key]:g}" for key, sign in limits.items() if key in value)
    match value["type"]:
        case "array":
            items = value.get("prefixItems", [value["items"]] if "items" in value else [])
            return f"list of {_type(items[0])}"
        case "object":
            return f"`{{text: {value['additionalProperties']['type']}}}`"
        case "string":
            return {NUMBERED: "`every_K`, `slots_K`"}.get(value.get("pattern"), "text")
        case kind:
            return {"boolean": "`true`, `false`", "null": "`null`"}.get(kind, f"{kind}{limit}")


def _value(value: object) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()


def _settings(fields: JsonDict) -> str:  # without `kernel`: its default in a config is that of the section
    return ", ".join(f"`{key}: {_value(value)}`" for key, value in fields.items() if key != "kernel")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)


CONFIGS = """# Configs

Each file begins with its commands, the data that it needs and the memory of its plan. DIR is a Hugging Face directory:
without `model='{hf: DIR}'` weights are random. Planned memory is that of one GPU, as `jaxmem plan CONFIG --target GPU`
compiles it; nothing has run on a GPU yet. `python scripts/config_reference.py` writes this page from the files.
"""


def configs_page() -> str:
    """configs/README.md: the first line of each config, the GPUs of its plan, and the memory that it needs."""
    rows = []
    for file in sorted((DOCS.parent / "configs").glob("*.yaml")):
        head = " ".join(line.lstrip("# ") for line in file.read_text(encoding="utf-8").split("\n\n")[0].splitlines())
        planned = re.search(r"Planned: ([\d.]+) GiB", head, re.IGNORECASE)
        target = re.search(r"--target (\S+)", head)
        place = f"`{target[1]}`" if target else "this machine"
        about = re.split(r"\. |\.? +jaxmem ", head)[0]
        rows.append((f"[{file.stem}]({file.name})", about, place, planned[1] if planned and target else ""))
    return f"{CONFIGS}\n{_table(('config', 'what it trains', 'GPUs', 'planned, GiB per GPU'), rows)}\n"


def pages() -> dict[str, str]:
    """The text of each file, by its name from docs/."""
    return {"config.md": config_page(), "../configs/README.md": configs_page()}


def main(*arguments: str) -> int:
    texts = pages()
    stale = [name for name, text in texts.items() if (DOCS / name).read_text(encoding="utf-8") != text]
    if arguments == ("--check",):
        for name in stale:
            file = (DOCS / name).resolve().relative_to(DOCS.parent)
            print(f"{file} is out of date; run python scripts/config_reference.py")
        return int(bool(stale))
    for name in stale:
        (DOCS / name).write_text(texts[name], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
