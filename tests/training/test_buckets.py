"""Training on rows of several lengths: what a run plans, computes, counts, and goes on from."""

import dataclasses
import json
import math
import shutil

import jax
import numpy as np
import pytest

from jaxmem.config import load_config
from jaxmem.data import Loader
from jaxmem.inference.evaluate import Evaluator
from jaxmem.planning import plan
from jaxmem.training.run import run

MODEL = {"preset": "tiny", "layers": 1, "embed": 16, "mlp": 32, "heads": 2, "kv_heads": 2, "head_dim": 8}


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    file = tmp_path_factory.mktemp("lines") / "lines.jsonl"
    texts = ["word " * (1 + i * i % 8) for i in range(60)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {
        "name": "run",
        "output": str(file.parent),
        "model": MODEL,
        "data": {
            "source": "jsonl", "path": str(file), "packing": False, "sequence_length": 32, "buckets": [16],
            "held_out": 0.3,
        },
        "batch": {"global_size": 4, "accumulate": 2},
        "mesh": {"fsdp": 2},
        "optimizer": {"schedule": "constant", "learning_rate": 1e-3, "epsilon": 1e-3},
        "train": {"steps": 6, "log_every": 1, "evaluate_every": 6, "evaluate_batches": 100},
        "checkpoint": {"every": 3},
    }  # fmt: skip


@pytest.fixture(scope="module")
def result(raw):
    return run(load_config(raw), jax.devices()[:2])


@pytest.fixture(scope="module")
def planned(result):
    return result.plan


@pytest.fixture(scope="module")
def built(planned):
    return planned.program


@pytest.mark.exhaustive
def test_shorter_rows_train_as_padded_rows(built, planned):
    with Loader(built.cfg) as loader:
        short = next(batch for batch in loader if built.bucket(batch) == 16)
    long = {name: np.pad(x, ((0, 0), (0, 0), (0, 16))) for name, x in short.items()}
    for one, other in zip(*(
        jax.tree.leaves(planned.step_for(built.bucket(batch))(built.initialise(), built.place(batch)))
        for batch in (short, long)
    ), strict=True):  # fmt: skip
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-5, atol=1e-6)


@pytest.mark.exhaustive
def test_a_plan_says_what_each_bucket_takes_and_the_largest_decides(raw, planned):
    assert planned.total_for(16) < planned.total_for(32) == planned.phases["step"]
    elsewhere = plan(load_config(raw, ["train.evaluate_every=null"]), "cpu:2")
    for one in (planned, elsewhere):
        assert one.phases["step at 16"] == one.total_for(16)
        phases = {"initialise", "load", "step", "step at 16", "save"} | ({"evaluate"} if one is planned else set())
        assert one.as_json()["phases"].keys() == phases
        assert None not in one.phases.values()
    assert elsewhere.phases["step at 16"] == pytest.approx(planned.phases["step at 16"], rel=0.02)
    tight = dataclasses.replace(planned, target=dataclasses.replace(planned.target, memory=planned.total_for(16)))
    assert not tight.fits
    assert max(tight.phases, key=tight.phases.__getitem__) == "step"


def test_a_run_counts_what_its_rows_hold_and_goes_on_where_it_stopped(raw, built, result):
    with Loader(built.cfg) as loader:
        buckets = [built.bucket(batch) for _, batch in zip(range(6), loader, strict=False)]
    assert set(buckets) == {16, 32}
    rows = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    assert [row["tokens"] for row in rows if "loss" in row] == [4 * sum(buckets[: n + 1]) for n in range(6)]
    killed = shutil.copytree(result.directory, result.directory.with_name("killed"))
    shutil.rmtree(killed / "checkpoints" / "6")
    again = run(load_config({**raw, "name": "killed"}), jax.devices()[:2])
    assert jax.device_get(again.metrics) == jax.device_get(result.metrics)
    for one, other in zip(jax.tree.leaves(again.state), jax.tree.leaves(result.state), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_evaluation_weighs_every_token_once(built, result):
    """As it is on rows of one length, where all documents are seen."""
    cfg = built.cfg.at_length(32)
    with Evaluator(dataclasses.replace(built, cfg=cfg)) as whole:
        assert whole(result.state.params)["loss"] == pytest.approx(result.held_out["loss"], rel=1e-5)
    assert math.isfinite(result.held_out["perplexity"])
