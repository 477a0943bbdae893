"""The house holds: what may import what, what stands in one file only, and what importing costs."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# From the ground up; a module imports from its own line and those above it.
LAYERS = (
    ("errors", "lazy", "typing"),
    ("machine",),
    ("config",),
    ("kernels", "quant"),
    ("sharding",),
    ("stack",),
    ("pipeline",),
    ("models",),
    ("adapters", "optim"),
    ("step",),
    ("distributed",),
    ("data", "checkpoint", "hf"),
    ("estimate", "inference"),
    ("planning",),
    ("report",),
    ("training",),
    ("search",),
    ("cli",),
    ("__init__", "__main__"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
SOURCES = {
    path: ".".join((*parents, *path.relative_to(ROOT / folder).with_suffix("").parts))
    for folder, parents in (("jaxmem", ("jaxmem",)), ("kernels", ("jaxmem", "kernels")))
    for path in sorted((ROOT / folder).rglob("*.py"))
}


MODULES = {module.removesuffix(".__init__"): path for path, module in SOURCES.items()}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def imported(path: Path, module: str, within: ast.AST | None = None) -> set[str]:
    """Every module that the file names in an import, anywhere in it, relative ones resolved."""
    names = set()
    for node in ast.walk(within or ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            base += [node.module] if node.module else []
            names |= {".".join((*base, alias.name)) for alias in node.names}
    return names


def room(module: str) -> str:
    """The part of jaxmem that a module belongs to: jaxmem.config.load -> config."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def test_every_module_has_its_place() -> None:
    assert {room(module) for module in SOURCES.values()} <= set(LEVEL)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_an_import_never_points_up(path: Path) -> None:
    module = SOURCES[path]
    level = LEVEL[room(module)]
    within = {
        name for name in imported(path, module) if name.split(".")[0] == "jaxmem" and name != "jaxmem.__version__"
    }
    up = {name for name in within if LEVEL.get(room(name), level) > level}
    assert not up
    if room(module) == "kernels":
        assert all(name.startswith("jaxmem.kernels") for name in within), "kernels import nothing from jaxmem"


# ------------------------------------------------------------------ what reading one module takes


