"""DPO: what the formula says, from a reference that is computed once; stale ones are refused; the margin grows."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.config import Data, load_config
from jaxmem.config.devices import for_devices
from jaxmem.data.corpus import Corpus, fingerprint
from jaxmem.data.loader import Loader
from jaxmem.errors import UserError
from jaxmem.inference import reference
from jaxmem.inference.evaluate import evaluate
from jaxmem.inference.reference import file_for, read, reference_logprobs, reference_of
from jaxmem.step.objective import objective_of
from jaxmem.step.programs import program
from jaxmem.training.run import run

MODEL = {"vocab": 257, "layers": 2, "embed": 16, "mlp": 24, "heads": 2, "kv_heads": 1, "head_dim": 8}


@pytest.fixture
def config(tmp_path):
    pairs = [{"prompt": f"{n} is ", "chosen": "good" + "!" * (n % 3), "rejected": "bad"} for n in range(11)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))

    def make(**sections):
        base = {
            "name": "x",
            "output": str(tmp_path),
            "objective": {"name": "dpo", "beta": 0.5},
            "model": MODEL,
            "data": {"source": "preference", "path": str(tmp_path / "pairs.jsonl"), "held_out": 0.1, "packing": False,
                     "sequence_length": 16},
            "batch": {"global_size": 8, "accumulate": 2},
            "optimizer": {"learning_rate": 1e-2},
            "train": {"steps": 3, "log_every": 1, "evaluate_every": 3},
        }  # fmt: skip
        return load_config({**base, **sections})

    return make


def float64(logits: np.ndarray, batch: dict[str, np.ndarray], beta: float, smoothing: float) -> dict[str, float]:
    """The formula itself, in numpy."""
    logits = logits.astype(np.float64)
    likely = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    of_label = np.take_along_axis(likely, batch["targets"][..., None], axis=-1)[..., 0]
    gained = np.sum(of_label * batch["mask"], axis=-1) - batch["reference"].astype(np.float64)
    margins = beta * (gained[0::2] - gained[1::2])
    sigmoid = lambda x: 1 / (1 + np.exp(-x))  # noqa: E731
    loss = -(1 - smoothing) * np.log(sigmoid(margins)) - smoothing * np.log(sigmoid(-margins))
    real = batch["mask"].any(-1).reshape(-1, 2).all(-1)
    return {"loss": loss[real].sum(), "margin": margins[real].sum(), "correct": (margins > 0)[real].sum()}


@pytest.mark.parametrize("chunk", ["auto", 100])
def test_the_loss_is_the_formula(config, chunk):
    cfg = config(objective={"name": "dpo", "beta": 0.5, "label_smoothing": 0.1}, memory={"loss_chunk": chunk})
    built = program(cfg, jax.devices()[:1])
    draws = np.random.default_rng(0)
    batch = {
        "inputs": draws.integers(0, 257, (6, 16), np.int32),
        "targets": draws.integers(0, 257, (6, 16), np.int32),
        "positions": np.tile(np.arange(16, dtype=np.int32), (6, 1)),
        "segment_ids": np.ones((6, 16), np.int32),
        "mask": (draws.random((6, 16)) < 0.5).astype(np.float32),
        "reference": draws.normal(-40, 3, 6).astype(np.float32),
    }
    batch["mask"][5] = 0  # a pair that lacks an answer
    params = jax.tree.map(lambda x: 3 * x, built.initialise().params)
    network = nnx.merge(built.model.graphdef, params)
    found = jax.jit(lambda batch: (objective_of(cfg)(network, batch, None), network(
        batch["inputs"], batch["positions"], batch["segment_ids"])))(jax.tree.map(jnp.asarray, batch))  # fmt: skip
    expected = float64(np.asarray(found[1]), batch, 0.5, 0.1)
    assert float(found[0]["count"]) == 2
    for name, value in expected.items():
        assert float(found[0][name]) == pytest.approx(value, rel=1e-5), name


@pytest.mark.exhaustive
def test_the_margin_grows_from_a_reference_that_is_kept(config, tmp_path):
    """At the beginning model and reference are one: the loss is log 2 in every row."""
    (tmp_path / "other.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}')
    cfg = config()
    result = run(cfg, jax.devices()[:1])
    lines = [json.loads(line) for line in (tmp_path / "x/metrics.jsonl").read_text().splitlines()]
    first, *_, last = [line for line in lines if "loss" in line]
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert first["margin"] == pytest.approx(0, abs=1e-5)
    assert last["margin"] > 0.1
    assert last["loss"] < first["loss"]
    assert result.held_out["margin"] > 0
    assert evaluate(tmp_path / "x")["margin"] == pytest.approx(result.held_out["margin"], rel=1e-4)
    with pytest.raises(UserError, match="is missing; evaluate a DPO run on the data that it was trained on"):
        evaluate(tmp_path / "x", str(tmp_path / "other.jsonl"))
    kept = read(file_for(cfg.data))
    assert kept.values.shape == (11, 2)
    assert (kept.values < -10).all()
    # Rows 2 i and 2 i + 1 of a batch are the answers of one pair.
    with Loader(cfg, corpus=None) as loader:
        loader.corpus.references = kept.values
        batch = next(loader)
    prompts = ["".join(map(chr, row[:5])).partition(" is ")[0] for row in batch["inputs"].reshape(-1, 16)]
    assert prompts[0::2] == prompts[1::2]
    for prompt, both in zip(prompts[0::2], batch["reference"].reshape(-1, 2), strict=True):
        np.testing.assert_array_equal(both, kept.values[int(prompt)])
    assert run(cfg, jax.devices()[:1]).step == 3  # whose weights are no longer those of the reference
    with pytest.raises(UserError, match=r"reference.npz: was computed with another model; remove it, or set data.ref"):
        run(config(name="y", seed=1), jax.devices()[:1])
    assert not (tmp_path / "y/config.yaml").exists()
    file_for(cfg.data).write_bytes(b"x")
    with pytest.raises(UserError, match="not a file of reference log-probabilities"):
        run(config(name="z"), jax.devices()[:1])


def test_every_host_has_the_reference(config, monkeypatch):
    """With data on the disk of each host, process 0 writes only the file of its host."""
    cfg = config()
    built, corpus = SimpleNamespace(cfg=cfg), SimpleNamespace(sources=[range(11)])
    params = {"w": jnp.ones(3)}
    monkeypatch.setattr(reference, "_compute", lambda *_: np.ones((11, 2), np.float32))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    computed = reference_logprobs(built, corpus, params, "data", None)
    np.testing.assert_array_equal(read(file_for(cfg.data)).values, computed.values)
    assert reference_logprobs(built, corpus, params, "data", None).values is not computed.values
    monkeypatch.setattr(reference, "gather_objects", lambda mine: [mine, False])  # another host has lost it
    with pytest.raises(UserError, match="is missing; it was computed from the weights before training"):
        reference_logprobs(built, corpus, params, "data", computed.weights)


def test_other_data_than_that_of_the_reference_is_refused(config, tmp_path):
    """Its log-probabilities would be taken for those of other pairs. Computing them counts no record."""
    other = tmp_path / "other.jsonl"
    other.write_text((tmp_path / "pairs.jsonl").read_text().replace("good", "fine") + "\n{}")
    section = {"source": "preference", "path": str(other), "packing": False, "sequence_length": 16,
               "on_invalid": "skip", "reference_logprobs": str(tmp_path / "reference.npz")}  # fmt: skip
    cfg = config(data=section)
    built = program(cfg, jax.devices()[:1])
    corpus = Corpus(cfg)
    computed = reference_logprobs(built, corpus, built.initialise().params, fingerprint(cfg), None)
    assert corpus.summary() == []
    np.testing.assert_array_equal(reference_of(cfg).values, computed.values)
    for changes in ({"path": str(tmp_path / "pairs.jsonl")}, {"sequence_length": 12}):
        with pytest.raises(UserError, match=r"reference\.npz was computed with other data; evaluate a DPO run on the"):
            reference_of(config(data={**section, **changes}))
    with pytest.raises(UserError, match=r"pairs\.jsonl\.reference\.npz is missing; evaluate a DPO run on the data"):
        reference_of(config())
    turned = program(config(data=section, model={**MODEL, "rope": {"theta": 100.0}}), jax.devices()[:1])
    with pytest.raises(UserError, match=r"reference\.npz: was computed with another model"):  # of the same weights
        reference_logprobs(turned, Corpus(cfg), built.initialise().params, fingerprint(cfg), None)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"batch": {"global_size": 6, "accumulate": 2}}, "batch.global_size=6.*use batch.global_size=8"),
        (
            {"data": {"source": "stdlib", "packing": False}},
            "stdlib does not support .*dpo; use data.source=preference",
        ),
        (
            {"data": {"source": "preference", "path": "x"}},
            "dpo does not support data.packing=true; use data.packing=false",
        ),
        ({"objective": "next_token"}, "preference does not support objective.name=next_token; use objective.name=dpo"),
        (
            {"objective": {"name": "dpo", "z_loss": 0.1}},
            "z_loss=0.1 requires objective.name=next_token or classify",
        ),
    ],
)
def test_incompatible_settings(config, sections, message):
    with pytest.raises(UserError, match=message):
        config(**sections)


def test_pairs_lie_on_one_device(config):
    with pytest.raises(UserError, match=r"mesh.fsdp=4 x 2 rows per pair; use batch.global_size=16"):
        for_devices(config(mesh={"fsdp": 4}), 4)


def test_pairs_of_several_files_or_of_the_hub_need_a_name_for_the_reference() -> None:
    for path in ("pairs/*.jsonl", "org/pairs", "hf://datasets/org/pairs/data"):
        with pytest.raises(UserError, match=r"names several files; set data.reference_logprobs to a file"):
            file_for(Data(source="preference", path=path))
    assert file_for(Data(source="preference", path="pairs.jsonl")) == Path("pairs.jsonl.reference.npz")
