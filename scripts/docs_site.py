"""What the site of the documentation has besides the pages in docs/: the Python API, from docstrings, and a page for
each file of the repository that a page links to. mkdocs.yml names this file as a hook; `make docs` builds the site.
"""

import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
API = {  # the public names of each module; None: its `__all__`
    "jaxmem": None,
    "jaxmem.optim": None,
    "jaxmem.quant": None,
    "jaxmem.adapters": None,
    "jaxmem.hf": None,
    "jaxmem.kernels": None,
    "jaxmem.models.losses": ("cross_entropy",),
    "jaxmem.distributed.communicator": ("Communicator",),
}
LINK = re.compile(r"\]\(([^)#\s:]+)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".sh": "sh", ".yaml": "yaml"}


# ---------------------------------------------------------------- the Python API


def api_pages() -> dict[str, str]:
    """The Markdown of a page for each module, by its name in docs/."""
    return {f"api/{name.removeprefix('jaxmem.')}.md": module_page(name, names) for name, names in API.items()}


def module_page(name: str, names: tuple[str, ...] | None) -> str:
    module = importlib.import_module(name)
    values = {key: getattr(module, key) for key in names or module.__all__}
    entries = [entry(key, value) for key, value in values.items() if callable(value)]
    return "\n\n".join([f"# {name}", inspect.getdoc(module) or "", *entries])


def entry(name: str, value: Callable[..., Any]) -> str:
    """A directive of mkdocstrings; of an optimizer that the registry makes when it is named, its signature and text."""
    module = importlib.import_module(value.__module__)
    if not hasattr(module, value.__qualname__):
        signature = str(inspect.signature(value)).replace(", ", ",\n    ").replace("(", "(\n    ", 1)
        return f"## {name}\n\n```python\n{name}{signature}\n```\n\n{with_example(inspect.getdoc(value) or '')}"
    return f"::: {value.__module__}.{value.__qualname__}\n    options: {{heading: {name}, toc_label: {name}}}"


def with_example(docstring: str) -> str:
    """A docstring with its example in a block of code."""
    text, mark, example = docstring.partition(">>> ")
    return f"{text}\n```pycon\n{mark}{example}\n```\n" if mark else text


# ---------------------------------------------------------------- files of the repository


def source_page(file: Path) -> str:
    """A file of the repository as Markdown. Pages of the repository are copied, other files are blocks of code."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    return f"# {file.relative_to(ROOT)}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{text}````\n"


def site_path(file: Path) -> str:
    """Where a file of the repository is among the pages."""
    name = f"source/{file.relative_to(ROOT)}"
    return name if file.suffix == ".md" else f"{name}.md"


def outside(page: Path, link: str) -> Path | None:
    """The file of the repository that a link leads to, if it is not below docs/."""
    file = Path(os.path.normpath(page.parent / link))
    inside = not file.is_relative_to(ROOT) or file.is_relative_to(ROOT / "docs")
    return None if inside or not file.is_file() else file


def linked_files() -> Iterator[Path]:
    """The files outside docs/ that pages link to, pages of the repository among them."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    seen: set[Path] = set()
    while pages:
        page = pages.pop()
        for link, _ in LINK.findall(page.read_text(encoding="utf-8")):
            if (file := outside(page, link)) and file not in seen:
                seen.add(file)
                yield file
                pages += [file] if file.suffix == ".md" else []


# ---------------------------------------------------------------- hooks of mkdocs


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    generated = api_pages() | {site_path(file): source_page(file) for file in linked_files()}
    for name, text in generated.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files of the repository lead to their pages. The page `api.md` lists those of the modules."""
    name = page.file.src_uri
    if name.startswith("api/"):
        return markdown
    if name == "api.md":
        markdown += "\n".join(f"- [{module}](api/{module.removeprefix('jaxmem.')}.md)" for module in API)
    written = ROOT / name.removeprefix("source/") if name.startswith("source/") else ROOT / "docs" / name

    def link(match: re.Match[str]) -> str:
        file = outside(written, match[1])
        path = ROOT / "docs" / site_path(file) if file else Path(os.path.normpath(written.parent / match[1]))
        return f"]({os.path.relpath(path, (ROOT / 'docs' / name).parent)}{match[2] or ''})"

    return LINK.sub(link, markdown)
