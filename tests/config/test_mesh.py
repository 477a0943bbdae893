"""The mesh for a number of devices: -1 is filled in; errors name the nearest sizes that are divisible."""

import re

import pytest

from jaxmem.config import Config, load_config
from jaxmem.config.devices import for_devices
from jaxmem.config.mesh import MESH_AXES
from jaxmem.errors import UserError

TEXT = {"name": "x", "model": {"preset": "tiny"}, "train": {"steps": 10}}
PICTURES = {**TEXT, "objective": "classify", "model": {"family": "vit"}, "data": {"source": "digits"}}


def lines(base: dict, n: int, *overrides: str) -> list[str]:
    cfg = load_config(base, overrides)
    with pytest.raises(UserError) as error:
        for_devices(cfg, n)
    return str(error.value).split("\n")


@pytest.mark.parametrize(
    ("n", "overrides", "expected"),
    [
        (1, ["mesh.fsdp=-1"], (1, 1, 1)),
        (8, ["mesh.fsdp=-1"], (1, 8, 1)),
        (8, ["mesh.fsdp=-1", "mesh.tensor=2"], (1, 4, 2)),
        (8, ["mesh.replica=-1", "mesh.fsdp=2", "mesh.tensor=2"], (2, 2, 2)),
        (4, ["mesh.tensor=-1"], (1, 1, 4)),
        (8, ["mesh.replica=2", "mesh.fsdp=4"], (2, 4, 1)),
        (2, ["mesh.tensor=-1", "mesh.fsdp=2"], (1, 2, 1)),
    ],
)
def test_the_rest_of_the_devices(n, overrides, expected):
    cfg = load_config(TEXT, overrides)
    resolved = for_devices(cfg, n)
    assert (resolved.mesh.replica, resolved.mesh.fsdp, resolved.mesh.tensor) == expected
    assert for_devices(resolved, n) == resolved
    assert resolved.model_copy(update={"mesh": cfg.mesh}) == cfg  # nothing else changed


@pytest.mark.parametrize(
    ("base", "overrides", "parts"),
    [
        (TEXT, ["mesh.stage=8", "batch.accumulate=8"], "mesh.stage=8 ... model.layers=4 ... mesh.stage=4"),
        (
            TEXT,
            ["mesh.stage=4", "mesh.fsdp=2", "pipeline.rounds=2", "batch.accumulate=4"],
            "mesh.stage=4 ... pipeline.rounds=2 ... model.layers=4 ... mesh.stage=2",
        ),
        (
            TEXT,
            ["mesh.stage=2", "mesh.fsdp=4", "pipeline.rounds=2", "batch.global_size=24", "batch.accumulate=3"],
            "batch.accumulate=3 ... mesh.stage=2 ... pipeline.rounds=2 ... batch.accumulate=2",
        ),
        (
            TEXT,
            ["mesh.stage=2", "mesh.fsdp=4", "pipeline.rounds=2", "batch.global_size=12"],
            "batch.accumulate=1 ... mesh.stage=2 ... pipeline.rounds=2 ... batch.accumulate=2 ... batch.global_size=8",
        ),
        (
            PICTURES,
            ["mesh.stage=8", "model={family: convnet}"],
            "mesh.stage=8 ... model.family=convnet ... mesh.stage=1",
        ),
    ],
)
def test_stages(base, overrides, parts):
    """`parts` of the first line, in their order."""
    assert re.search(".*".join(map(re.escape, parts.split(" ... "))), lines(base, 8, *overrides)[0])


def test_the_rest_of_the_devices_may_be_stages():
    cfg = for_devices(load_config(TEXT, ["mesh.stage=-1", "mesh.fsdp=2", "batch.accumulate=4"]), 8)
    assert (cfg.mesh.stage, cfg.mesh.fsdp) == (4, 2)


def test_layers_that_do_not_divide_are_filled_up():
    assert for_devices(load_config(TEXT, ["mesh.stage=3", "batch.accumulate=8"]), 3).mesh.stage == 3


def test_stages_are_advised_to_who_asked_for_some():
    assert lines(TEXT, 8, "mesh.stage=8")[1] == (
        "for 8 devices, use mesh.stage=4 mesh.fsdp=2, or mesh.stage=4 mesh.tensor=2, or mesh.stage=4 mesh.replica=2"
    )


def test_wrong_number_of_devices():
    assert lines(TEXT, 8, "mesh.fsdp=4") == [
        "mesh.replica=1 x mesh.fsdp=4 x mesh.tensor=1 needs 4 devices; found 8",
        "for 8 devices, use mesh.fsdp=8, or mesh.tensor=2, or mesh.replica=2",
    ]