def top_level(nodes: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that importing a module runs: those of functions and of TYPE_CHECKING left out."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from top_level([*node.body, *node.orelse])
        elif isinstance(node, ast.Try | ast.With | ast.ClassDef):
            yield from top_level(node.body)


def lazy_modules(package: str) -> dict[str, str]:
    """The module of each name that a package imports lazily: `lazy_names`, or a literal dict of `module:name`."""
    found = {}
    for node in ast.walk(tree(package)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy_names":
            for keyword in node.keywords:
                names = ast.literal_eval(keyword.value).split()
                found |= dict.fromkeys(names, f"{package}.{keyword.arg}")
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            pairs = [pair for pair in pairs if all(isinstance(one, ast.Constant) for one in pair)]
            found |= {key.value: str(value.value).partition(":")[0] for key, value in pairs}
    absolute = {name: module if module in MODULES else f"{package}.{module}" for name, module in found.items()}
    return {name: module for name, module in absolute.items() if module in MODULES}


@cache
def imports(module: str) -> frozenset[str]:
    """The modules of jaxmem that importing a module loads by itself; a lazy name of a package loads its module."""
    found = set()
    for node in top_level(tree(module).body):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            continue
        base = module.split(".")[: -node.level or None] if node.level else []
        if node.level and MODULES[module].name == "__init__.py":
            base = module.split(".")[: len(module.split(".")) - node.level + 1]
        package = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            own = f"{package}.{alias.name}"
            found |= {package, own} if own in MODULES else {package}
            if package in MODULES and MODULES[package].name == "__init__.py":
                found |= {lazy_modules(package).get(alias.name, package)}
    parents = {name.rpartition(".")[0] for name in found | {module}}
    return frozenset((found | parents) & MODULES.keys() - {module})


def closure(module: str) -> set[str]:
    seen, todo = set(), [module]
    while todo:
        if (one := todo.pop()) not in seen:
            seen.add(one)
            todo += imports(one)
    return seen


@pytest.mark.parametrize(
    ("module", "files"),
    [
        ("jaxmem.models.decoder", 45),
        ("jaxmem.step.programs", 60),
        ("jaxmem.training.run", 120),
    ],
)
def test_a_module_is_read_without_reading_the_whole(module: str, files: int) -> None:
    assert len(closure(module)) <= files


def test_what_importing_runs_is_what_is_counted() -> None:
    module = "jaxmem.training.run"
    code = f"import sys, {module}; print(*(name for name in sys.modules if name.split('.')[0] == 'jaxmem'))"
    assert set(run(code, cwd=ROOT).split()) <= closure(module)


def test_the_step_knows_neither_data_nor_files() -> None:
    assert {room(module) for module in closure("jaxmem.step.programs")}.isdisjoint({"data", "hf", "checkpoint"})


def test_importing_the_kernels_loads_no_operation(tmp_path: Path) -> None:
    code = "import sys, jaxmem.kernels; print(*(name for name in sys.modules if name.startswith('jaxmem.kernels.')))"
    assert run(code, cwd=tmp_path) == ""


# What a plan's methods import when they are called: its warnings and its table, which read the plan.
LATE = {"jaxmem.planning.result": {"jaxmem.planning.advice", "jaxmem.planning.table"}}


@pytest.mark.exhaustive
def test_no_imports_form_a_circle() -> None:
    """Of files, also within a folder, inside functions and under TYPE_CHECKING. A package's `__init__` is left out."""

    def needs(module: str) -> set[str]:
        anywhere = imported(MODULES[module], SOURCES[MODULES[module]])
        anywhere |= {name.rpartition(".")[0] for name in anywhere}
        packages = {name for name in anywhere if name in MODULES and MODULES[name].name == "__init__.py"}
        names = imports(module) | (anywhere & MODULES.keys() - packages)
        return {name for name in names - LATE.get(module, set()) if not module.startswith(f"{name}.")}

    list(TopologicalSorter({module: needs(module) for module in MODULES}).static_order())  # raises CycleError


@pytest.mark.exhaustive
def test_kernels_have_one_name() -> None:
    files = [*SOURCES, *(path for folder in ("tests", "scripts") for path in (ROOT / folder).rglob("*.py"))]
    for path in files:
        names = {name.split(".")[0] for name in imported(path, SOURCES.get(path, path.stem))}
        assert "kernels" not in names, path


SCRIPTS = sorted(path for folder in ("scripts", "tests/support") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_scripts_import_names_that_exist(path: Path) -> None:
    """Most scripts are not run by the tests: a name that was renamed or moved would not be noticed."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxmem"):
            if "torch" in str(node.module):  # needs a library that tests do not install
                continue
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                assert hasattr(module, alias.name) or importlib.util.find_spec(name), name


@pytest.mark.exhaustive
def test_kernels_are_imported_under_one_name(tmp_path: Path) -> None:
    """An editable install puts the clone on Python's path, where kernels/ could be imported a second time."""
    code = "import sys, jaxmem.kernels.fused_attention; print('kernels' in sys.modules)"
    assert run(code, cwd=tmp_path) == "False"


def test_one_room_knows_how_arrays_are_laid_out() -> None:
    assert {room(module) for path, module in SOURCES.items() if "PartitionSpec" in path.read_text()} == {"sharding"}


def test_importing_loads_few_modules(tmp_path: Path) -> None:
    code = "import sys; before = set(sys.modules); import jaxmem; print(*set(sys.modules) - before)"
    loaded = run(code, cwd=tmp_path).split()
    assert {name for name in loaded if name.split(".")[0] not in sys.stdlib_module_names} == {"jaxmem"}
    assert len(loaded) < 80


def test_public_names() -> None:
    import jaxmem
    from jaxmem import config, errors, kernels
    from jaxmem.planning.result import plan
    from jaxmem.training.run import run

    assert jaxmem.load_config is config.load_config
    assert jaxmem.Config is config.Config
    assert jaxmem.UserError is errors.UserError
    assert jaxmem.plan is plan
    assert jaxmem.train is run
    assert jaxmem.kernels is kernels
    assert {"Config", "kernels", "load_config", "optim", "plan"} <= set(dir(jaxmem))


def test_type_checkers_see_the_type_of_each_public_name() -> None:
    """An import of a lazy name of a package would be `Any` to them: each is imported from the module that has it."""
    for node in ast.walk(tree("jaxmem")):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("jaxmem."):
            defined = {
                child.name for child in tree(node.module).body if isinstance(child, ast.ClassDef | ast.FunctionDef)
            }
            assert {alias.name for alias in node.names} <= defined, node.module


def test_a_wrong_name_is_an_attribute_error() -> None:
    import jaxmem

    with pytest.raises(AttributeError, match="no attribute 'plann'"):
        _ = jaxmem.plann


def run(code: str, cwd: Path) -> str:
    """What the code prints, in a Python of its own."""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
