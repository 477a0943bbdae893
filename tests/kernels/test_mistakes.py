"""What operations refuse: an argument that is wrong is named, with what it should be, the same by every implementation.
And what they take in place of a jax array and of Python's numbers."""

import re

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmem.kernels import AdamHyperparameters, Moments8, adam8_update, attention, int8_add
from jaxmem.kernels.fused_attention import IMPLEMENTATIONS as ATTENTION
from jaxmem.kernels.quantized_update import IMPLEMENTATIONS as ADAM8_UPDATE
from jaxmem.kernels.validation import PLAIN, describe

KEY = jax.random.key(7)


@pytest.fixture(autouse=True)
def as_outside_of_tests(monkeypatch):
    """Where nobody holds arguments against annotations."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def adam8(g, m, v, m_scale, v_scale, unbiased, **options):
    adam = {name: options.pop(name) for name in ("beta1", "beta2", "epsilon") if name in options}
    state = Moments8(m, v, m_scale, v_scale)
    return adam8_update(g, state, unbiased, adam=AdamHyperparameters(**adam), **options)


Q = ((2, 8, 4, 8), "float16")
# Of each operation: its implementations, a call that it takes, arrays by shape and dtype; and what it refuses of that.
CALLS = {
    "attention": (
        ATTENTION,
        attention,
        {"q": Q, "k": Q, "v": Q, "segment_ids": None, "kv_segment_ids": None},
        {},
    ),
    "adam8_update": (
        ADAM8_UPDATE,
        adam8,
        {
            "g": ((4, 64), "float32"), "m": ((4, 64), "uint8"), "v": ((4, 64), "uint8"),
            "m_scale": ((4, 1), "float32"), "v_scale": ((4, 1), "float32"), "unbiased": ((2,), "float32"),
        },
        {"block_size": 64},
    ),
    "int8_add": (
        ADAM8_UPDATE,
        int8_add,
        {
            "codes": ((4, 64), "int8"), "scale": ((4, 1), "float32"), "update": ((4, 64), "float32"),
            "seeds": ((4, 1), "uint32"),
        },
        {"axis": -1, "block_size": 64},
    ),
}  # fmt: skip
REFUSED = {
    "attention": [
        (
            {"q": (2, 8, 4)},
            "q has shape (2, 8, 4); it should be [batch, sequence, heads, dim], with no empty dimension",
        ),
        ({"q": (2, 0, 4, 8)}, "q has shape (2, 0, 4, 8); it should be [batch, sequence, heads, dim], with no empty"),
        ({"k": (2, 8, 4, 8, 1)}, "k has shape"),
        ({"v": (2, 9, 4, 8)}, "k has shape (2, 8, 4, 8) and v (2, 9, 4, 8); they should be the same"),
        ({"k": (3, 8, 4, 8), "v": (3, 8, 4, 8)}, "k has batch 3 and q 2"),
        ({"k": (2, 8, 4, 4), "v": (2, 8, 4, 4)}, "k has dim 4 and q 8"),
        ({"k": (2, 8, 3, 8), "v": (2, 8, 3, 8)}, "k has 3 heads; the 4 heads of q should be a multiple of them"),
        ({"k": "bfloat16"}, "k is bfloat16 and q is float16; they should be the same"),
        ({"q": "int32"}, "q is int32; it should be one of"),
        ({"window": 0}, "window is 0; it should be at least 1"),
        ({"window": -(2**40)}, "window is -1099511627776; it should be at least 1"),
        ({"soft_cap": 0.0}, "soft_cap is 0.0; it should be above 0"),
        ({"segment_ids": ((2, 9), "int32")}, "segment_ids has shape (2, 9); it should be [batch, sequence], (2, 8)"),
        ({"segment_ids": ((2, 8), "float32")}, "segment_ids is float32; it should be an integer dtype"),
        ({"segment_ids": ((2, 8), "int32"), "kv_segment_ids": ((2, 7), "int32")}, "kv_segment_ids has shape (2, 7)"),
        (
            {"segment_ids": ((2, 8), "int32"), "k": (2, 9, 4, 8), "v": (2, 9, 4, 8)},
            "kv_segment_ids is missing; with 8 queries and 9 keys both are needed",
        ),
        ({"kv_segment_ids": ((2, 8), "int32")}, "segment_ids is missing"),
    ],
    "adam8_update": [
        ({"g": (8,)}, "g has shape (8,); it should be [..., rows, columns]"),
        ({"g": (0, 64)}, "g has shape (0, 64); it should be [..., rows, columns]"),
        ({"g": "int32"}, "g is int32; it should be one of float32"),
        ({"axis": 0}, "axis is 0; it should be -1 or -2"),
        ({"beta1": 1}, "beta1 is 1.0; it should be in [0, 1)"),
        ({"beta2": -0.1}, "beta2 is -0.1; it should be in [0, 1)"),
        ({"epsilon": -1.0}, "epsilon is -1.0; it should not be negative"),
        ({"block_size": 48}, "block_size is 48; the 64 values along axis -1 should be a multiple of it"),
        ({"m": (4, 32)}, "m has shape (4, 32); it should be g's, (4, 64)"),
        ({"v": "int8"}, "v is int8; it should be uint8"),
        ({"m_scale": (4, 2)}, "m_scale has shape (4, 2); with blocks of 64 it should be (4, 1)"),
        ({"v_scale": "bfloat16"}, "v_scale is bfloat16; it should be float32"),
        ({"unbiased": (3,)}, "unbiased has shape (3,); it should be (2,)"),
    ],
    "int8_add": [
        ({"update": (64,)}, "update has shape (64,); it should be [..., rows, columns]"),
        ({"codes": "uint8"}, "codes is uint8; it should be int8"),
        ({"codes": (4, 32)}, "codes has shape (4, 32); it should be update's, (4, 64)"),
        ({"seeds": "int32"}, "seeds is int32; it should be uint32"),
        ({"seeds": ()}, "seeds has shape (); with blocks of 64 it should be (4, 1)"),
        ({"scale": (4, 2)}, "scale has shape (4, 2); with blocks of 64 it should be (4, 1)"),
        ({"scale": "bfloat16"}, "scale is bfloat16; it should be float32"),
    ],
}
CASES = [(operation, *case) for operation, cases in REFUSED.items() for case in cases]
# Options that are whole numbers, numbers, or True and False.
WHOLE = {
    "attention": ("window",), "adam8_update": ("axis", "block_size"),
    "int8_add": ("axis", "block_size"),
}  # fmt: skip
NUMBERS = {
    "attention": ("scale", "soft_cap"), "adam8_update": ("beta1", "beta2", "epsilon"),
}  # fmt: skip
FLAGS = {"attention": ("causal",)}
NO_NUMBER = ["3", b"3", [3], np.array([3]), np.array([3.0, 4.0]), True, 1j, KEY]


def call(operation, implementation, changes):
    """`changes`: of arrays the shape, the dtype or both; of options the value."""
    _, function, arrays, options = CALLS[operation]
    given = {}
    for name, usual in arrays.items():
        change = changes.get(name)
        shape, dtype = usual or (None, None)
        if isinstance(change, str):
            dtype = change
        elif change is not None and len(change) == 2 and isinstance(change[1], str):
            shape, dtype = change
        elif change is not None:
            shape = change
        given[name] = None if shape is None else jax.ShapeDtypeStruct(shape, dtype)
    options = {**options, **{name: value for name, value in changes.items() if name not in arrays}}
    return jax.eval_shape(lambda given: function(**given, **options, implementation=implementation), given)


def refused(operation, message, *changes):
    """By each implementation, and where none is named."""
    for implementation in (*CALLS[operation][0], None):
        for change in changes:
            with pytest.raises(ValueError, match=re.escape(f"{operation}: {message(change)}")) as found:
                call(operation, implementation, change)
            assert "\n" not in str(found.value).split("\n---")[0]  # jax adds where its own frames went


@pytest.mark.parametrize(("operation", "changes", "message"), CASES)
def test_mistakes_are_named(operation, changes, message):
    refused(operation, lambda _: message, changes)


def drawn(operation):
    """Arrays of a call, in numpy."""
    rng = np.random.default_rng(0)
    arrays = {name: usual for name, usual in CALLS[operation][2].items() if usual is not None}
    return {
        name: rng.integers(0, 3, shape).astype(dtype) if "int" in dtype else rng.random(shape).astype(dtype)
        for name, (shape, dtype) in arrays.items()
    } | {name: None for name in CALLS[operation][2] if name not in arrays}


@pytest.mark.parametrize("operation", CALLS)
def test_what_is_no_array_is_named(operation):
    implementations, function, arrays, options = CALLS[operation]
    needed = [name for name in arrays if arrays[name] is not None]
    for name in needed:
        for value in ([1.0], None, 3.0, "x", np.float32(1), {}, (1, 2)):
            given = drawn(operation) | {name: value}
            message = re.escape(f"{operation}: {name} is {describe(value)}; it should be an array")
            for implementation in (*implementations, None):
                with pytest.raises(ValueError, match=message):
                    function(**given, **options, implementation=implementation)


def test_a_plain_tuple_is_no_state():
    *arrays, unbiased = drawn("adam8_update").values()
    for way in ADAM8_UPDATE:
        with pytest.raises(ValueError, match="adam8_update: state is a tuple; it should be Moments8"):
            adam8_update(arrays[0], tuple(arrays[1:]), unbiased, block_size=64, implementation=way)


@pytest.mark.parametrize(("operation", "name"), [(o, name) for o, names in WHOLE.items() for name in names])
def test_what_is_no_whole_number_is_named(operation, name):
    values = [*NO_NUMBER, 2.5, 3.0, np.float32(3), jnp.float32(3)]
    values += [] if name == "window" else [None]
    said = lambda change: f"{name} is {describe(change[name])}; it should be a whole number"  # noqa: E731
    refused(operation, said, *({name: value} for value in values))
    traced = f"{operation}: {name} is traced, int32(); it should be a whole number"
    with pytest.raises(ValueError, match=re.escape(traced)):
        jax.eval_shape(lambda value: call(operation, None, {name: value}), jnp.int32(3))


@pytest.mark.parametrize(("operation", "name"), [(o, name) for o, names in NUMBERS.items() for name in names])
def test_what_is_no_number_is_named(operation, name):
    values = [*NO_NUMBER, float("nan"), float("inf"), *([] if name in ("scale", "soft_cap") else [None])]
    said = lambda change: f"{name} is {describe(change[name])}; it should be a finite number"  # noqa: E731
    refused(operation, said, *({name: value} for value in values))
    traced = f"{operation}: {name} is traced, float32(); it should be a finite number"
    with pytest.raises(ValueError, match=re.escape(traced)):
        jax.eval_shape(lambda value: call(operation, None, {name: value}), jnp.float32(3))


@pytest.mark.parametrize(("operation", "name"), [(o, name) for o, names in FLAGS.items() for name in names])
def test_what_is_neither_true_nor_false_is_named(operation, name):
    said = lambda change: f"{name} is {describe(change[name])}; it should be True or False"  # noqa: E731
    refused(operation, said, *({name: value} for value in (1, None, "no", [])))


@pytest.mark.parametrize("operation", CALLS)
def test_what_is_right_is_taken_and_an_unknown_implementation_is_not(operation):
    implementations = CALLS[operation][0]
    for implementation in implementations:
        call(operation, implementation, {})
    known = ", ".join(sorted(implementations))
    for name in ("refrence", 3, ["reference"]):
        message = f"{operation}: implementation is {describe(name)}; it should be one of {known}"
        with pytest.raises(
            ValueError, match=re.escape(message) + (", nearest reference" if name == "refrence" else "")
        ):
            call(operation, name, {})


@pytest.mark.parametrize("operation", CALLS)
def test_numpys_arrays_and_numbers_are_taken(operation):
    """The same as jax's and Python's."""
    _, function, _, options = CALLS[operation]
    usual = {"window": 3, "scale": 0.5, "soft_cap": 2.0, "beta1": 0.5, "epsilon": 0.25}
    names = [*WHOLE.get(operation, ()), *NUMBERS.get(operation, ())]
    options = options | {name: usual[name] for name in names if name in usual}
    arrays = drawn(operation)
    wanted = function(**jax.tree.map(jnp.asarray, arrays), **options)
    for kind in (lambda n: np.float32(n) if isinstance(n, float) else np.int64(n), jnp.asarray):
        more = {name: kind(value) if name in names else value for name, value in options.items()}
        for one, other in zip(jax.tree.leaves(function(**arrays, **more)), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.exhaustive
def test_a_window_beyond_32_bits_is_all_there_is():
    for implementation in ATTENTION:
        call("attention", implementation, {"window": 2**40})
    arrays, way = drawn("attention"), "reference"
    whole, wide = (attention(**arrays, **o, implementation=way) for o in ({"causal": True}, {"window": 2**40}))
    np.testing.assert_array_equal(whole, wide)


@pytest.mark.parametrize("operation", CALLS)
def test_a_kernel_refuses_sharded_arrays(operation):
    """Which XLA would gather on each of them. What is whole everywhere it takes, and plain JAX takes both."""
    implementations, function, _, options = CALLS[operation]
    mesh, seen = (
        Mesh(np.array(jax.devices()[:2]), ("d",), axis_types=(kind,)) for kind in (AxisType.Auto, AxisType.Explicit)
    )
    first, *rest = drawn(operation).items()
    name, x = first
    split, whole = NamedSharding(mesh, PartitionSpec("d")), NamedSharding(mesh, PartitionSpec())
    put = lambda sharding: {name: jax.device_put(x, sharding), **dict(rest)}  # noqa: E731
    known = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(seen, PartitionSpec("d")))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), dict(rest))
    for implementation in implementations:
        run = lambda arrays, way=implementation: function(**arrays, **options, implementation=way)  # noqa: E731
        if implementation in PLAIN:
            jax.eval_shape(lambda _, run=run: run(put(split)), 0)
            continue
        jax.eval_shape(lambda _, run=run: run(put(whole)), 0)
        message = f"{operation}: an array of shape {x.shape} is sharded over devices, which the {implementation}"
        with pytest.raises(ValueError, match=re.escape(message) + ".*call it within jax.shard_map"):
            run(put(split))
        with jax.set_mesh(seen), pytest.raises(ValueError, match=re.escape(message)):
            jax.eval_shape(run, {name: known, **shapes})
