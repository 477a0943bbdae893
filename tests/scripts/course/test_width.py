"""The stop of overfitting: a wide network learns wrong labels by heart, a narrow one cannot."""

import jax
import pytest

from scripts.course.width import images, measure


def test_only_training_images_have_wrong_labels() -> None:
    (x, labels), (unseen, right) = images()
    assert len(x) + len(unseen) == 1797
    assert len(labels) + len(right) == 1797


@pytest.mark.exhaustive
@jax.numpy_dtype_promotion("standard")
def test_the_training_loss_falls_with_the_width_and_the_held_out_loss_rises_at_last() -> None:
    narrow, middle, wide = measure(400, (2, 16, 256)).tables[0].rows
    assert narrow["training loss"] > middle["training loss"] > wide["training loss"]
    assert wide["training accuracy"] > 0.99
    assert narrow["held-out loss"] > min(middle["held-out loss"], wide["held-out loss"])
    for row in (narrow, middle, wide):
        assert row["held-out loss, stopped early"] <= row["held-out loss"] + 1e-6
