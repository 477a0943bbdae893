"""Which state is in host memory between updates: optimizer state of layers and of embeddings, and frozen matrices."""

from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir

from jaxmem.errors import UserError
from jaxmem.sharding.host import HOST_MEMORY, to_host
from jaxmem.sharding.table import Axes, axis_name, is_axes, is_stacked
from jaxmem.sharding.weights import is_matrix
from jaxmem.typing import Tree


def offloaded_state(axes: Tree) -> Tree:
    """For each array of the optimizer state, whether `memory.offload: optimizer` moves it."""

    def is_offloaded(axes: Axes) -> bool:
        return is_stacked(axes) or "vocab" in (axis and axis_name(axis) for axis in axes)

    return jax.tree.map(is_offloaded, axes, is_leaf=is_axes)


def offloaded_weights(axes: Tree, trainable: Tree, stored: Tree) -> Tree:
    """For each array of the stored parameters, whether `memory.offload: frozen` moves it: true for frozen matrices.
    `stored` has the axes of these arrays; `trainable` has None for frozen parameters."""

    def is_on_host(axes: Axes, trainable: Axes | None, stored: Tree) -> Tree:
        is_frozen_matrix = trainable is None and is_matrix(axes)
        return jax.tree.map(lambda _: is_frozen_matrix, stored, is_leaf=is_axes)

    return jax.tree.map(is_on_host, axes, trainable, stored, is_leaf=is_axes)


def send(tree: Tree, is_on_host: Tree) -> Tree:
    """Moves the marked arrays to host memory."""
    return jax.tree.map(lambda on_host, x: to_host(x) if on_host else x, is_on_host, tree)


def memory_kinds(device: Any) -> set[str] | None:
    """The memories that a device can address; None for a compile-only device."""
    return {memory.kind for memory in device.addressable_memories()} or None


def place(shapes: Tree, is_on_host: Tree, devices: np.ndarray) -> Tree:
    """Shapes with their shardings; marked ones are in host memory."""
    known = memory_kinds(devices.flat[0])
    if known is None:  # the lowered program is annotated instead
        return shapes
    if HOST_MEMORY not in known:
        raise UserError(
            f"memory.offload: {devices.flat[0].platform} devices have no {HOST_MEMORY} memory, only"
            f" {', '.join(sorted(known))}; use memory.offload=none"
        )

    def on_place(on_host: bool, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not on_host:
            return x
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding.with_memory_kind(HOST_MEMORY))

    return jax.tree.map(on_place, is_on_host, shapes)


def annotate(lowered: jax.stages.Lowered) -> jax.stages.Lowered:
    """Marks host arrays in a program for compile-only devices, whose memories jax does not know: arguments whose first
    use sends them to the host, and results whose last operation sends them there."""
    module: Any = lowered.compiler_ir()
    with module.context:
        main = next(node for node in module.body.operations if node.attributes["sym_name"].value == "main")
        block = main.regions[0].blocks[0]
        arguments = [any(_is_sent(use.owner) for use in node.uses) for node in block.arguments]
        results = [_is_sent(node.owner) for node in block.operations[len(block.operations) - 1].operands]
        for kind, on_host in (("arg_attrs", arguments), ("res_attrs", results)):
            main.attributes[kind] = ir.ArrayAttr.get(
                [_with_kind(node) if host else node for node, host in zip(main.attributes[kind], on_host, strict=True)]
            )
    return lowered


def _is_sent(operation: object) -> bool:
    operation = getattr(operation, "operation", operation)
    if getattr(operation, "name", "") != "stablehlo.custom_call":
        return False
    return "annotate_device_placement" in str(operation) and HOST_MEMORY in str(operation)


def _with_kind(attributes: Any) -> Any:
    existing: Any = ir.DictAttr(attributes)
    known = {attribute.name: attribute.attr for attribute in existing}
    return ir.DictAttr.get({**known, "mhlo.memory_kind": ir.StringAttr.get(HOST_MEMORY)})