def test_no_rest():
    assert lines(TEXT, 8, "mesh.fsdp=-1", "mesh.tensor=3")[0] == (
        "mesh.fsdp=-1 requires a multiple of 3 devices; found 8 (mesh.replica=1 x mesh.fsdp=-1 x mesh.tensor=3)"
    )


def test_rows():
    reason, advice = lines(TEXT, 8, "mesh.fsdp=-1", "batch.global_size=24", "batch.accumulate=2")
    assert reason.startswith("batch.global_size=24 with batch.accumulate=2 has 12 rows")
    assert reason.endswith("mesh.replica=1 x mesh.fsdp=8; use batch.global_size=16 or 32")
    assert advice == (
        "for 8 devices, use mesh.fsdp=4 mesh.tensor=2, or mesh.fsdp=2 mesh.tensor=4,"
        " or mesh.replica=2 mesh.fsdp=2 mesh.tensor=2"
    )


@pytest.mark.parametrize(
    ("base", "n", "overrides", "parts"),
    [
        (TEXT, 3, ["mesh.tensor=3"], "model.heads=8 ... model.mlp=344 ... mesh.tensor=3 ... mesh.tensor=2"),
        (TEXT, 8, ["mesh.tensor=8", "model.heads=4"], "model.heads=4 ... mesh.tensor=8 ... mesh.tensor=4"),
        (
            TEXT,
            6,
            ["mesh.fsdp=3", "mesh.context=2", "batch.global_size=6"],
            "model.embed=128 ... mesh.fsdp=3 ... mesh.context=2 ... mesh.fsdp=2 ... zero=0",
        ),
        (
            TEXT,
            8,
            ["mesh.context=8", "data.sequence_length=1000"],
            "data.sequence_length=1000 ... mesh.context=8 ... data.sequence_length=992",
        ),
        (
            TEXT,
            8,
            ["mesh.context=2", "mesh.tensor=4", "data.sequence_length=20"],
            "data.sequence_length=20 ... mesh.context=2 ... mesh.tensor=4 ... data.sequence_length=16",
        ),
        (TEXT, 6, ["mesh.fsdp=6", "batch.global_size=6"], "model.embed=128 ... mesh.fsdp=6 ... mesh.fsdp=4 ... zero=0"),
        (
            TEXT,
            8,
            ["mesh.fsdp=4", "mesh.tensor=2", "rules.mlp=[tensor, fsdp]", "model.mlp=68"],
            "model.mlp=68 ... mesh.tensor=2 ... mesh.fsdp=4 ... rules.mlp=[tensor, fsdp] ... rules.mlp=[tensor]",
        ),
        (
            TEXT,
            8,
            ["mesh.replica=2", "mesh.fsdp=4", "model.embed=68", "rules.optimizer=[replica]"],
            "model.embed=68 ... mesh.fsdp=4 x mesh.replica=2 ... mesh.fsdp=2 ... rules.optimizer=[]",
        ),
        (
            PICTURES,
            3,
            ["mesh.tensor=3", "model.heads=3", "model.embed=48", "model.mlp=48"],
            "the 16 patches of model.image_size=8 and model.patch=2 ... by 3, as mesh.tensor=3 ... use mesh.tensor=2",
        ),
        (PICTURES, 8, ["mesh.tensor=8"], "model.heads=4 ... mesh.tensor=8 ... mesh.tensor=4"),
        (
            PICTURES,
            3,
            ["mesh.fsdp=3", "batch.global_size=3", "model={family: mlp}"],
            "model.embed=128 ... mesh.fsdp=3 ... mesh.fsdp=2 ... zero=0",
        ),
        (TEXT, 3, ["mesh.context=3", "data.sequence_length=12"], "mesh.context=3; use another mesh.context, or zero=0"),
        # What only Ulysses supports.
        (
            TEXT,
            3,
            ["mesh.context=3", "model.preset=gemma2-2b", "data.sequence_length=12", "zero=0"],
            "model.heads=8 ... mesh.context=3 ... ring does not support layers with and ... use mesh.context=2 or 4",
        ),
        (
            TEXT,
            6,
            ["mesh.context=3", "mesh.stage=2", "data.sequence_length=12", "zero=0"],
            "model.heads=8 ... mesh.context=3 ... ring does not support mesh.stage=2 ... use mesh.context=2 or 4",
        ),
        (
            PICTURES,
            4,
            ["mesh.tensor=4", "model={family: convnet, stages: [32, 30]}"],
            "model.stages[1]=30 ... mesh.tensor=4 ... mesh.tensor=2",
        ),
    ],
)
def test_dims(base, n, overrides, parts):
    """`parts` of the first line, in their order."""
    assert re.search(".*".join(map(re.escape, parts.split(" ... "))), lines(base, n, *overrides)[0])


