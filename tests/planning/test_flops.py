"""The FLOPs of an update, counted by hand."""

import jax
import pytest

from jaxmem.estimate.passes import passes_of
from jaxmem.planning.compile import compile_program
from jaxmem.planning.hlo import total_flops
from jaxmem.planning.result import ideal_flops
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.step.programs import program
from tests.planning.conftest import SMALL, config
from tests.support.tiers import exhaustive


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_embeddings_are_looked_up_only(tied: bool) -> None:
    """Of a frozen output matrix, forward and input gradient are computed, of a frozen embedding neither."""
    length = 24
    sections = {
        "batch": {"global_size": 1},
        "data": {"sequence_length": length},
        "adapter": {"kind": "lora", "rank": 1},
    }
    built = program(config(model={**SMALL, "tie_embeddings": tied}, **sections), jax.devices()[:1])
    model = built.model
    used = model.parameter_count - (0 if tied else SMALL["vocab"] * SMALL["embed"])
    attention = 4 * SMALL["heads"] * SMALL["head_dim"] * SMALL["layers"] * length * (length + 1) / 2
    expected = 2 * (2 * used * length) + 2 * model.trainable_count * length + 3 * attention
    assert ideal_flops(built) == pytest.approx(expected)


@pytest.mark.parametrize("name", ["values are narrower than keys", "a prompt has no matmul"])
def test_what_each_token_is_multiplied_with(name: str) -> None:
    length = 24
    is_latent = name.startswith("values")
    experts = {"count": 4, "top_k": 2, "renormalize": False, "shared": 64, "shared_gate": False}
    latent = {"latent": {"kv_rank": 16, "rope_dim": 4, "value_dim": 4}, "kv_heads": SMALL["heads"], "experts": experts}
    adapter = {} if is_latent else {"kind": "prompt", "virtual_tokens": 8}
    data = {"sequence_length": length, "packing": is_latent}
    cfg = config(model=SMALL | (latent if is_latent else {}), batch={"global_size": 1}, data=data, adapter=adapter)
    built = program(cfg, jax.devices()[:1])
    embed = SMALL["embed"]
    used = built.model.active_count - SMALL["vocab"] * embed - (0 if is_latent else 8 * embed)
    tokens = length if is_latent else length + 8
    pairs = SMALL["layers"] * tokens * (tokens + 1) / 2
    attention = 2 * SMALL["heads"] * (SMALL["head_dim"] + (4 if is_latent else SMALL["head_dim"])) * pairs
    assert ideal_flops(built) == pytest.approx((6 if is_latent else 4) * used * tokens + 3 * attention)


@pytest.mark.parametrize(
    ("target", "family"), [("cpu", "convnet"), ("cpu", "vit"), exhaustive("h100-80gb:1", "convnet")]
)
def test_images_use_their_weights_at_every_place(target: str, family: str) -> None:
    """Without recomputation the step computes no more than the minimum; cuDNN's convolutions count too."""
    model = {"family": family} | (
        {"stages": [8, 16], "blocks": 1} if family == "convnet" else {"patch": 2, "layers": 2}
    )
    cfg = config(model=model, objective="classify", data={"source": "digits"}, batch={"global_size": 4})
    aim = parse_target(target)
    built = program(cfg, target_devices(aim, aim.memory))
    compiled = total_flops(compile_program(built.lower_step(), here=aim.is_here).module)
    assert ideal_flops(built) == pytest.approx(compiled, rel=0.01)


def test_the_gradients_of_frozen_weights_are_not_computed() -> None:
    """Nor is an activation saved that only such a gradient reads."""

    def traced(**adapter: object) -> tuple[float, int, float]:
        memory = {"remat": "none", "attention": "blockwise"}
        built = program(config(adapter=adapter, memory=memory, data={"sequence_length": 512}), jax.devices()[:1])
        passes = passes_of(built.cfg, "cpu")
        flops = sum(matmul.times * matmul.flops for matmul in passes.matmuls)
        return 8 * flops, passes.saved, ideal_flops(built)

    flops, saved, ideal = traced()
    of_adapter, saved_of_adapter, ideal_of_adapter = traced(kind="lora", rank=1, targets=["blocks.attention.q"])
    assert flops - of_adapter == pytest.approx(ideal - ideal_of_adapter, rel=0.02)
    assert saved_of_adapter < 0.9 * saved
