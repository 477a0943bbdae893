"""Commands and configs in README and docs are valid, and links lead somewhere. Nothing is run here."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import typer
import yaml

from jaxmem.cli import app
from jaxmem.config import load_config
from jaxmem.planning.targets import parse_target
from tests.docs.conftest import PAGES, own_scripts

ROOT = Path(__file__).parents[2]
COMMANDS = typer.main.get_command(app)
ANY = ROOT / "configs/demo.yaml"  # in the place of a config that the reader would write


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """The command and what it was given, as the command line understands it; nothing is run."""
    command: Any = COMMANDS
    while hasattr(command, "commands"):
        name, *words = words
        command = command.commands[name]
    return name, command.make_context(name, words).params


def with_what_is_here(settings: list[str], place: Path) -> list[str]:
    """Without the Hugging Face directory that a reader has; a chat template of it is another."""
    here = [setting for setting in settings if not (setting.startswith("model=") and "hf:" in setting)]
    if len(here) < len(settings) and "chat" in " ".join(here):
        (place / "chat.jinja").write_text("{{ messages }}")
        here.append(f"data.chat_template={place}/chat.jinja")
    return here


def test_a_command_is_one(words: list[str], tmp_path: Path) -> None:
    program, *rest = words
    if program == "make":
        assert re.search(rf"^{rest[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "python":
        file = f"{rest[1].replace('.', '/')}.py" if rest[0] == "-m" else rest[0]
        assert (ROOT / file).is_file() or any(file in own_scripts(page) for page in PAGES)
    else:
        name, given = parsed(rest)
        if (config := given.get("config")) is not None:
            file = ROOT / config
            assert file.is_file() or not str(config).startswith("configs/"), f"{name} {config}"
            load_config(file if file.is_file() else ANY, with_what_is_here(given.get("overrides") or [], tmp_path))
        if target := given.get("target") if name in ("plan", "fit") else None:
            assert target == "list" or parse_target(target)


def test_what_a_page_shows_of_a_config_is_one(page: Path, shown: list[dict[str, Any]], tmp_path: Path) -> None:
    for config in shown:
        # Not of Kubernetes; a GPU of one's own; a model that the page registers, which test_typed.py trains.
        if not {"apiVersion", "compute_capability"} & set(config) and not own_scripts(page):
            settings = [f"{key}={yaml.safe_dump(value, default_flow_style=True)}" for key, value in config.items()]
            load_config(ANY, with_what_is_here(settings, tmp_path))


def test_a_config_that_a_page_says_to_save_is_complete(tmp_path: Path) -> None:
    """Without the Hugging Face directory of the model, and with a chat template in its place."""
    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    file = tmp_path / "mine.yaml"
    pages = set()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"`mine\.yaml`[^\n]*:\n\n```yaml\n(.*?)```", text, re.DOTALL):
            config = yaml.safe_load(block)
            assert config["model"].pop("hf")
            config["model"]["preset"] = "tiny"
            config["data"]["chat_template"] = str(tmp_path / "chat.jinja")
            file.write_text(yaml.safe_dump(config))
            assert load_config(file).name == "mine", page
            pages.add(page.name)
    assert {"adapters.md", "hugging-face.md", "fine-tune.md", "switch.md", "public-dataset.md"} <= pages


def test_links_lead(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"\]\([\w./#-]+\n", text)  # a break within an address: Markdown shows it as text
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in link:
            assert (page.parent / link).exists(), link


def test_the_generated_pages_are_up_to_date() -> None:
    check = [sys.executable, ROOT / "scripts/config_reference.py", "--check"]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
