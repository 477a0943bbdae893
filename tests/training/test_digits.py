"""Each network and each objective learns real pictures: handwritten digits, a fifth of them held out (373 of 1,797).

The numbers are what a run of a few hundred updates must reach on pictures it never saw. Beside them stands what four
seeds came to, the lowest and the highest. A run takes some seconds on one core, most of them compiling.
"""

import jax
import pytest

from jaxmem.config import load_config
from jaxmem.training.run import run

VIT = {"family": "vit", "patch": 4, "layers": 1, "embed": 64, "mlp": 128, "heads": 4}
CONVNET = {"family": "convnet", "stages": [16, 32], "blocks": 1}
MLP = {"family": "mlp", "layers": 2, "embed": 64, "mlp": 128}


@pytest.fixture
def learn(tmp_path):
    """What a network comes to on held-out pictures."""

    def train(model, objective, steps, learning_rate, seed=0):
        cfg = load_config(
            {
                "name": "digits",
                "seed": seed,
                "output": str(tmp_path / str(seed)),
                "objective": objective,
                "model": model,
                "data": {"source": "digits", "held_out": 0.2},
                "batch": {"global_size": 64},
                "optimizer": {"learning_rate": learning_rate, "warmup": 20},
                "train": {"steps": steps, "evaluate_every": steps, "log_every": steps},
            }
        )
        return run(cfg, jax.devices()[:1]).held_out

    return train


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "steps", "learning_rate", "accuracy"),
    [
        (VIT, 200, 1e-2, 0.96),  # 0.973 to 0.987
        (CONVNET, 100, 5e-3, 0.97),  # 0.984 to 0.992
        (MLP, 200, 5e-3, 0.97),  # 0.989 to 0.997
        (MLP | {"inputs": "one_hot"}, 150, 2e-3, 0.92),  # 0.925 to 0.954: 17 values a pixel that know no order
    ],
    ids=["vit", "convnet", "mlp", "mlp-one-hot"],
)
def test_classify(learn, model, steps, learning_rate, accuracy):
    """Ten classes: guessing gives 0.1."""
    assert learn(model, "classify", steps, learning_rate)["accuracy"] >= accuracy


@pytest.mark.exhaustive
def test_binary(learn):
    """Odd or even: guessing gives 0.5; 0.989 to 0.992."""
    assert learn(MLP | {"outputs": 1}, "binary", 200, 5e-3)["accuracy"] >= 0.98


@pytest.mark.exhaustive
@pytest.mark.parametrize(("objective", "loss"), [("regress_l1", 0.3), ("regress_l2", 0.5)])
def test_regress(learn, objective, loss):
    """The digit as a number: always saying 4.5 is wrong by 2.5, by 8.25 squared; 0.18 to 0.20, 0.18 to 0.32."""
    assert learn(MLP | {"outputs": 1}, objective, 200, 5e-3)["loss"] <= loss


@pytest.mark.exhaustive
def test_contrastive(learn):
    """Which of 64 pictures is this one, moved by a pixel and with noise? Guessing gives 0.016; 0.906 to 0.941."""
    assert learn(MLP | {"outputs": 32}, "contrastive", 300, 5e-3)["accuracy"] >= 0.85
