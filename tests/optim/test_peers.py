"""The same weights after the same gradients as in bitsandbytes, torchao, torch, galore-torch and apollo-torch."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import optim
from jaxmem.optim.rules import apollo, projection
from tests.optim import peer_optimizers as compare

HERE = Path(__file__).parent
PEERS = np.load(HERE / "data" / "peers.npz")


def trained(tx, shape, turn=np.asarray):
    params = {"w": jnp.asarray(turn(compare.weights(shape)))}
    state, update = tx.init(params), jax.jit(tx.update)
    for g in compare.gradients(shape):
        updates, state = update({"w": jnp.asarray(turn(g))}, state, params)
        params = optim.apply_updates(params, updates)
    return turn(np.asarray(params["w"]))


def wide(name, **own):
    return trained(getattr(optim, name)(compare.RATE, weight_decay=0.0, **own), compare.WIDE)


def matrix(tx, shape=compare.MATRIX):
    """A torch matrix is [out, in]: ours is the other way round."""
    return trained(tx, shape, turn=np.transpose)


def off(one, other):
    """Mean difference, as a share of how far the weights moved."""
    return np.abs(one - other).mean() / np.abs(other - compare.weights(other.shape)).mean()


@pytest.mark.parametrize(
    ("name", "peers"),
    [("adamw8bit", ["bitsandbytes_adamw8bit", "torchao_adamw8bit"]), ("adamw4bit", ["torchao_adamw4bit"])],
)
def test_codes_are_nearer_to_adamw_than_the_peers_codes(name, peers):
    """On gradients that differ by decades, where a second moment of zero is torchao's undoing."""
    exact = PEERS["torch_adamw"]
    assert off(wide(name), exact) < min(off(PEERS[peer], exact) for peer in peers)


def test_lion8bit_is_bitsandbytes_s():
    # An average near zero has one sign or the other, by the last bit of a code.
    ours, theirs = wide("lion8bit"), PEERS["bitsandbytes_lion8bit"]
    assert (np.abs(ours - theirs) > 1e-6).mean() < 0.01


def test_muon_is_torch_s():
    ours = matrix(optim.muon(compare.RATE, weight_decay=0.0))
    assert off(ours, PEERS["torch_muon"]) < 0.02  # torch's iterates in bfloat16


@pytest.mark.parametrize(("name", "shape"), [("galore", compare.MATRIX), ("galore_square", compare.SQUARE)])
def test_galore_is_galore_torch_s(name, shape, monkeypatch):
    """In the basis that it takes: singular vectors, of any sign; of a square matrix on the side of what goes in."""

    def singular_vectors(g, start, key):
        return jnp.linalg.svd(g, full_matrices=False)[0][:, : start.shape[1]]

    monkeypatch.setattr(projection, "range_finder", singular_vectors)
    ours = matrix(optim.galore_adamw(compare.RATE, rank=compare.RANK, weight_decay=0.0), shape)
    assert off(ours, PEERS[name]) < 1e-3


@pytest.mark.parametrize(("name", "own"), [("apollo", {"rank": compare.RANK}), ("apollo_mini", {})])
def test_apollo_is_apollo_torch_s(name, own, monkeypatch):
    """On the projection that it drew."""
    drawn = jnp.asarray(PEERS[f"apollo_projection_{own.get('rank', 1)}"])
    monkeypatch.setattr(apollo, "random_projection", lambda *_: drawn)
    ours = matrix(getattr(optim, name)(compare.RATE, weight_decay=0.0, **own))
    assert off(ours, PEERS[name]) < 1e-3
