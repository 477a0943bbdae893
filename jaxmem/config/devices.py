"""A config for a number of devices: its mesh is filled in; sizes that the mesh does not divide are errors.

Each error ends with the nearest sizes or meshes that work, as overrides. All of them have been checked.
"""

import math
from collections.abc import Iterable, Iterator

from jaxmem.config.check import check
from jaxmem.config.mesh import BATCH_AXES, MESH_AXES, Mesh, Rules, divided, undivided
from jaxmem.config.networks import Convnet, Decoder, Vit
from jaxmem.config.sections import Config
from jaxmem.errors import UserError, as_yaml, unsupported

ON_REQUEST = ("context", "stage")  # axes that errors name only if the config uses them

TIME = ("context", "tensor")  # axes over which the sequence of the residual stream is sharded


def for_devices(cfg: Config, n: int) -> Config:
    """The config with its mesh filled in for n devices, or an error that names meshes that work."""
    check(cfg)
    resolved, problems = resolve(cfg, n)
    if problems:
        raise UserError("\n".join([*problems, _advice(cfg, n)]))
    return resolved


def resolve(cfg: Config, n: int) -> tuple[Config, list[str]]:
    """The config with its mesh filled in for n devices, and a line for each size that does not divide over it."""
    resolved, problems = _resolve(cfg, n)
    return resolved, problems or list(_indivisible(resolved))


def _resolve(cfg: Config, n: int) -> tuple[Config, list[str]]:
    axes = {axis: getattr(cfg.mesh, axis) for axis in MESH_AXES}
    fixed = math.prod(size for size in axes.values() if size != -1)
    shown = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size != 1 or axis not in ON_REQUEST)
    if -1 in axes.values():
        axis = next(axis for axis, size in axes.items() if size == -1)
        if n % fixed:
            return cfg, [f"mesh.{axis}=-1 requires a multiple of {fixed} devices, not {n} ({shown})"]
        axes[axis] = n // fixed
    elif fixed != n:
        return cfg, [f"mesh {shown} = {fixed} does not match {n} devices"]
    return _with_mesh(cfg, axes), []


def _with_mesh(cfg: Config, axes: dict[str, int]) -> Config:
    return cfg.model_copy(update={"mesh": Mesh(**axes)})


