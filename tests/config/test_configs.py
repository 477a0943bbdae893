"""Each file under configs/ loads, opens with its command and devices, and fits the devices of a small host."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxmem.config import load_config, save_config

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
    assert cfg.for_devices(8).mesh.fsdp > 1
    opening = [line for line in path.read_text().split("\n\n")[0].split("\n") if line.startswith("#")]
    assert any(f"jaxmem train configs/{path.name}" in line for line in opening)
    assert any(line.startswith("# Devices:") for line in opening)
