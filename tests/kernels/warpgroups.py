"""The warpgroups of a Mosaic GPU kernel on a CPU, for tests: a Python thread for each, numpy for each operation.

jax's own interpreter knows no product with an operand in registers. What is evaluated is what jax traces, barriers and
asynchronous products included: a warpgroup that would wait for ever, or read what is given back, is noticed.
"""

import functools
import itertools
import math
import operator
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.kernels.mosaic_launch import THREAD

PATIENCE = 60.0  # seconds that a warpgroup waits for the others before it is called a deadlock


def evaluator(call: Any, arrays: Any, grid: Any, warpgroups: int, outputs: Any, sums: Any) -> Callable[..., Any]:
    """For `mosaic_launch.EVALUATOR`."""
    return functools.partial(evaluated, _traced(call, arrays), grid, warpgroups, outputs, sums)


def _traced(call: Callable[..., Any], arrays: Sequence[jax.Array]) -> Any:
    """The traced kernel: a function on references."""
    (found,) = _kernels(jax.make_jaxpr(call)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)).jaxpr)
    return found


def _kernels(jaxpr: Any) -> list[Any]:
    found: list[Any] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "mpmd_map":
            found += eqn.params["jaxprs"]
        for inner in ("call", "jaxpr"):
            if inner in eqn.params:
                found += _kernels(getattr(eqn.params[inner], "jaxpr", eqn.params[inner]))
    return found


def evaluated(jaxpr: Any, grid: dict[str, int], warpgroups: int, outputs: Any, sums: Any, *arrays: Any) -> Any:
    """What a kernel on `arrays` writes, and what is in `sums`, zeros at first, when it is done."""
    written = [_unwritten(x.shape, x.dtype) for x in outputs]
    added = [np.zeros(x.shape, x.dtype) for x in sums]
    refs = [*map(np.asarray, arrays), *added, *written]
    with ThreadPoolExecutor(warpgroups) as pool:
        for place in itertools.product(*map(range, grid.values())):
            at, shared = dict(zip(grid, place, strict=True)), _Shared()
            groups = [_Warpgroup({**at, THREAD: i}, shared) for i in range(warpgroups)]
            for done in [pool.submit(group.start, jaxpr, refs) for group in groups]:
                done.result()
    return [*written, *added]


def _unwritten(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.full(shape, np.nan if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).min, dtype)


