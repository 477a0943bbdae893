"""What layers keep for the backward pass, by the script whose table is in the documentation."""

import pytest

from tests.stack.saved_activations import EMBED, HIDDEN, LAYERS, ROWS, TIME, kept, kinds


def test_a_trainable_linear_layer_saves_its_input_and_a_frozen_one_saves_nothing() -> None:
    # A CPU computes bfloat16 in float32, and may keep both.
    assert {shape.dims for shape in kept(kinds()["linear"], "cpu:1")} == {(LAYERS, ROWS, TIME, EMBED)}
    assert kept(kinds()["linear that does not learn"], "cpu:1") == []


def test_a_sliced_loss_saves_features_and_a_number_per_token() -> None:
    held = {shape.dims[1:] for shape in kept(kinds()["logits and loss, in slices"], "cpu:1")}
    assert held == {(ROWS, TIME, EMBED), (ROWS, TIME)}


@pytest.mark.parametrize(
    ("kind", "widths"),
    [("RMS norm", [EMBED]), ("layer norm", [EMBED]), ("gated MLP", [EMBED, *3 * [HIDDEN]]),
     ("MLP with GELU", [EMBED, *2 * [HIDDEN]])],
)  # fmt: skip
def test_norms_and_activations_keep_what_goes_into_them_in_its_own_dtype(kind: str, widths: list[int]) -> None:
    held = kept(kinds()[kind], "h100-80gb")
    assert sorted(shape.dims for shape in held) == [(LAYERS, ROWS, TIME, width) for width in widths]
    assert {shape.dtype for shape in held} == {"bfloat16"}
