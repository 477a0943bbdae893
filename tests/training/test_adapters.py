"""Runs that begin from the weights of another, or of a directory."""

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

from jaxmem.config import load_config
from jaxmem.errors import UserError
from jaxmem.hf.files import copy_tokenizer
from jaxmem.inference.load import initial_state, open_model
from jaxmem.step.programs import program
from jaxmem.training.run import run

ONE = jax.devices()[:1]


@pytest.mark.exhaustive
def test_a_new_classifier_on_a_backbone(tmp_path):
    def config(name, objective, outputs, **sections):
        model = {"family": "mlp", "layers": 1, "embed": 16, "mlp": 16, "outputs": outputs}
        base = {"name": name, "output": str(tmp_path), "objective": objective, "model": model, "train": {"steps": 2}}
        return load_config({**base, "data": {"source": "digits"}, "batch": {"global_size": 8}, **sections})

    first = flatten_dict(run(config("base", "classify", 10), ONE).state.params)
    adapter = {"kind": "head", "base_run": str(tmp_path / "base")}
    second = run(config("odd", "binary", 1, adapter=adapter), ONE)
    for path, x in flatten_dict(second.state.params).items():
        if path[0] == "head":
            assert x.shape[-1] == 1
        else:
            np.testing.assert_array_equal(x, first[path])
    assert second.plan.as_json()["model"]["trainable"] == 17
    again = flatten_dict(open_model(tmp_path / "odd")[1])
    jax.tree.map(np.testing.assert_array_equal, again, flatten_dict(second.state.params))
    wider = {"family": "mlp", "layers": 1, "embed": 16, "mlp": 24, "outputs": 1}
    with pytest.raises(UserError, match=r"mlp\.down\.weight has shape \[1, 16, 16\], but model requires \[1, 24"):
        run(config("other", "binary", 1, adapter=adapter, model=wider), ONE)
    with pytest.raises(UserError, match=r"adapter.base_run=nowhere does not exist"):
        run(config("other", "binary", 1, adapter={"kind": "head", "base_run": "nowhere"}), ONE)


@pytest.mark.exhaustive
def test_a_run_goes_on_beside_the_weights_it_began_beside(tmp_path, compare):
    """They are not in its checkpoints; others of the same shape would be taken for them."""
    place = tmp_path / "given"
    compare.write_directory("llama3", place, vocab_size=257)
    (text := tmp_path / "text").mkdir()
    (text / "1.txt").write_text("a few words, again and again. " * 40)
    sections = {
        "output": str(tmp_path / "runs"),
        "model": {"hf": str(place)},
        "data": {"source": "text", "path": str(text), "tokenizer": "bytes", "sequence_length": 16, "held_out": 0},
        "adapter": {"kind": "lora", "rank": 2},
        "batch": {"global_size": 2},
    }
    run(load_config({"name": "x", **sections, "train": {"steps": 1}}), ONE)
    assert open_model(tmp_path / "runs" / "x")[1]["blocks"]["mlp"]["up"]["lora"]["a"].shape == (2, 32, 2)
    weights = load_file(place / "model.safetensors")
    save_file({name: -x for name, x in weights.items()}, place / "model.safetensors")
    for again in (
        lambda: run(load_config({"name": "x", **sections, "train": {"steps": 2}}), ONE),
        lambda: open_model(tmp_path / "runs" / "x"),
    ):
        with pytest.raises(UserError, match=r"weights of model\.hf=.*given differ from the base weights of .*x"):
            again()


@pytest.mark.exhaustive
def test_new_adapters_beside_nf4_of_the_weights_of_a_directory(tmp_path, compare):
    place = tmp_path / "given"
    compare.write_directory("llama3", place, vocab_size=257)
    copy_tokenizer("bytes", place)
    raw = {"name": "x", "model": {"hf": str(place)}, "batch": {"global_size": 1}, "train": {"steps": 1}}
    state = initial_state(program(load_config(raw, ["adapter.kind=qlora", "adapter.rank=2"]), ONE))
    head, given = state.params["head"]["weight"], load_file(place / "model.safetensors")["lm_head.weight"].T
    assert head.format == "nf4"
    assert np.abs(np.float32(head.dequantize()) - given).max() < 0.2 * np.abs(given).max()
    assert state.params["blocks"]["mlp"]["up"]["lora"]["a"].shape == (2, 32, 2)
