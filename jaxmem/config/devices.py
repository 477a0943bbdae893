"""A config against a number of devices: the mesh filled in, and everything divided over it.

Every refusal says what would work, as overrides: found by trying all meshes of so many devices, so
nothing is advised that is then refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from jaxmem.config.check import check
from jaxmem.config.mesh import BATCH_AXES, MESH_AXES, Mesh, Rules, divided, undivided
from jaxmem.config.networks import Convnet, Decoder, Vit
from jaxmem.config.sections import Config
from jaxmem.errors import UserError

ASKED_FOR = ("context", "stage")  # said and advised only to who asked for it

TIME = ("context", "tensor")  # what the time of the residual stream is split over


def for_devices(cfg: Config, n: int) -> Config:
    check(cfg)
    resolved, problems = resolve(cfg, n)
    if problems:
        raise UserError("\n".join([*problems, _advice(cfg, n)]))
    return resolved


def resolve(cfg: Config, n: int) -> tuple[Config, list[str]]:
    """With its mesh filled in for n devices, and a line for each thing that does not divide over it."""
    resolved, problems = _resolve(cfg, n)
    return resolved, problems or list(_indivisible(resolved))


def _resolve(cfg: Config, n: int) -> tuple[Config, list[str]]:
    axes = {axis: getattr(cfg.mesh, axis) for axis in MESH_AXES}
    fixed = math.prod(size for size in axes.values() if size != -1)
    shown = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size != 1 or axis not in ASKED_FOR)
    if -1 in axes.values():
        axis = next(axis for axis, size in axes.items() if size == -1)
        if n % fixed:
            return cfg, [f"mesh.{axis}: -1 is the rest of the devices, but {n} do not divide by {fixed} ({shown})"]
        axes[axis] = n // fixed
    elif fixed != n:
        return cfg, [f"mesh: {shown} = {fixed}, which is not the number of devices, {n}"]
    return _with_mesh(cfg, axes), []


def _with_mesh(cfg: Config, axes: dict[str, int]) -> Config:
    return cfg.model_copy(update={"mesh": Mesh(**axes)})


def _indivisible(cfg: Config) -> Iterator[str]:
    """One line for each size that the mesh does not divide, with the nearest sizes that it would."""
    mesh, batch = cfg.mesh, cfg.batch
    yield from _stages(cfg)
    rows = batch.global_size // batch.accumulate
    each = 2 if cfg.objective.name == "dpo" else 1  # rows that belong together
    if rows % (each * mesh.row_shards):
        over = " x ".join(f"{axis} {getattr(mesh, axis)}" for axis in BATCH_AXES)
        over += ", each with pairs of rows" if each > 1 else ""
        step = batch.accumulate * each * mesh.row_shards
        near = _near(batch.global_size, range(step, batch.global_size + step + 1, step))
        yield (
            f"batch.global_size: {batch.global_size} over accumulate {batch.accumulate} makes {rows} rows, "
            f"which do not divide over {over}; nearest: {near}"
        )
    for axis, counts in divided(cfg.model, cfg.rules, cfg.zero).items():
        # Along `context` lies what lies along `fsdp`.
        own, beside = getattr(mesh, axis), mesh.context if axis == "fsdp" else 1
        whole = [f"model.{name} {dim}" for name, dim in counts.items() if dim % (own * beside)]
        if whole:
            shown = f"{own} x mesh.context {beside}" if beside > 1 else f"{own}"
            near = _near(own, (d // beside for d in _divisors(math.gcd(*counts.values())) if d % beside == 0))
            other = ", or zero=0 to split no weights" if axis == "fsdp" else ""
            yield f"mesh.{axis}: {shown} does not divide {', '.join(whole)}; nearest: {near or 'none'}{other}"
    yield from _own_rules(cfg)
    yield from _head_groups(cfg)
    parts, more = time_parts(mesh), cfg.prompt_length
    for length in cfg.data.lengths if isinstance(cfg.model, Decoder) else ():
        if (length + more) % parts:
            over = " and ".join(f"mesh.{axis} {getattr(mesh, axis)}" for axis in TIME if getattr(mesh, axis) > 1)
            near = _near(length, range(parts - more % parts, length + parts + 1, parts))
            key = "sequence_length" if length == cfg.data.sequence_length else "buckets"
            behind = f" behind a prompt of {more}" if more else ""
            yield f"data.{key}: {length}{behind} does not make {parts} equal parts for {over}; nearest: {near}"


def _head_groups(cfg: Config) -> Iterator[str]:
    groups = cfg.memory.head_groups
    if groups == "auto" or groups == 1 or not isinstance(cfg.model, Decoder | Vit):
        return
    heads = cfg.model.dims()["kv_heads"]["kv_heads"]
    tensor = cfg.mesh.tensor if "tensor" in cfg.rules.heads else 1
    if heads % (groups * tensor):
        near = _near(groups, (n for n in _divisors(heads) if heads % (n * tensor) == 0))
        over = f"{heads} key heads over mesh.tensor {tensor}"
        yield f"memory.head_groups: {groups} does not divide {over}; nearest: {near or 1}"


def _own_rules(cfg: Config) -> Iterator[str]:
    """One line for each dimension that rules of one's own split unevenly."""
    if cfg.zero == 0:
        return
    model, found, whole = cfg.model, cfg.model.dims(), undivided(cfg.model, cfg.rules, cfg.mesh)
    width = (
        model.head_dim if isinstance(model, Decoder) else model.embed // model.heads if isinstance(model, Vit) else 1
    )
    for dim, over in cfg.rules.table.items():
        if dim not in found or over == getattr(Rules(), dim):
            continue
        over = tuple(axis for axis in over if axis != "tensor" or dim not in whole)
        for key, count in found[dim].items():
            size = count * (width if dim in ("heads", "kv_heads") else 1)
            fewer = over
            while size % math.prod(getattr(cfg.mesh, axis) for axis in fewer):
                fewer = fewer[:-1]
            if fewer != over:
                shown = " x ".join(f"mesh.{axis} {getattr(cfg.mesh, axis)}" for axis in over)
                of = f"{key} {count}" if size == count else f"{key} {count} x {width}"
                yield f"rules.{dim}: {shown} does not divide model.{of}; nearest: rules.{dim}=[{', '.join(fewer)}]"