def _indivisible(cfg: Config) -> Iterator[str]:
    """One line for each size that the mesh does not divide, with the nearest sizes that it divides."""
    mesh, batch = cfg.mesh, cfg.batch
    yield from _stages(cfg)
    rows = batch.global_size // batch.accumulate
    each = 2 if cfg.objective.name == "dpo" else 1  # a pair of rows stays on one device
    if rows % (each * mesh.row_shards):
        over = " x ".join(f"{axis} {getattr(mesh, axis)}" for axis in BATCH_AXES)
        over += ", each with pairs of rows" if each > 1 else ""
        step = batch.accumulate * each * mesh.row_shards
        near = _near(batch.global_size, range(step, batch.global_size + step + 1, step))
        yield (
            f"batch.global_size={batch.global_size} with batch.accumulate={batch.accumulate} has {rows} rows, "
            f"which do not divide over {over}; nearest: {near}"
        )
    for axis, counts in divided(cfg.model, cfg.rules, cfg.zero).items():
        # Arrays that are sharded over `fsdp` are sharded over `context` too.
        own, beside = getattr(mesh, axis), mesh.context if axis == "fsdp" else 1
        whole = [f"model.{name}={dim}" for name, dim in counts.items() if dim % (own * beside)]
        if whole:
            shown = f"mesh.{axis}={own}" + (f" x mesh.context={beside}" if beside > 1 else "")
            near = _near(own, (d // beside for d in _divisors(math.gcd(*counts.values())) if d % beside == 0))
            other = ", or zero=0" if axis == "fsdp" else ""
            yield f"{shown} does not divide {', '.join(whole)}; nearest: {near or 'none'}{other}"
    yield from _own_rules(cfg)
    yield from _head_groups(cfg)
    parts, more = time_parts(mesh), cfg.prompt_length
    for length in cfg.data.lengths if isinstance(cfg.model, Decoder) else ():
        if (length + more) % parts:
            over = " and ".join(f"mesh.{axis}={getattr(mesh, axis)}" for axis in TIME if getattr(mesh, axis) > 1)
            near = _near(length, range(parts - more % parts, length + parts + 1, parts))
            key = "sequence_length" if length == cfg.data.sequence_length else "buckets"
            prompt = f" after adapter.virtual_tokens={more}" if more else ""
            yield f"data.{key}={length}{prompt} does not divide into {parts} equal parts for {over}; nearest: {near}"


def _head_groups(cfg: Config) -> Iterator[str]:
    groups = cfg.memory.head_groups
    if groups == "auto" or groups == 1 or not isinstance(cfg.model, Decoder | Vit):
        return
    heads = cfg.model.dims()["kv_heads"]["kv_heads"]
    tensor = cfg.mesh.tensor if "tensor" in cfg.rules.heads else 1
    if heads % (groups * tensor):
        near = _near(groups, (n for n in _divisors(heads) if heads % (n * tensor) == 0))
        over = f"{heads} KV heads over mesh.tensor={tensor}"
        yield f"memory.head_groups={groups} does not divide {over}; nearest: {near or 1}"


def _own_rules(cfg: Config) -> Iterator[str]:
    """One line for each dimension that changed rules shard unevenly."""
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
                shown = " x ".join(f"mesh.{axis}={getattr(cfg.mesh, axis)}" for axis in over)
                of = f"{key}={count}" if size == count else f"{key}={count} x {width}"
                near = as_yaml(fewer)
                yield f"rules.{dim}={as_yaml(over)} with {shown} does not divide model.{of}; nearest: {near}"


def time_parts(mesh: Mesh) -> int:
    """Equal parts of a row: one per device, and two per device along `context`, for equal work under a causal mask."""
    return math.lcm(2 * mesh.context if mesh.context > 1 else 1, mesh.context * mesh.tensor)


def _stages(cfg: Config) -> Iterator[str]:
    """Errors if a stage has no layers, or micro-batches do not fill the pipeline."""
    stage, model, micro = cfg.mesh.stage, cfg.model, cfg.batch.accumulate
    if stage == 1:
        return
    if isinstance(model, Convnet):
        yield unsupported(f"mesh.stage={stage}", "model.family=convnet", "1")
        return
    rounds = cfg.pipeline.rounds
    if stage * rounds > model.layers:
        each = f" x pipeline.rounds={rounds}" if rounds > 1 else ""
        most = model.layers // rounds
        fewer = f"; nearest: {most}" if most else ""
        yield f"mesh.stage={stage}{each} exceeds model.layers={model.layers}{fewer}"
    size, rows = cfg.batch.global_size, cfg.mesh.row_shards
    counts = [count for count in _divisors(size) if size // count % rows == 0]
    if rounds > 1 and micro % stage:
        why, fill = "is not a multiple of", [count for count in counts if count % stage == 0]
        wanted = f", which pipeline.rounds={rounds} requires"
    elif 1 < micro < stage:
        why, fill = "does not fill", [count for count in counts if count == 1 or count >= stage]
        wanted = ""
    else:
        return
    near = _near(micro, fill) or f"batch.accumulate={stage} with batch.global_size={stage * rows}"
    yield f"batch.accumulate={micro} {why} mesh.stage={stage}{wanted}; nearest: {near}"


def _advice(cfg: Config, n: int) -> str:
    """The nearest meshes of n devices that this config supports, as overrides."""
    given = {axis: getattr(cfg.mesh, axis) for axis in MESH_AXES}
    works: list[tuple[int, int, float, int, str]] = []
    for axes in _meshes(n, [axis for axis in MESH_AXES if axis not in ON_REQUEST or given[axis] != 1]):
        one = _with_mesh(cfg, axes)
        if next(_indivisible(one), None) is None:
            changed = [f"mesh.{axis}={size}" for axis, size in axes.items() if size != given[axis]]
            distance = sum(abs(math.log2(axes[axis] / size)) for axis, size in given.items() if size > 0)
            replicated = len(undivided(one.model, one.rules, one.mesh))  # allowed, but needs more memory
            works.append((replicated, len(changed), round(distance, 3), axes["replica"], " ".join(changed)))
    if works:
        return f"meshes that work on {n}: " + ", or ".join(text for *_, text in sorted(works)[:3])
    plain = "\n".join(_indivisible(_with_mesh(cfg, {"replica": n})))
    return f"no mesh works on {n}; for mesh.replica={n} mesh.fsdp=1 mesh.tensor=1: {plain}"


def _meshes(n: int, axes: list[str]) -> Iterator[dict[str, int]]:
    """All meshes of n devices over these axes; the others are 1."""
    if len(axes) == 1:
        yield {**dict.fromkeys(MESH_AXES, 1), axes[0]: n}
    else:
        for size in _divisors(n):
            for rest in _meshes(n // size, axes[1:]):
                yield {**rest, axes[0]: size}


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _near(value: int, candidates: Iterable[int]) -> str:
    """The nearest candidate below and the nearest above a value."""
    known = sorted(candidates)
    below, above = [size for size in known if size < value], [size for size in known if size > value]
    return " or ".join(str(size) for size in [*below[-1:], *above[:1]])
