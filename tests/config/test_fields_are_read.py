"""Each field of the config is read by something: a setting that nothing reads is a lie.

By the syntax tree of the sources outside `jaxmem/config`. A field counts as read where an attribute of that
name is taken from an expression that is known to hold its section: `cfg.mesh.fsdp` with `cfg: Config`,
`rope.theta` with `rope: Rope`, `m.layers` after `m = cfg.model`, `source.path` in `for source in data.mixture`.
"""

import ast
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxmem.config
from jaxmem.config.base import Section
from jaxmem.config.mesh import Rules
from jaxmem.config.networks import FAMILIES
from jaxmem.config.sections import Config

ROOT = Path(__file__).parents[2]
FILES = [
    path
    for folder in (ROOT / "jaxmem", ROOT / "kernels")
    for path in sorted(folder.rglob("*.py"))
    if ROOT / "jaxmem" / "config" not in path.parents
]

# Read inside jaxmem/config: what the others read in their place stands beside each.
READ_HERE = {
    "preset": "the fields that it stands for",
    "steps": "Config.steps",
    "tokens": "Config.steps",
    "rounding": "Precision.stochastic_rounding",
    "base": "Config.base_precision",
    "Adapter.experts": "Config.expert_precision",
    "Adapter.embeddings": "Config.embedding_precision",
    **dict.fromkeys(("Quantization.format", "Quantization.block_size"), "Config.base_precision"),
    "Decoder.layer_types": "Decoder.windows",
    "Decoder.quantization": "Config.base_quantization",
    "Pipeline.schedule": "Pipeline.name",
    "Decoder.sliding_rope": "Decoder.ropes",
    **dict.fromkeys(("Experts.every", "Experts.dense_layers"), "Experts.in_layers"),
    **dict.fromkeys(("trainable", "Adapter.layers"), "Config.trainable_patterns"),
    # Read by low_rank_layers, which returns the rank and scale of each layer.
    **dict.fromkeys([f"Adapter.{name}" for name in ("alpha", "alpha_pattern", "targets", "rslora")], "config.adapter"),
    # Given to the optimizer by name; tests/optim builds each with all of its own.
    **{f"Rules.{dim}": "Rules.table" for dim in Rules.model_fields},
    **dict.fromkeys(
        (
            *("beta1", "beta2", "epsilon", "momentum", "rank", "refresh_every", "scale", "similarity", "residual"),
            *("project_embeddings", "weight_decay"),
        ),
        "Optimizer.hyperparameters",
    ),
}

Kinds = frozenset[type[Section]]
NOTHING: Kinds = frozenset()
FROM_SAME = {"model_copy"}  # methods that return the section they are called on
MODULES = {"config", "networks"}  # as sections are named: `networks.Decoder`
PASS_ON = {"enumerate", "for_devices", "list", "reversed", "sorted", "tuple", "zip"}


def sections_in(annotation: object) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in typing.get_args(annotation):
        yield from sections_in(part)


def all_sections() -> Kinds:
    found, new = set(), [Config]
    while new:
        section = new.pop()
        found.add(section)
        new += [s for field in section.model_fields.values() for s in sections_in(field.annotation) if s not in found]
    return frozenset(found)


BY_NAME: dict[str, Kinds] = {section.__name__: frozenset([section]) for section in all_sections()}
BY_NAME["Model"] = frozenset(FAMILIES.values())


