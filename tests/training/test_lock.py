"""Two runs in one directory: the second is refused, and what a killed run left keeps nobody out."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys

import pytest

from jaxmem.errors import UserError
from jaxmem.training.lock import only_run

HOLD = """
import sys, time
from jaxmem.training.lock import only_run
with only_run(sys.argv[1], "x"):
    print("held")
    time.sleep(60)
"""


def test_the_second_is_refused_by_name(tmp_path):
    with only_run(tmp_path, "x"):
        with pytest.raises(UserError, match=f"x: process {os.getpid()} on .* is writing it; .* give another name"):
            only_run(tmp_path, "x").__enter__()
        with only_run(tmp_path, "y"):
            pass
    with only_run(tmp_path, "x"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_killed_run_keeps_nobody_out(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-uc", HOLD, tmp_path],
        stdout=subprocess.PIPE,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    child.stdout.readline()
    with pytest.raises(UserError, match=f"process {child.pid} "):
        only_run(tmp_path, "x").__enter__()
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert json.loads((tmp_path / ".x.lock").read_text())["process"] == child.pid  # it is still there
    with only_run(tmp_path, "x"):
        pass


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    def cannot(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", cannot)
    with only_run(tmp_path, "x") as told:
        assert told == f"{tmp_path} cannot lock files: nothing keeps a second run out of x"


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"output: cannot write .*: Not a directory; give output another directory"):
        only_run(tmp_path / "file", "x").__enter__()
