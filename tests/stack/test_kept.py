"""What layers keep for the backward pass, by the script whose table is in the documentation."""

from __future__ import annotations

from scripts.kept import EMBED, LAYERS, ROWS, TIME, kept, kinds


def test_a_linear_layer_keeps_its_input_for_the_outer_product_and_nothing_where_it_does_not_learn() -> None:
    # A CPU computes bfloat16 in float32, and may keep both.
    assert {shape.dims for shape in kept(kinds()["linear"], "cpu:1")} == {(LAYERS, ROWS, TIME, EMBED)}
    assert kept(kinds()["linear that does not learn"], "cpu:1") == []


def test_a_sliced_loss_keeps_features_and_a_number_a_token() -> None:
    held = {shape.dims[1:] for shape in kept(kinds()["logits and loss, in slices"], "cpu:1")}
    assert held == {(ROWS, TIME, EMBED), (ROWS, TIME)}
