"""Configs of the release before open as they are: old keys and values are today's, and one warning names them."""

import warnings
from typing import Any

import pytest

from jaxmem.checkpoint.resume import changed
from jaxmem.config import load_config, save_config
from jaxmem.config.renamed import KEYS, VALUES, OldNameWarning

BASE: dict[str, Any] = {"name": "a", "model": {"preset": "tiny"}, "train": {"steps": 2}}
OLD = {  # what a run wrote into config.yaml
    **BASE,
    "data": {
        "source": "chat", "path": "chats.jsonl", "sequence_length": 64, "template": "chat.jinja", "too_long": "drop",
        "broken": "skip", "reference": None,
    },
    "optimizer": {"name": "galore_adamw", "final": 0.2, "tables": "projected"},
    "adapter": {
        "kind": "qlora", "stabilized": True, "double": False, "faster": 16.0, "product": "sliced", "length": 20,
        "run": "runs/base",
    },
    "train": {"steps": 2, "on_nan": "skip", "most_skipped": 3, "on_spike": "stop", "spike": 5.0},
    "checkpoint": {"on_failure": "go_on"},
    "generate": {"cache": "int8", "chunk": 512},
    "cluster": {"heartbeat": 30},
}  # fmt: skip
NEW = {
    **BASE,
    "data": {
        "source": "chat", "path": "chats.jsonl", "sequence_length": 64, "chat_template": "chat.jinja",
        "on_overlong": "drop", "on_invalid": "skip", "reference_logprobs": None,
    },
    "optimizer": {"name": "galore_adamw", "min_lr_ratio": 0.2, "project_embeddings": True},
    "adapter": {
        "kind": "qlora", "rslora": True, "double_quant": False, "lora_plus_ratio": 16.0, "matmul": "sliced",
        "virtual_tokens": 20, "base_run": "runs/base",
    },
    "train": {"steps": 2, "on_nan": "skip", "max_skipped": 3, "on_spike": "stop", "spike_threshold": 5.0},
    "checkpoint": {"on_failure": "continue"},
    "generate": {"kv_cache": "int8", "prefill_chunk": 512},
    "cluster": {"heartbeat_timeout": 30},
}  # fmt: skip


def with_old_names(raw: dict[str, Any]) -> dict[str, Any]:
    """A whole config as the release before saved it."""
    before = {section: dict(fields) if isinstance(fields, dict) else fields for section, fields in raw.items()}
    for key, new in KEYS.items():
        section, _, old = key.partition(".")
        value = before[section].pop(new)
        before[section][old] = {v: k for k, v in VALUES.get(f"{section}.{new}", {}).items()}.get(value, value)
    return before


def test_every_old_key_is_accepted_with_one_warning():
    with pytest.warns(OldNameWarning) as seen:
        cfg = load_config(OLD)
    assert len(seen) == 1
    text = str(seen[0].message)
    assert "\n" not in text
    assert all(f"{old} -> {old.partition('.')[0]}.{new}" in text for old, new in KEYS.items())
    assert "checkpoint.on_failure=go_on -> continue" in text
    assert cfg == load_config(NEW)


def test_what_a_run_saved_opens_without_a_warning(tmp_path):
    cfg = load_config(NEW)
    save_config(cfg, tmp_path / "config.yaml")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_config(tmp_path / "config.yaml") == cfg
        assert load_config(with_old_names(cfg.model_dump(mode="json"))) == cfg


def test_old_overrides_win_over_what_a_file_says():
    with pytest.warns(OldNameWarning, match=r"adapter.faster -> adapter.lora_plus_ratio$"):
        cfg = load_config(NEW, ["adapter.faster=4", "adapter.faster=2"])
    assert cfg.adapter.lora_plus_ratio == 2
    with pytest.warns(OldNameWarning, match=r"optimizer.tables -> optimizer.project_embeddings$"):
        assert load_config(NEW, ["optimizer.tables=adam"]).optimizer.project_embeddings is False


def test_pallas_is_triton():
    old = {"optimizer": {"name": "adamw8bit", "kernel": "pallas"}, "memory": {"attention": "pallas"}}
    with pytest.warns(OldNameWarning) as seen:
        cfg = load_config({**BASE, **old})
    assert (cfg.optimizer.kernel, cfg.memory.attention) == ("triton", "auto")
    text = str(seen[0].message)
    assert "optimizer.kernel=pallas -> triton" in text
    assert "memory.attention=pallas -> auto" in text
    for key in ("matmul", "product"):
        with pytest.warns(OldNameWarning):
            cfg = load_config({**BASE, "adapter": {"kind": "qlora", key: "pallas"}})
        assert cfg.adapter.matmul == "triton"


def test_a_checkpoint_of_the_old_names_belongs_to_the_same_run():
    after = load_config(NEW).model_dump(mode="json")
    assert changed(with_old_names(after), after) == []