class _Barrier:
    def __init__(self, arrivals: int) -> None:
        self.arrivals, self.arrived = arrivals, 0
        self.changed = threading.Condition()

    def arrive(self) -> None:
        with self.changed:
            self.arrived += 1
            self.changed.notify_all()

    def wait(self, times: int) -> None:
        """Until it is complete for the `times`-th time. A GPU's barrier knows no more than whether that is odd."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.arrived >= times * self.arrivals, PATIENCE):
                raise RuntimeError("the warpgroups of a kernel wait for each other")
            if self.arrived >= (times + 1) * self.arrivals:
                raise RuntimeError("a barrier of a kernel was complete twice before one wait")


class _Sums:
    """Sums in registers."""

    def __init__(self, value: np.ndarray) -> None:
        self.value = value
        self.begun = 0  # products that nobody waited for yet

    def read(self) -> np.ndarray:
        if self.begun:
            raise RuntimeError("a kernel reads sums before their products are done")
        return self.value


class _Shared:
    """What the warpgroups of a program share: the first that comes makes it."""

    def __init__(self) -> None:
        self.made: dict[int, list[Any]] = {}
        self.lock = threading.Lock()

    def scope(self, eqn: Any, make: Callable[[], list[Any]]) -> list[Any]:
        with self.lock:
            return self.made[id(eqn)] if id(eqn) in self.made else self.made.setdefault(id(eqn), make())


class _Warpgroup:
    def __init__(self, at: dict[str, int], shared: _Shared) -> None:
        self.at, self.shared = at, shared
        self.waits: dict[_Barrier, int] = {}
        self.multiplying: list[tuple[_Sums, Callable[[], np.ndarray]]] = []

    def start(self, jaxpr: Any, refs: list[Any]) -> None:
        with np.errstate(all="ignore"):
            self.evaluate(jaxpr, refs)

    def evaluate(self, jaxpr: Any, values: Sequence[Any]) -> list[Any]:
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))
        for eqn in jaxpr.eqns:
            given = [x.val if hasattr(x, "val") else known[x] for x in eqn.invars]
            name = eqn.primitive.name.removesuffix("_p")
            of = getattr(self, f"_{name}", None)
            if of is None and name not in _OPERATIONS:
                raise NotImplementedError(f"{name} in a Mosaic kernel on a CPU")
            made = [_OPERATIONS[name](eqn.params, *given)] if of is None else of(eqn, *given)
            known.update(zip(eqn.outvars, made, strict=True))
        return [x.val if hasattr(x, "val") else known[x] for x in jaxpr.outvars]

    # Control.

    def _axis_index(self, eqn: Any) -> list[Any]:
        return [np.int32(self.at[eqn.params["axis_name"]])]

    def _jit(self, eqn: Any, *given: Any) -> list[Any]:
        return self.evaluate(eqn.params["jaxpr"].jaxpr, given)

    def _optimization_barrier(self, _: Any, *given: Any) -> list[Any]:
        return list(given)

    def _cond(self, eqn: Any, index: Any, *given: Any) -> list[Any]:
        return self.evaluate(eqn.params["branches"][int(index)].jaxpr, given)

    def _while(self, eqn: Any, *given: Any) -> list[Any]:
        first, second = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        state = list(given[second:])
        while self.evaluate(eqn.params["cond_jaxpr"].jaxpr, [*given[:first], *state])[0]:
            state = self.evaluate(eqn.params["body_jaxpr"].jaxpr, [*given[first:second], *state])
        return state

    def _scan(self, eqn: Any, *given: Any) -> list[Any]:
        """A loop of known length, which carries everything."""
        first = len(given) - len(eqn.outvars)
        consts, state = given[:first], list(given[first:])
        for _ in range(eqn.params["length"]):
            state = self.evaluate(eqn.params["jaxpr"].jaxpr, [*consts, *state])
        return state

    # Memory.

    def _run_scoped(self, eqn: Any, *given: Any) -> list[Any]:
        inner, how = eqn.params["jaxpr"], eqn.params["ref_transforms"]

        def make() -> list[Any]:
            return [_held(var.aval, transforms) for var, transforms in zip(inner.invars, how, strict=True)]

        held = self.shared.scope(eqn, make) if eqn.params["collective_axes"] else make()
        return self.evaluate(inner, [*given, *held])

    def _run_state(self, eqn: Any, *given: Any) -> list[Any]:
        inner = eqn.params["jaxpr"]
        held = [_Sums(x) if _is_sums(var.aval) else x for var, x in zip(inner.invars, given, strict=True)]
        self.evaluate(inner, held)
        self._wait_for_products(0)
        return [x.read() if isinstance(x, _Sums) else x for x in held]

    def _get(self, eqn: Any, ref: Any, *leaves: Any) -> list[Any]:
        return [_read(ref, eqn.params["tree"].unflatten(leaves))]

    _load = _get

    def _swap(self, eqn: Any, ref: Any, value: Any, *leaves: Any) -> list[Any]:
        where = eqn.params["tree"].unflatten(leaves)
        before = _read(ref, where)
        _write(ref, where, value)
        return [before]

    def _copy_gmem_to_smem(self, eqn: Any, source: Any, target: Any, barrier: Any, *leaves: Any) -> list[Any]:
        names = "src_transforms_treedef", "dst_transforms_treedef", "barrier_transforms_treedef"
        from_, to, which = _unflattened(eqn.params, leaves, *names)
        _write(target, to, _read(source, from_))
        _one_of(barrier, which).arrive()
        return []

    def _copy_smem_to_gmem(self, eqn: Any, source: Any, target: Any, *leaves: Any) -> list[Any]:
        from_, to = _unflattened(eqn.params, leaves, "src_transforms_treedef", "dst_transforms_treedef")
        how = eqn.params["reduction_op"]
        if how not in (None, "add"):
            raise NotImplementedError(f"copies that {how} in a Mosaic kernel on a CPU")
        value = _read(source, from_)
        _write(target, to, value if how is None else _read(target, to) + value)
        return []

    # Barriers and products.

    def _barrier_arrive(self, eqn: Any, barriers: Any, *leaves: Any) -> list[Any]:
        _one_of(barriers, eqn.params["transforms_treedef"].unflatten(leaves)).arrive()
        return []

    def _barrier_wait(self, eqn: Any, barriers: Any, *leaves: Any) -> list[Any]:
        barrier = _one_of(barriers, eqn.params["transforms_treedef"].unflatten(leaves))
        self.waits[barrier] = self.waits.get(barrier, 0) + 1
        barrier.wait(self.waits[barrier])
        return []

    def _wgmma_ref(self, eqn: Any, sums: _Sums, a: Any, b: Any, *leaves: Any) -> list[Any]:
        """A product is done when it is waited for, so that an operand given back too soon is noticed."""
        _, at_a, at_b = _unflattened(eqn.params, leaves, *(f"{x}_transforms_tree" for x in ("acc", "a", "b")))
        product = lambda: np.matmul(_read(a, at_a).astype(np.float32), _read(b, at_b).astype(np.float32))  # noqa: E731
        sums.begun += 1
        self.multiplying.append((sums, product))
        return []

    def _wait_for_products(self, but: int) -> None:
        while len(self.multiplying) > but:
            sums, product = self.multiplying.pop(0)
            sums.value = sums.value + product()
            sums.begun -= 1

    def _wgmma_wait(self, eqn: Any, *given: Any) -> list[Any]:
        self._wait_for_products(int(eqn.params["n"] if "n" in eqn.params else given[0]))
        return []

    def _wgmma_accumulator_deref(self, eqn: Any, sums: _Sums) -> list[Any]:
        if eqn.params["wait_n"] is not None:
            self._wait_for_products(eqn.params["wait_n"])
        return [sums.read()]

    def _nothing(self, *_: Any) -> list[Any]:
        return []

    _commit_smem = _commit_group = _wait_smem_to_gmem = _set_max_registers = _nothing


def _is_sums(aval: Any) -> bool:
    return type(aval).__name__ == "WGMMAAbstractAccumulatorRef"


def _held(aval: Any, transforms: Any) -> Any:
    shape = aval.shape
    if hasattr(aval.dtype, "num_arrivals"):
        return [_Barrier(aval.dtype.num_arrivals) for _ in range(math.prod(shape))]
    if _is_sums(aval):
        return _Sums(np.zeros(shape, aval.dtype))
    for transform in transforms:  # memory lies in tiles
        if (tiling := getattr(transform, "tiling", None)) is not None:
            count, whole = len(tiling), shape[: -len(tiling)]
            shape = (*whole[:-count], *(a * b for a, b in zip(whole[-count:], tiling, strict=True)))
    return _unwritten(shape, aval.dtype)


def _unflattened(params: dict[str, Any], leaves: Sequence[Any], *names: str) -> list[Any]:
    made, rest = [], list(leaves)
    for tree in map(params.__getitem__, names):
        count = 0 if tree is None else tree.num_leaves
        made.append(() if tree is None else tree.unflatten(rest[:count]))
        rest = rest[count:]
    return made


def _one_of(barriers: list[_Barrier], transforms: Any) -> _Barrier:
    if transforms:
        return barriers[int(transforms[0].indices[0])]
    (only,) = barriers
    return only


def _read(ref: Any, transforms: Any) -> np.ndarray:
    """A copy. What lies beyond the end of global memory is zeros."""
    found, shape = _view(ref, transforms)
    made = np.zeros(shape, found.dtype)
    made[tuple(map(slice, found.shape))] = found
    return made


def _write(ref: Any, transforms: Any, value: np.ndarray) -> None:
    """What lies beyond the end is dropped."""
    found, _ = _view(ref, transforms)
    found[...] = value[tuple(map(slice, found.shape))]


def _view(ref: Any, transforms: Any) -> tuple[Any, tuple[int, ...]]:
    """The part of a reference that is there, and the shape that was asked for."""
    ref = np.asarray(ref)
    shape = ref.shape
    for transform in transforms:
        if hasattr(transform, "indices"):
            at = [
                slice(int(i.start), int(i.start) + i.size) if hasattr(i, "start") else int(i) for i in transform.indices
            ]
            shape = tuple(i.stop - i.start for i in at if isinstance(i, slice))
            ref = ref[tuple(at)]
        elif hasattr(transform, "permutation"):
            ref, shape = ref.transpose(transform.permutation), tuple(shape[i] for i in transform.permutation)
    return ref, shape


def _divided(_: Any, a: Any, b: Any) -> Any:
    if np.issubdtype(np.result_type(a), np.integer):
        return (np.abs(a) // np.abs(b) * np.sign(a) * np.sign(b)).astype(a.dtype)
    return a / b


def _spread(params: Any, x: Any, *_: Any) -> np.ndarray:
    shape = [1] * len(params["shape"])
    for place, size in zip(params["broadcast_dimensions"], np.shape(x), strict=True):
        shape[place] = size
    return np.broadcast_to(np.reshape(x, shape), params["shape"])


def _counted(params: Any, *_: Any) -> np.ndarray:
    count = np.arange(params["shape"][params["dimension"]], dtype=params["dtype"])
    return _spread({"shape": params["shape"], "broadcast_dimensions": (params["dimension"],)}, count)


def _of(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, *given: function(*given)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    **{
        name: _of(getattr(operator, name))
        for name in ("abs", "add", "sub", "mul", "neg", "eq", "ne", "lt", "le", "gt", "ge")
    },
    **{name: _of(getattr(np, name)) for name in ("exp2", "log")},
    "div": _divided,
    "rem": _of(np.fmod),
    "round": _of(np.round),
    "max": _of(np.maximum),
    "min": _of(np.minimum),
    "clamp": _of(lambda low, x, high: np.clip(x, low, high)),
    "and": _of(operator.and_),
    "or": _of(operator.or_),
    "xor": _of(operator.xor),
    "shift_right_logical": _of(operator.rshift),  # of words without a sign
    "select_n": _of(lambda which, no, yes: np.where(which, yes, no)),
    "reduce_max": lambda params, x: np.max(x, axis=params["axes"]),
    "reduce_sum": lambda params, x: np.sum(x, axis=params["axes"]),
    "convert_element_type": lambda params, x: np.asarray(x).astype(params["new_dtype"]),
    "broadcast_in_dim": _spread,
    "iota": _counted,
    "layout_cast": _of(lambda x: x),
    "reshard": _of(lambda x: x),
}
