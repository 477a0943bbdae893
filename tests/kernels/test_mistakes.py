"""What operations refuse: an argument that is wrong is named, with what it should be, the same by every implementation.
Attention's are in its own file."""

from __future__ import annotations

import re

import jax
import pytest

from jaxmem.kernels import (
    Constants,
    Moments8,
    adam8_update,
    cross_entropy,
    dequant_matmul,
    int8_add,
    rms_norm,
    sliding_max,
)
from jaxmem.kernels.adam8_update import IMPLEMENTATIONS as ADAM8_UPDATE
from jaxmem.kernels.cross_entropy import IMPLEMENTATIONS as CROSS_ENTROPY
from jaxmem.kernels.dequant_matmul import IMPLEMENTATIONS as DEQUANT_MATMUL
from jaxmem.kernels.rms_norm import IMPLEMENTATIONS as RMS_NORM
from jaxmem.kernels.sliding_max import IMPLEMENTATIONS as SLIDING_MAX


def in_codes(x, codes, constants, scale, groups, mean, **options):
    scale = scale if constants is None else Constants(constants, groups, mean)
    return dequant_matmul(x, codes, scale, **options)


def adam8(g, m, v, m_scale, v_scale, unbiased, **options):
    return adam8_update(g, Moments8(m, v, m_scale, v_scale), unbiased, **options)


