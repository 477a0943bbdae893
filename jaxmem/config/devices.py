"""Fills in the mesh of a config for a number of devices, and checks that sizes are divisible by the mesh.

Each error ends with the nearest sizes or meshes that are possible, as overrides. All of them have been checked.
"""

import math
from collections.abc import Iterator, Sequence

from jaxmem.config.check import check
from jaxmem.config.combinations import check_combinations
from jaxmem.config.mesh import (
    BATCH_AXES,
    MESH_AXES,
    SEQUENCE_AXES,
    Mesh,
    Rules,
    divisors,
    head_group_counts,
    replicated_dims,
    unsupported_by_ring,
)
from jaxmem.config.networks import Convnet, Decoder, Family, UserModel, Vit, pipelined_layers
from jaxmem.config.sections import Config
from jaxmem.errors import UserError, as_yaml, nearest_numbers, unsupported

ON_REQUEST = ("expert", "context", "stage")  # axes that errors name only if the config uses them


def for_devices(cfg: Config, n: int) -> Config:
    """The config with its mesh filled in for n devices, or an error that names possible meshes."""
    check(cfg)
    resolved, problems = resolve(_elastic(cfg, n) if cfg.cluster.elastic else cfg, n)
    if problems:
        raise UserError("\n".join([*problems, _advice(cfg, n)]))
    return resolved


def resolve(cfg: Config, n: int) -> tuple[Config, list[str]]:
    """The config with its mesh filled in for n devices, and a line for each size that is not divisible by it."""
    sizes = cfg.mesh.sizes
    fixed = math.prod(size for size in sizes.values() if size != -1)
    shown = cfg.mesh.shown(axis for axis, size in sizes.items() if size != 1 or axis not in ON_REQUEST)
    if (axis := _unset_axis(cfg)) is not None:
        if n % fixed:
            return cfg, [f"mesh.{axis}=-1 requires a multiple of {fixed} devices; found {n} ({shown})"]
        sizes[axis] = n // fixed
    elif fixed != n:
        return cfg, [f"{shown} needs {fixed} devices; found {n}"]
    resolved = cfg.replace(mesh=sizes)
    return resolved, list(_indivisible(resolved))


def _unset_axis(cfg: Config) -> str | None:
    return next((axis for axis, size in cfg.mesh.sizes.items() if size == -1), None)


def batch_step(cfg: Config) -> int:
    """The number of which `batch.global_size` must be a multiple, for a config whose mesh is resolved."""
    pair = 2 if cfg.objective.name == "dpo" else 1  # a pair of rows stays on one device
    return cfg.batch.accumulate * pair * cfg.mesh.row_shards


def _elastic(cfg: Config, n: int) -> Config:
    """The config on n devices instead of the number that its mesh has: `replica` or `fsdp` changes, and no device has
    more rows per micro-batch than before. The config itself if no such mesh is possible."""
    if (axis := _unset_axis(cfg)) is not None:
        raise UserError(f"cluster.elastic=true does not support mesh.{axis}=-1; set its size with all devices")
    if cfg.mesh.count(MESH_AXES) == n:
        return cfg
    size = cfg.batch.global_size
    most = size // (cfg.batch.accumulate * cfg.mesh.row_shards)
    meshes = [{"replica": -1}] if cfg.mesh.replica > 1 else []
    for mesh in (*meshes, {"replica": 1, "fsdp": -1}):
        for accumulate in divisors(size):
            candidate, problems = resolve(cfg.replace(mesh=mesh, batch={"accumulate": accumulate}), n)
            problems += check_combinations(candidate)
            if not problems and size <= most * accumulate * candidate.mesh.row_shards:
                return candidate
    return cfg


