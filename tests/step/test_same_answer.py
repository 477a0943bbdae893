"""One model, one answer: the same bits when it runs again, the same to rounding however it is split, cut or kept.

All settings one by one, on every version of jax: python -m tests.step.golden --settings.
"""

import pytest

from tests.step.golden import TOLERANCE, WAYS, config, losses, losses_of_runs, off, recorded


def test_losses_are_those_that_were_recorded():
    """By any jax: tests/step/golden.py says what to do where they are not."""
    name = "decoder, adamw8bit"
    assert off(losses(config(name)), recorded()[name]) < TOLERANCE


@pytest.mark.exhaustive
def test_however_it_is_trained():
    """Against what one device was recorded to come to, with nothing saved."""
    sections, devices = WAYS["all together"]
    cfg = config("decoder, adamw", **sections)
    once, again = losses_of_runs(cfg, devices, 2)
    assert off(once, recorded()["decoder, adamw"]) < TOLERANCE
    assert again == once  # to the bit