def time_parts(mesh: Mesh) -> int:
    """Into how many parts the time must fall: one a device, and two for each along `context`, for equal work."""
    return math.lcm(2 * mesh.context if mesh.context > 1 else 1, mesh.context * mesh.tensor)


def _stages(cfg: Config) -> Iterator[str]:
    """Layers for every stage, and micro-batches that fill them."""
    stage, model, micro = cfg.mesh.stage, cfg.model, cfg.batch.accumulate
    if stage == 1:
        return
    if isinstance(model, Convnet):
        yield f"mesh.stage: {stage}, but stages need layers that are alike, and a convnet has none; use 1"
        return
    rounds = cfg.pipeline.rounds
    if stage * rounds > model.layers:
        each = f" x pipeline.rounds {rounds}" if rounds > 1 else ""
        most = model.layers // rounds
        fewer = f"; nearest: {most}" if most else ""
        yield f"mesh.stage: {stage}{each} is more than model.layers {model.layers}{fewer}"
    size, rows = cfg.batch.global_size, cfg.mesh.row_shards
    counts = [count for count in _divisors(size) if size // count % rows == 0]
    if rounds > 1 and micro % stage:
        why, fill = "divide over", [count for count in counts if count % stage == 0]
        wanted = f", which pipeline.rounds {rounds} needs"
    elif 1 < micro < stage:
        why, fill = "fill", [count for count in counts if count == 1 or count >= stage]
        wanted = " (1 is allowed: one stage works at a time)"
    else:
        return
    near = _near(micro, fill) or f"batch.accumulate={stage} with batch.global_size={stage * rows}"
    yield f"batch.accumulate: {micro} micro-batches do not {why} mesh.stage {stage}{wanted}; nearest: {near}"


def _advice(cfg: Config, n: int) -> str:
    """The meshes of n devices nearest to the given one that this config trains on, as overrides."""
    given = {axis: getattr(cfg.mesh, axis) for axis in MESH_AXES}
    works: list[tuple[int, int, float, int, str]] = []
    for axes in _meshes(n, [axis for axis in MESH_AXES if axis not in ASKED_FOR or given[axis] != 1]):
        one = _with_mesh(cfg, axes)
        if next(_indivisible(one), None) is None:
            changed = [f"mesh.{axis}={size}" for axis, size in axes.items() if size != given[axis]]
            distance = sum(abs(math.log2(axes[axis] / size)) for axis, size in given.items() if size > 0)
            whole = len(undivided(one.model, one.rules, one.mesh))  # allowed, but a waste
            works.append((whole, len(changed), round(distance, 3), axes["replica"], " ".join(changed)))
    if works:
        return f"meshes that work on {n}: " + ", or ".join(text for *_, text in sorted(works)[:3])
    plain = "\n".join(_indivisible(_with_mesh(cfg, {"replica": n})))
    return f"no mesh works on {n}; for mesh.replica={n} mesh.fsdp=1 mesh.tensor=1: {plain}"


def _meshes(n: int, axes: list[str]) -> Iterator[dict[str, int]]:
    """Every way to make n devices of these axes; the others are 1."""
    if len(axes) == 1:
        yield {**dict.fromkeys(MESH_AXES, 1), axes[0]: n}
    else:
        for size in _divisors(n):
            for rest in _meshes(n // size, axes[1:]):
                yield {**rest, axes[0]: size}


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _near(value: int, candidates: Iterable[int]) -> str:
    """The nearest candidates on either side."""
    known = sorted(candidates)
    below, above = [size for size in known if size < value], [size for size in known if size > value]
    return " or ".join(str(size) for size in [*below[-1:], *above[:1]])
