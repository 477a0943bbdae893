"""What layers' values take and what making them again takes: by hand, for a small decoder."""

import io

import pytest
from rich.console import Console

from jaxmem.config.networks import FAMILIES
from jaxmem.planning.named_values import named_values
from jaxmem.planning.table import named_values_table
from tests.step.conftest import SMALL, config

ROWS, TIME, BYTES = 4, 24, 4  # of each of two devices, in float32


def test_bytes_and_arithmetic_of_every_name():
    cfg = config(mesh={"fsdp": 2}, memory={"remat": "full", "mlp_chunk": 8})
    found = {one.name: one for one in named_values(cfg, "cpu:2")}
    assert set(found) == set(FAMILIES["decoder"].activations)
    assert {one.layers for one in found.values()} == {SMALL["layers"]}
    tokens, embed, mlp, heads = ROWS * TIME, SMALL["embed"], SMALL["mlp"], SMALL["heads"] * SMALL["head_dim"]
    wide = found["mlp_hidden"]
    assert wide.bytes_per_layer == tokens * mlp * BYTES
    assert wide.flops_per_layer == 0  # of gate and up, which have names
    assert found["mlp_gate"].flops_per_layer == 2 * tokens * embed * mlp
    assert found["mlp_out"].flops_per_layer == 2 * tokens * mlp * embed
    assert found["attention_q"].bytes_per_layer == tokens * heads * BYTES
    assert found["attention_q"].flops_per_layer == 2 * tokens * embed * heads
    # With the statistics of each row; the products are those of all that is seen, or of the blocks in which it lies.
    assert found["attention"].bytes_per_layer == tokens * (heads + SMALL["heads"]) * BYTES
    assert found["attention"].flops_per_layer == pytest.approx(4 * tokens * TIME * heads, rel=0.5)


def test_the_table_says_how_a_config_names_them():
    out = io.StringIO()
    Console(file=out, width=100).print(named_values_table(named_values(config(memory={"remat": "full"}), "cpu:1")))
    assert "{save: [names]}" in out.getvalue()
    assert "attention_q" in out.getvalue()