def _indivisible(cfg: Config) -> Iterator[str]:
    """A line for each size that is not divisible by the mesh, with the nearest sizes that are."""
    mesh = cfg.mesh
    batch = cfg.batch
    yield from _stages(cfg)
    rows = batch.global_size // batch.accumulate
    step = batch_step(cfg)
    if rows % (step // batch.accumulate):
        over = mesh.shown(axis for axis in BATCH_AXES if axis != "expert" or mesh.expert > 1)
        over += " x 2 rows per pair" if cfg.objective.name == "dpo" else ""
        near = nearest_numbers(batch.global_size, range(step, batch.global_size + step + 1, step))
        given = f"batch.global_size={batch.global_size} with batch.accumulate={batch.accumulate}"
        yield f"{given} has {rows} rows per micro-batch, not a multiple of {over}; use batch.global_size={near}"
    for axis, counts in _divisible_dims(cfg.model, cfg.rules, cfg.zero).items():
        # Arrays that are sharded over `fsdp` are sharded over `expert` and `context` too.
        along = [name for name in ("expert", "context", *cfg.rules.optimizer) if mesh.sizes[name] > 1]
        along = along if axis == "fsdp" else []
        size = mesh.sizes[axis]
        others = mesh.count(along)
        wrong = [f"model.{name}={dim}" for name, dim in counts.items() if dim % (size * others)]
        if wrong:
            sizes = [d // others for d in divisors(math.gcd(*counts.values())) if d % others == 0]
            uses = [f"mesh.{axis}={nearest_numbers(size, sizes)}"] if sizes else [f"another mesh.{along[0]}"]
            uses += ["zero=0"] if axis == "fsdp" else []
            uses += ["rules.optimizer=[]"] if "replica" in along else []
            verb = "is" if len(wrong) == 1 else "are"
            shown = mesh.shown((axis, *along))
            yield f"{', '.join(wrong)} {verb} not divisible by {shown}; use {', or '.join(uses)}"
    yield from _experts(cfg)
    yield from _changed_rules(cfg)
    yield from _head_groups(cfg)
    yield from _sequence(cfg)


def _sequence(cfg: Config) -> Iterator[str]:
    """An error if the tokens of a row are not divisible over `context` and `tensor`."""
    mesh = cfg.mesh
    model = cfg.model
    axes = [axis for axis in SEQUENCE_AXES if mesh.sizes[axis] > 1]
    over = mesh.shown(axes)
    parts = time_parts(mesh)
    prompt_length = cfg.prompt_length
    length = cfg.data.sequence_length
    if isinstance(model, Decoder) and (length + prompt_length) % parts:
        near = nearest_numbers(length, range(parts - prompt_length % parts, length + parts + 1, parts))
        prompt = f" plus adapter.virtual_tokens={prompt_length}" if prompt_length else ""
        given = f"data.sequence_length={length}{prompt} is not divisible by {parts}, as {over} requires"
        yield f"{given}; use data.sequence_length={near}"
    devices = mesh.context * mesh.tensor
    if isinstance(model, Vit) and model.patches % devices:
        size = mesh.sizes[axes[-1]]
        sizes = [n for n in divisors(model.patches) if model.patches % (devices // size * n) == 0]
        given = f"the {model.patches} patches of model.image_size={model.image_size} and model.patch={model.patch}"
        near = nearest_numbers(size, sizes or [1])
        yield f"{given} are not divisible by {devices}, as {over} requires; use mesh.{axes[-1]}={near}"


def _experts(cfg: Config) -> Iterator[str]:
    size = cfg.mesh.expert
    experts = cfg.model.experts if isinstance(cfg.model, Decoder) else None
    if size > 1 and experts is None:
        yield f"mesh.expert={size} requires a mixture of experts (model.experts); use mesh.expert=1"
    elif experts is not None and experts.count % size:
        near = nearest_numbers(size, divisors(experts.count))
        yield f"model.experts.count={experts.count} is not divisible by mesh.expert={size}; use mesh.expert={near}"


def _head_groups(cfg: Config) -> Iterator[str]:
    """Errors if the heads are not divisible over `context` (Ulysses) or into `memory.head_groups`."""
    if not isinstance(cfg.model, Decoder | Vit):
        return
    mesh = cfg.mesh
    groups = cfg.memory.head_groups
    heads = cfg.model.heads
    kv_heads = cfg.model.dims()["kv_heads"]["kv_heads"]
    tensor = mesh.tensor if "tensor" in cfg.rules.heads else 1
    over = [f"mesh.tensor={tensor}"] if tensor > 1 else []
    not_ring = unsupported_by_ring(cfg.model, mesh) if isinstance(cfg.model, Decoder) else None
    context = mesh.context if mesh.context_method == "ulysses" or not_ring else 1
    over += [f"mesh.context={context}"] if context > 1 else []
    if heads % (tensor * context) and context > 1:
        near = nearest_numbers(context, (n for n in divisors(heads) if heads % (n * tensor) == 0))
        needed = f"model.heads={heads} is not divisible by {' x '.join(over)}, as mesh.context_method=ulysses requires"
        ring = f" (ring does not support {not_ring})" if not_ring else ""
        yield f"{needed}{ring}; use mesh.context={near}{'' if not_ring else ', or mesh.context_method=ring'}"
    elif groups != "auto" and groups > 1:
        known = [] if kv_heads % tensor else head_group_counts(heads // tensor, kv_heads // tensor, context)
        if groups not in known:
            near = nearest_numbers(groups, known or [1])
            of = " x ".join([f"memory.head_groups={groups}", *over])
            given = f"{heads} heads with {kv_heads} KV heads cannot be split into equal groups by {of}"
            yield f"{given}; use memory.head_groups={near}"


def _changed_rules(cfg: Config) -> Iterator[str]:
    """A line for each dimension that the config's changes of `rules` would shard unevenly."""
    if cfg.zero == 0:
        return
    model = cfg.model
    dims = cfg.model.dims()
    exempt = replicated_dims(cfg.model, cfg.rules, cfg.mesh)
    width = 1  # of a head
    if isinstance(model, Decoder | Vit):
        width = model.head_dim if isinstance(model, Decoder) else model.embed // model.heads
    for dim, over in cfg.rules.table.items():
        if dim not in dims or over == getattr(Rules(), dim):
            continue
        over = tuple(axis for axis in over if axis != "tensor" or dim not in exempt)
        for key, count in dims[dim].items():
            size = count * (width if dim in ("heads", "kv_heads") else 1)
            fewer = over
            while size % cfg.mesh.count(fewer):
                fewer = fewer[:-1]
            if fewer != over:
                shown = cfg.mesh.shown(over)
                of = f"{key}={count}" if size == count else f"{key}={count} x {width}"
                use = f"rules.{dim}={as_yaml(fewer)}"
                yield f"model.{of} is not divisible by {shown}, as rules.{dim}={as_yaml(over)} requires; use {use}"


def time_parts(mesh: Mesh) -> int:
    """The equal parts of a sequence: one per device; with `context` two, for equal work under a causal mask."""
    return math.lcm(2 * mesh.context if mesh.context > 1 else 1, mesh.context * mesh.tensor)


def _stages(cfg: Config) -> Iterator[str]:
    """Errors if a stage has no layers, or micro-batches do not fill the pipeline."""
    stage = cfg.mesh.stage
    model = cfg.model
    micro = cfg.batch.accumulate
    if stage == 1:
        return
    if isinstance(model, Convnet | UserModel):
        yield unsupported(f"mesh.stage={stage}", f"model.family={model.family}", "mesh.stage=1")
        return
    rounds = cfg.pipeline.rounds
    layers = pipelined_layers(model)
    if stage * rounds > layers:
        factor = f" x pipeline.rounds={rounds}" if rounds > 1 else ""
        most = f"mesh.stage={layers // rounds}" if rounds <= layers else "fewer pipeline.rounds"
        of = f"model.layers={layers}"
        if layers < model.layers:
            of = f"the {layers} layers, or groups of layers of several kinds, that stages can share"
        yield f"mesh.stage={stage}{factor} exceeds {of}; use {most}"
    size = cfg.batch.global_size
    rows = cfg.mesh.row_shards
    counts = [count for count in divisors(size) if size // count % rows == 0]
    if rounds > 1 and micro % stage:
        why = f"must be a multiple of mesh.stage={stage} for pipeline.rounds={rounds}"
        fill = [count for count in counts if count % stage == 0]
        near = nearest_numbers(micro, fill) if fill else f"{stage} with batch.global_size={stage * rows}"
        yield f"batch.accumulate={micro} {why}; use batch.accumulate={near}"


def _advice(cfg: Config, n: int) -> str:
    """The nearest possible meshes of n devices, as overrides."""
    given = cfg.mesh.sizes
    possible: list[tuple[int, int, float, int, str]] = []
    for axes in meshes(n, [axis for axis in MESH_AXES if axis not in ON_REQUEST or given[axis] != 1]):
        candidate = cfg.replace(mesh=axes)
        if next(_indivisible(candidate), None) is None:
            changed = [f"mesh.{axis}={size}" for axis, size in axes.items() if size != given[axis]]
            distance = sum(abs(math.log2(axes[axis] / size)) for axis, size in given.items() if size > 0)
            replicated = len(replicated_dims(candidate.model, candidate.rules, candidate.mesh))  # need more memory
            possible.append((replicated, len(changed), round(distance, 3), axes["replica"], " ".join(changed)))
    if possible:
        return f"for {n} device{'s' * (n > 1)}, use " + ", or ".join(text for *_, text in sorted(possible)[:3])
    plain = "\n".join(_indivisible(cfg.replace(mesh=dict.fromkeys(MESH_AXES, 1) | {"replica": n})))
    return f"no mesh of {n} devices supports this config; with mesh.replica={n} and all other axes 1: {plain}"


def meshes(n: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """All meshes of n devices over these axes; the others are 1."""
    if len(axes) == 1:
        yield {**dict.fromkeys(MESH_AXES, 1), axes[0]: n}
    else:
        for size in divisors(n):
            for sizes in meshes(n // size, axes[1:]):
                yield {**sizes, axes[0]: size}


def _divisible_dims(model: Family, rules: Rules, zero: int) -> dict[str, dict[str, int]]:
    """For each mesh axis that shards weights by the default rules, the dimensions that must be divisible by it."""
    dims = model.dims()
    wide = [name for name in ("heads", "mlp") if name in dims and "tensor" in getattr(rules, name)]
    return {
        "fsdp": dims.get("embed", {}) if zero > 0 and rules.embed == Rules().embed else {},
        "tensor": {key: size for name in wide for key, size in dims[name].items()},
    }
