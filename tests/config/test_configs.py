"""Each file under configs/ loads, opens with its command and devices, and fits the devices that it names."""

import re
from pathlib import Path

import pytest

from jaxmem.config import load_config, save_config
from jaxmem.config.devices import for_devices

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs").glob("*.yaml"))


def test_there_are_configs():
    assert ROOT / "configs" / "demo.yaml" in FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_config(path, tmp_path):
    cfg = load_config(path)
    assert cfg.name == path.stem
    save_config(cfg, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == cfg
    opening = [line for line in path.read_text().split("\n\n")[0].split("\n") if line.startswith("#")]
    assert any(f"configs/{path.name}" in line for line in opening)
    (devices,) = (line for line in opening if line.startswith("# Devices: "))
    for_devices(cfg, int(re.search(r"\d+", devices)[0]))