class File:
    """What one file reads. `holds` says which sections a name, or an attribute of self, may be."""

    def __init__(self, tree: ast.Module):
        self.tree = tree
        self.holds: dict[str, Kinds] = {}
        self.names_of: dict[str, list[object]] = {}  # loop variables over field names
        self.names = {
            alias.asname or alias.name: BY_NAME[alias.name]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxmem.config")
            for alias in node.names
            if alias.name in BY_NAME
        }
        before = None
        while before != self.holds:  # aliases of aliases
            before = dict(self.holds)
            for node in ast.walk(tree):
                self.bind(node)

    def annotated(self, annotation: ast.expr | None) -> Kinds:
        found = NOTHING
        for node in ast.walk(annotation) if annotation else ():
            if isinstance(node, ast.Name):
                found |= self.names.get(node.id, NOTHING)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in MODULES:
                found |= BY_NAME.get(node.attr, NOTHING)
        return found

    def bind(self, node: ast.AST) -> None:
        match node:
            case ast.arg(arg=name, annotation=annotation):
                self.add(ast.Name(name), self.annotated(annotation))
            case ast.AnnAssign(target=target, annotation=annotation):
                self.add(target, self.annotated(annotation))
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self.unpack(target, value)
            case ast.NamedExpr(target=target, value=value):
                self.unpack(target, value)
            case ast.For(target=target, iter=value) | ast.comprehension(target=target, iter=value):
                self.unpack(target, value)
                if isinstance(target, ast.Name) and isinstance(value, ast.Tuple | ast.List):
                    self.names_of[target.id] = [one.value for one in value.elts if isinstance(one, ast.Constant)]

    def unpack(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple):
            values = value.elts if isinstance(value, ast.Tuple) else [value] * len(target.elts)
            for inner, part in zip(target.elts, values, strict=False):
                self.unpack(inner, part)
        else:
            self.add(target, self.kinds(value))

    def add(self, target: ast.expr, kinds: Kinds) -> None:
        match target:
            case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name):
                if kinds:
                    self.holds[name] = self.holds.get(name, NOTHING) | kinds

    def kinds(self, node: ast.expr) -> Kinds:
        """The sections that an expression may hold."""
        match node:
            case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name):
                return self.holds.get(name, NOTHING)
            case ast.Attribute(attr="cfg"):  # of a program or a spec
                return BY_NAME["Config"]
            case ast.Attribute(value=value, attr=name):
                fields = [section.model_fields.get(name) for section in self.kinds(value)]
                return frozenset(kind for field in fields if field for kind in sections_in(field.annotation))
            case ast.Call(func=ast.Name(id=name), args=args):
                if name == "load_config":
                    return BY_NAME["Config"]
                return self.any(args) if name in PASS_ON else NOTHING
            case ast.Call(func=ast.Attribute(value=value, attr=name)):
                return self.kinds(value) if name in FROM_SAME else NOTHING
            case ast.Subscript(value=value) | ast.Starred(value=value):
                return self.kinds(value)
            case ast.BoolOp(values=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts):
                return self.any(parts)
            case ast.IfExp(body=body, orelse=orelse):
                return self.any([body, orelse])
        return NOTHING

    def any(self, nodes: list[ast.expr]) -> Kinds:
        return frozenset(kind for node in nodes for kind in self.kinds(node))

    def reads(self) -> Iterator[tuple[type[Section], str]]:
        for node in ast.walk(self.tree):
            match node:
                case ast.Attribute(value=value, attr=name, ctx=ast.Load()):
                    yield from ((kind, name) for kind in self.kinds(value))
                case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name)), *_]):
                    yield from ((kind, name) for kind in self.kinds(value))
                case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Name(id=each), *_]) if (
                    each in self.names_of
                ):
                    yield from ((kind, str(name)) for kind in self.kinds(value) for name in self.names_of[each])
                case ast.Call(func=ast.Name(id="getattr"), args=[value, *_]):
                    # the axes of the mesh are alike, and read by one loop over their names
                    mesh = self.kinds(value) & BY_NAME["Mesh"]
                    yield from ((kind, name) for kind in mesh for name in kind.model_fields)


def declared_by(section: type[Section], name: str) -> type[Section]:
    """The class that a field stands in: what is read of a Data's path is read of a Source's."""
    return next(kind for kind in reversed(section.__mro__) if name in inspect.get_annotations(kind))


def unread(sources: list[str]) -> list[str]:
    read = {found for source in sources for found in File(ast.parse(source)).reads()}
    fields = {(declared_by(section, name), name) for section in all_sections() for name in section.model_fields}
    fields -= {(declared_by(section, name), name) for section, name in read if name in section.model_fields}
    named = {f"{section.__name__}.{name}" for section, name in fields if name not in READ_HERE}
    missing = sorted(named - set(READ_HERE))
    return missing if (Config, "steps") in read else [*missing, "Config.steps"]


def test_every_field_is_read():
    missing = unread([path.read_text(encoding="utf-8") for path in FILES])
    assert not missing, f"nothing reads {', '.join(missing)}"


@pytest.mark.parametrize("name", sorted({name for name in READ_HERE.values() if name[0].isupper()}))
def test_what_is_read_in_place_of_a_field_exists(name):
    section, _, attribute = name.partition(".")
    assert all(hasattr(kind, attribute) or attribute in kind.model_fields for kind in BY_NAME[section])


def test_every_section_can_be_named():
    assert set(BY_NAME) <= set(jaxmem.config.__all__)


def found(source: str) -> set[str]:
    return {f"{kind.__name__}.{name}" for kind, name in File(ast.parse(source)).reads()}


def test_what_counts_as_reading():
    head = "from jaxmem.config import Config, Decoder, Rope, load_config\nfrom jaxmem import config\n"
    assert found(head + "def f(cfg: Config): return cfg.mesh.fsdp") == {"Config.mesh", "Mesh.fsdp"}
    assert found(head + "def f(r: Rope | None): return r.theta") == {"Rope.theta"}
    assert found(head + "def f(x: config.Decoder):\n  a, b = x.rope, 1\n  return a.factor") == {
        "Decoder.rope",
        "Rope.factor",
    }
    assert found(head + "class A:\n  def f(self, x: Decoder): self.y = x\n  def g(self): return self.y.mlp") == {
        "Decoder.mlp"
    }
    assert found(head + "[s.path for s in load_config('a').data.mixture]") == {
        "Config.data",
        "Data.mixture",
        "Source.path",
    }
    assert "Mesh.stage" in found(head + "def f(cfg: Config, a): return getattr(cfg.mesh, a)")


def test_what_does_not():
    head = "from jaxmem.config import Config, Decoder\n"
    assert found(head + "def f(model): return model.layers") == set()
    assert found(head + "def f(model: Decoder): model.layers = 3") == set()
    assert found(head + "def f(cfg: Config, a): return getattr(cfg.memory, a)") == {"Config.memory"}
    assert found("class Decoder: pass\ndef f(model: Decoder): return model.layers") == set()
    assert {"Mesh.fsdp", "Config.steps", "Source.path"} <= set(unread([]))
