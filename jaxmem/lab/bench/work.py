"""What is measured of an operation: arrays, passes over them by any implementation, and what these should give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem.lab.bench.contest import Call, largest_error

Run = Callable[..., Any]


@dataclass(frozen=True)
class BenchPass:
    """`exact` is what `run` should give, of the same arrays in float64; or the name of an implementation that gives it,
    where that would be too large."""

    run: Run  # (an implementation's name, *arrays of the work) -> result
    exact: Run | str
    amount: float  # TFLOP or GB
    step: float = 2**-8  # what counts as one step of error, as a share of the largest value
    read: Run = lambda made: made  # what of the result is compared, outside of the time
    in_place: tuple[tuple[int, int], ...] = ()  # which argument's memory which result takes, as in a run
    gradients: tuple[int, ...] = ()  # of which arguments the pass gives them; of none: it is the forward pass

    def traced(self, implementation: str, work: BenchWork) -> None:
        """Nothing is computed."""
        jax.eval_shape(self._whole(partial(self.run, implementation)), work.arrays, work.cotangents)

    def compiled(self, implementation: str, work: BenchWork) -> Call:
        """By an implementation; what is updated in place goes on from call to call."""
        with jax.numpy_dtype_promotion("standard"):  # jax's own attention needs it
            run, arrays = self._made(implementation, work)
            own = [place for place, _ in self.in_place]
            made_by = jax.jit(run, donate_argnums=own).lower(*arrays).compile()
        held = [jax.tree.map(jnp.copy, x) if i in own else x for i, x in enumerate(arrays)]

        def call() -> Any:
            made = made_by(*held)
            for place, result in self.in_place:
                held[place] = made[result]
            return made

        return call

    def wanted(self, work: BenchWork) -> Any:
        exact = self.exact
        if isinstance(exact, str):
            return self.read(self.compiled(exact, work)())
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            arrays, cotangents = jax.tree.map(_wide, (work.arrays, work.cotangents))
            return jax.jit(self._whole(exact))(arrays, cotangents)

    def error(self, implementation: str, work: BenchWork, wanted: Any) -> float:
        """Steps of it. The results are written where NaN, or the largest integer, stood: what a kernel leaves out
        shows."""
        run, arrays = self._made(implementation, work)
        poison = [poisoned(x) for x in jax.tree.leaves(jax.eval_shape(run, *arrays))]
        into = jax.jit(lambda _, *arrays: run(*arrays), donate_argnums=0, keep_unused=True)
        return self.far(into.lower(poison, *arrays).compile()(poison, *arrays), wanted)

    def far(self, made: Any, wanted: Any) -> float:
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            return largest_error(self.read(made), jax.tree.map(_wide, wanted), self.step)

    def _whole(self, run: Run) -> Run:
        """The pass as one function of arrays and cotangents."""
        return lambda arrays, d: self._pull(run, arrays)(d) if self.gradients else run(*arrays)

    def _made(self, implementation: str, work: BenchWork) -> tuple[Run, tuple[Any, ...]]:
        """What is timed, and on what. What a backward pass needs of the forward pass is made before."""
        if not self.gradients:
            return partial(self.run, implementation), work.arrays
        pull = jax.jit(lambda arrays: self._pull(partial(self.run, implementation), arrays))(work.arrays)
        return lambda pull, d: pull(d), (pull, work.cotangents)

    def _pull(self, run: Run, arrays: tuple[Any, ...]) -> Any:
        def of_these(*some: Any) -> Any:
            given = dict(enumerate(arrays)) | dict(zip(self.gradients, some, strict=True))
            return run(*given.values())

        return jax.vjp(of_these, *(arrays[i] for i in self.gradients))[1]


class BenchWork(NamedTuple):
    arrays: tuple[Any, ...]
    passes: Mapping[str, BenchPass]
    unit: str
    cotangents: Any = None  # like the result, for passes that give gradients
    kernels: Mapping[str, BenchPass] = {}  # passes of single kernels, where those above are of several


@dataclass(frozen=True)
class BenchOperation:
    implementations: Mapping[str, Any]
    shapes: Mapping[str, Any]
    small: Callable[[Any], Any]  # of a shape one that shows without a GPU that all of it works
    work: Callable[[Any], BenchWork]
    passes: tuple[str, ...] = ("forward", "backward")
    tuned: tuple[str, ...] = ()  # shapes on which kernels are cut in all ways: one of each kind
    peers: Mapping[str, Callable[[Any], Mapping[str, Call]]] = field(default_factory=dict)  # of libraries for PyTorch
    beside: tuple[str, ...] = ()  # what else in jax a pass can be run by, to compare with
    usual: tuple[str, ...] = ()  # shapes that are measured where none is named; otherwise all
    plain: str = "reference"  # the implementation in plain JAX that is to be beaten
    checks: Callable[[Any], Mapping[str, Callable[[], BenchWork]]] | None = (
        None  # with each option; the first without any
    )

    def shape(self, name: str, *, dry: bool) -> Any:
        return self.small(self.shapes[name]) if dry else self.shapes[name]


def poisoned(x: Any) -> jax.Array:
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.full(x.shape, jnp.nan if floating else jnp.iinfo(x.dtype).max, x.dtype)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