@pytest.mark.parametrize(
    ("base", "overrides"),
    [
        (TEXT, ["mesh.fsdp=6", "batch.global_size=6", "zero=0"]),  # embed 128 is whole
        (TEXT, ["mesh.replica=6", "batch.global_size=6"]),
        (TEXT, ["mesh.tensor=6", "rules={mlp: [], heads: [], kv_heads: []}", "data.sequence_length=12"]),
        # Dimensions that are not divisible by `tensor` are replicated or padded.
        (TEXT, ["mesh.tensor=6", "model.heads=12", "model.mlp=12", "model.vocab=263", "data.sequence_length=12"]),
        (PICTURES, ["mesh.fsdp=3", "mesh.tensor=2", "batch.global_size=3", "model={family: mlp}", "zero=0"]),
        (PICTURES, ["mesh.fsdp=3", "mesh.tensor=2", "batch.global_size=3", "model={family: convnet, stages: [6]}"]),
    ],
)
def test_what_divides_is_allowed(base, overrides):
    cfg = load_config(base, overrides)
    assert for_devices(cfg, 6) == cfg


@pytest.mark.parametrize("n", [1, 2, 8, 24, 64])
def test_advice_works(n):
    """Taking any of the advice, as overrides, is accepted."""
    start = ["mesh.fsdp=5", "batch.global_size=48"]
    advice = lines(TEXT, n, *start)[-1]
    _, colon, meshes = advice.partition("for 1 device, use " if n == 1 else f"for {n} devices, use ")
    assert colon
    for mesh in meshes.split(", or "):
        for_devices(load_config(TEXT, [*start, *mesh.split()]), n)


def test_no_mesh_at_all_says_which_batch_would_do():
    last = lines(TEXT, 7, "mesh.fsdp=-1")[-1]
    assert last.startswith("no mesh of 7 devices supports this config")
    assert last.endswith("mesh.replica=7 x mesh.fsdp=1; use batch.global_size=7 or 14")


def test_advice_for_many_devices():
    base = {**TEXT, "model": {"preset": "llama3-405b"}, "batch": {"global_size": 4096}}
    assert lines(base, 16_384, "mesh.fsdp=3")[-1] == (
        "for 16384 devices, use mesh.fsdp=2048 mesh.tensor=8, or mesh.fsdp=4096 mesh.tensor=4,"
        " or mesh.replica=2 mesh.fsdp=1024 mesh.tensor=8"
    )


@pytest.mark.parametrize(
    ("mesh", "n", "found", "accumulate"),
    [
        ({"fsdp": 8}, 8, {"fsdp": 8}, 2),
        ({"fsdp": 8}, 4, {"fsdp": 4}, 4),
        ({"fsdp": 6}, 4, {"fsdp": 4}, 3),  # 24 rows: never more than 2 on a device at once
        ({"fsdp": 4, "tensor": 2}, 2, {"tensor": 2}, 8),
        ({"replica": 2, "fsdp": 4}, 4, {"fsdp": 4}, 4),
        ({"replica": 2, "fsdp": 4}, 2, {"fsdp": 2}, 8),
        ({"fsdp": 4}, 8, {"fsdp": 8}, 1),
    ],
)
def test_elastic_keeps_the_global_batch(mesh: dict[str, int], n: int, found: dict[str, int], accumulate: int) -> None:
    rows = 24 if mesh == {"fsdp": 6} else 32
    used = for_devices(elastic(mesh, rows), n)
    assert {axis: size for axis in MESH_AXES if (size := getattr(used.mesh, axis)) > 1} == found
    assert (used.batch.global_size, used.batch.accumulate) == (rows, accumulate)


def test_elastic_is_refused_where_the_batch_cannot_be_kept() -> None:
    with pytest.raises(UserError, match=r"mesh.fsdp=8 .*needs 8 devices; found 3"):
        for_devices(elastic({"fsdp": 8}, 32), 3)
    with pytest.raises(UserError, match=r"cluster.elastic=true does not support mesh.fsdp=-1"):
        for_devices(elastic({"fsdp": -1}, 32), 4)
    cfg = load_config(
        {
            "name": "x",
            "model": {"family": "vit"},
            "objective": "contrastive",
            "data": {"source": "digits"},
            "batch": {"global_size": 32},
            "mesh": {"fsdp": 4},
            "train": {"steps": 1},
            "cluster": {"elastic": True},
        }
    )
    with pytest.raises(UserError, match=r"mesh.fsdp=4 .*needs 4 devices; found 2"):  # more micro-batches: another loss
        for_devices(cfg, 2)


def elastic(mesh: dict[str, int], rows: int) -> Config:
    return load_config(
        {
            "name": "x",
            "model": {"preset": "tiny"},
            "data": {"source": "tokens", "path": "x"},
            "batch": {"global_size": rows, "accumulate": 2},
            "mesh": mesh,
            "train": {"steps": 1},
            "cluster": {"elastic": True},
        }
    )
