"""The work that is measured: the arrays of an operation, its passes by any implementation, and their exact results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem.typing import JsonView, Tree
from scripts.bench.contest import Call

Run = Callable[..., Any]


@dataclass(frozen=True)
class BenchPass:
    """A pass that is measured. `exact` computes the result of `run` from the same arrays in float64."""

    run: Run  # (an implementation's name, *arrays of the work) -> result
    exact: Run
    amount: float  # TFLOP or GB
    step: float = 2**-8  # the unit of errors, relative to the largest value
    read: Run = lambda result: result  # returns the part of the result that is compared; not timed
    in_place: tuple[tuple[int, int], ...] = ()  # (argument, result) pairs that share memory, as in a training step
    gradients: tuple[int, ...] = ()  # the arguments with respect to which the pass differentiates; (): forward

    def compiled(self, implementation: str, work: BenchWork) -> Call:
        """The compiled pass. Arrays that it updates in place are passed on to the next call."""
        with jax.numpy_dtype_promotion("standard"):  # jax.nn's attention needs it
            run, arrays = self._timed(implementation, work)
            donated = [place for place, _ in self.in_place]
            executable = jax.jit(run, donate_argnums=donated).lower(*arrays).compile()
        current = [jax.tree.map(jnp.copy, x) if i in donated else x for i, x in enumerate(arrays)]

        def call() -> Tree:
            results = executable(*current)
            for place, result in self.in_place:
                current[place] = results[result]
            return results

        return call

    def expected(self, work: BenchWork) -> Tree:
        """The exact result."""
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            arrays, cotangents = jax.tree.map(_as_float64, (work.arrays, work.cotangents))
            return jax.jit(self._complete(self.exact))(arrays, cotangents)

    def error(self, implementation: str, work: BenchWork, expected: Tree) -> float:
        """The error in steps. Outputs are initialized with NaN or the largest integer, so that missing writes are
        found."""
        run, arrays = self._timed(implementation, work)
        poison = [poisoned(x) for x in jax.tree.leaves(jax.eval_shape(run, *arrays))]
        into = jax.jit(lambda _, *arrays: run(*arrays), donate_argnums=0, keep_unused=True)
        return self.error_of(into.lower(poison, *arrays).compile()(poison, *arrays), expected)

    def error_of(self, result: Tree, expected: Tree) -> float:
        """The largest error of all arrays, in steps relative to the largest value of each; infinite for NaN."""

        @jax.jit
        def error(x: jax.Array, y: jax.Array) -> jax.Array:
            difference = jnp.abs(x.astype(jnp.float64) - y)
            steps = jnp.max(difference) / (jnp.max(jnp.abs(y)) * self.step)
            known = jnp.all(jnp.isfinite(difference)) & jnp.isfinite(steps)  # on a CPU a maximum may ignore NaN
            return jnp.where(known, steps, jnp.inf)

        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            leaves = jax.tree.leaves(self.read(result)), jax.tree.leaves(jax.tree.map(_as_float64, expected))
            return max(float(error(x, y)) for x, y in zip(*leaves, strict=True))

    def _complete(self, run: Run) -> Run:
        """The pass as one function of arrays and cotangents."""
        return lambda arrays, d: self._pull(run, arrays)(d) if self.gradients else run(*arrays)

    def _timed(self, implementation: str, work: BenchWork) -> tuple[Run, tuple[Any, ...]]:
        """The function that is timed, and its arguments. For a backward pass, the forward pass is computed first."""
        if not self.gradients:
            return partial(self.run, implementation), work.arrays
        pull = jax.jit(lambda arrays: self._pull(partial(self.run, implementation), arrays))(work.arrays)
        return lambda pull, d: pull(d), (pull, work.cotangents)

    def _pull(self, run: Run, arrays: tuple[Tree, ...]) -> Tree:
        def of_these(*some: Any) -> Any:
            return run(*(dict(enumerate(arrays)) | dict(zip(self.gradients, some, strict=True))).values())

        return jax.vjp(of_these, *(arrays[i] for i in self.gradients))[1]


class BenchWork(NamedTuple):
    arrays: tuple[Tree, ...]
    passes: Mapping[str, BenchPass]
    unit: str
    cotangents: Tree = None  # shaped like the result, for passes that compute gradients


@dataclass(frozen=True)
class BenchOperation:
    implementations: JsonView
    shapes: JsonView
    small: Callable[[Any], Any]  # returns a tiny shape, for a dry run without a GPU
    work: Callable[[Any], BenchWork]
    passes: tuple[str, ...] = ("forward", "backward")
    others: tuple[str, ...] = ()  # other functions of jax that compute a pass, to compare with
    usual: tuple[str, ...] = ()  # the default shapes, if a command names none; (): all
    plain: str = "reference"  # the implementation in plain JAX to compare with
    # The works that are checked, one per option and the first without options; None: only `work`.
    checks: Callable[[Any], Mapping[str, Callable[[], BenchWork]]] | None = None

    def shape(self, name: str, *, dry: bool) -> Tree:
        return self.small(self.shapes[name]) if dry else self.shapes[name]


def poisoned(x: Any) -> jax.Array:
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.full(x.shape, jnp.nan if floating else jnp.iinfo(x.dtype).max, x.dtype)


def _as_float64(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
