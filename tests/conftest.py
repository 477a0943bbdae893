"""The tests' ground rules, set before jax starts: 8 CPU devices, strict dtypes, shapes checked as annotated."""

from __future__ import annotations

from hypothesis import settings
from jaxtyping import install_import_hook

from jaxmem.devices import simulate

simulate(8)

# Each call of a function in these has its arguments and its result held against their annotations.
install_import_hook(
    ["jaxmem.kernels", "jaxmem.models", "jaxmem.losses", "jaxmem.precision", "jaxmem.stack"], "beartype.beartype"
)

import jax  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")

# The same examples in every run, and no database left in the checkout.
settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")