# Of each operation: its implementations, a call that it takes, arrays by shape and dtype; and what it refuses of that.
CALLS = {
    "dequant_matmul": (
        DEQUANT_MATMUL,
        in_codes,
        {
            "x": ((3, 64), "float32"), "codes": ((32, 8), "uint8"), "constants": None, "scale": ((2, 8), "float32"),
            "groups": ((1, 8), "float32"), "mean": ((1, 1), "float32"),
        },
        {"format": "nf4", "block_size": 32},
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
    "rms_norm": (
        RMS_NORM,
        rms_norm,
        {"x": ((4, 8), "float32"), "scale": ((8,), "float32"), "residual": ((4, 8), "float32")},
        {},
    ),
    "cross_entropy": (
        CROSS_ENTROPY,
        cross_entropy,
        {"x": ((4, 8), "float32"), "weight": ((8, 20), "float32"), "labels": ((4,), "int32")},
        {},
    ),
    "sliding_max": (SLIDING_MAX, sliding_max, {"x": ((9,), "float32")}, {"window": 3}),
}  # fmt: skip
REFUSED = {
    "dequant_matmul": [
        ({"format": "nf3"}, "format is 'nf3'; it should be one of nf4, fp4, int4, int8"),
        ({"x": ()}, "x has shape (); it should be [..., inputs], of no dimension empty"),
        ({"x": (0, 64)}, "x has shape (0, 64); it should be [..., inputs], of no dimension empty"),
        ({"x": "int32"}, "x is int32; it should be one of"),
        ({"codes": (32, 8, 1)}, "codes has shape (32, 8, 1)"),
        ({"codes": (32, 0), "scale": (2, 0)}, "codes has shape (32, 0); it should be [inputs, outputs]"),
        ({"codes": "int8"}, "codes is int8; codes of nf4 are uint8"),
        ({"codes": (64, 8)}, "codes has 64 rows; 64 inputs in nf4 take 32"),
        ({"scale": (3, 8)}, "scale has shape (3, 8); 64 inputs in blocks of 32 take (2, 8)"),
        ({"scale": "bfloat16"}, "scale is bfloat16; it should be float32"),
        ({"constants": ((2, 8), "int8")}, "scale has codes in int8; they should be uint8"),
        ({"constants": ((2, 8), "uint8"), "mean": (1,)}, "scale has groups of shape (1, 8) and a mean of (1,)"),
        ({"constants": ((2, 8), "uint8"), "groups": (0, 8)}, "scale has groups of shape (0, 8) and a mean of (1, 1)"),
        (
            {"constants": ((2, 8), "uint8"), "groups": "bfloat16"},
            "scale has groups in bfloat16; they should be float32",
        ),
        ({"block_size": 0}, "block_size is 0; it should be at least 1"),
        ({"inputs": 60}, "x has shape (3, 64); its last dimension should be the 60 inputs"),
        ({"transposed": True}, "x has shape (3, 64); its last dimension should be the 8 outputs"),
    ],
    "adam8_update": [
        ({"g": (8,)}, "an array of shape (8,); it should be [..., rows, columns]"),
        ({"g": (0, 64)}, "an array of shape (0, 64); it should be [..., rows, columns]"),
        ({"g": "int32"}, "numbers in int32; they should be in one of float32"),
        ({"axis": 0}, "axis is 0; it should be -1 or -2"),
        ({"block_size": 48}, "blocks of 48 do not fill the 64 numbers along axis -1"),
        ({"m": (4, 32)}, "m has shape (4, 32); it should be that of its numbers, (4, 64)"),
        ({"v": "int8"}, "v is int8; it should be uint8"),
        ({"m_scale": (4, 2)}, "m_scale has shape (4, 2); blocks of 64 take (4, 1)"),
        ({"v_scale": "bfloat16"}, "v_scale is bfloat16; it should be float32"),
        ({"unbiased": (3,)}, "unbiased is float32(3,); it should be two in float32"),
    ],
    "int8_add": [
        ({"update": (64,)}, "an array of shape (64,); it should be [..., rows, columns]"),
        ({"codes": "uint8"}, "codes is uint8; it should be int8"),
        ({"codes": (4, 32)}, "codes has shape (4, 32); it should be that of its numbers, (4, 64)"),
        ({"seeds": "int32"}, "seeds is int32; it should be uint32"),
        ({"seeds": ()}, "seeds has shape (); blocks of 64 take (4, 1)"),
        ({"scale": (4, 2)}, "scale has shape (4, 2); blocks of 64 take (4, 1)"),
        ({"scale": "bfloat16"}, "scale is bfloat16; it should be float32"),
    ],
    "rms_norm": [
        ({"x": ()}, "x has shape (); it should be [..., size], of no dimension empty"),
        ({"x": (0, 8)}, "x has shape (0, 8); it should be [..., size], of no dimension empty"),
        ({"x": "int32"}, "x is int32; it should be one of"),
        ({"scale": (9,)}, "scale has shape (9,); it should be (8,)"),
        ({"scale": "int32"}, "scale is int32; it should be one of"),
        ({"residual": (5, 8)}, "residual should be float32 of shape (4, 8), as x is"),
        ({"residual": "bfloat16"}, "residual should be float32 of shape (4, 8), as x is"),
        ({"epsilon": -1.0}, "epsilon is -1.0; it should not be negative"),
    ],
    "cross_entropy": [
        ({"x": (8,)}, "x has shape (8,); it should be [..., embed], of no dimension empty"),
        ({"x": (0, 8)}, "x has shape (0, 8); it should be [..., embed], of no dimension empty"),
        ({"x": "int32"}, "x is int32; it should be one of"),
        ({"weight": "bfloat16"}, "weight is bfloat16 and x float32; they should be the same"),
        ({"weight": (9, 20)}, "weight has shape (9, 20); it should be [8, vocab]"),
        ({"weight": (8, 0)}, "weight has shape (8, 0); it should be [8, vocab]"),
        ({"labels": (3,)}, "labels has shape (3,); it should be (4,)"),
        ({"labels": "float32"}, "labels is float32; it should be of integers"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0; it should be in [0, 1)"),
        ({"z_loss": -1.0}, "z_loss is -1.0; it should not be negative"),
    ],
    "sliding_max": [
        ({"x": (2, 3)}, "x is float32 of shape (2, 3); it should be float32 of one dimension"),
        ({"x": "int32"}, "x is int32 of shape (9,)"),
        ({"window": 0}, "window is 0; it should be from 1 to the 9 numbers of x"),
        ({"window": 10}, "window is 10; it should be from 1 to the 9 numbers of x"),
    ],
}
CASES = [(operation, *case) for operation, cases in REFUSED.items() for case in cases]


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


@pytest.mark.parametrize(("operation", "changes", "message"), CASES)
def test_mistakes_are_named(operation, changes, message):
    for implementation in (*CALLS[operation][0], None):
        with pytest.raises(ValueError, match=re.escape(f"{operation}: {message}")):
            call(operation, implementation, changes)


@pytest.mark.parametrize("operation", CALLS)
def test_what_is_right_is_taken_and_an_unknown_implementation_is_not(operation):
    implementations = CALLS[operation][0]
    for implementation in implementations:
        call(operation, implementation, {})
    known = ", ".join(sorted(implementations))
    with pytest.raises(ValueError, match=f"{operation}: implementation is 'refrence'; it should be one of {known}"):
        call(operation, "refrence", {})
