"""The source distribution builds a wheel with every file, and the installed package works away from the repository."""

import os
import pydoc
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import jaxmem

ROOT = Path(__file__).parents[1]
IN_ONE_PROCESS = """
import jaxmem
from jaxmem.cli import main
print(jaxmem.__file__)
for command in ("plan digits-mlp.yaml --simulate 1", "doctor", "schema", "--version"):
    try:
        main(command.split())
    except SystemExit as done:
        assert not done.code, command
"""


def run(code: str, *arguments: str, cwd: Path, **environment: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
    done = subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built(kind: str, source: Path, target: Path) -> Path:
    target.mkdir()
    code = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
    run(code, kind, str(target), cwd=source)
    (file,) = target.iterdir()
    return file


def test_help_and_star_import_list_the_public_functions() -> None:
    text = pydoc.plain(pydoc.render_doc(jaxmem))
    assert all(f"\n    {name}" in text or f"class {name}(" in text for name in jaxmem.__all__)
    names: dict[str, object] = {}
    exec("from jaxmem import *", names)
    assert {*jaxmem.__all__} <= {*names}


@pytest.mark.exhaustive
def test_the_sdist_builds_a_wheel_that_works(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    for name in ("jaxmem", "kernels", "configs"):
        shutil.copytree(ROOT / name, clone / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    with tarfile.open(built("build_sdist", clone, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.glob("jaxmem-*")
    assert (source / "LICENSE").exists()
    assert (source / "configs/demo.yaml").exists()

    wheel = built("build_wheel", source, tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("jaxmem/")}
        archive.extractall(tmp_path / "site")
    files = {f"jaxmem/{path.relative_to(clone / 'jaxmem')}" for path in (clone / "jaxmem").rglob("*")}
    files |= {f"jaxmem/{path.relative_to(clone)}" for path in (clone / "kernels").rglob("*")}
    assert names == {name for name in files if Path(name).suffix and not name.endswith(".egg-info")}

    desk = tmp_path / "desk"
    shutil.copytree(source / "configs", desk)
    said = run(IN_ONE_PROCESS, cwd=desk, PYTHONPATH=str(tmp_path / "site"), JAX_PLATFORMS="cpu")
    assert str(tmp_path / "site") in said
