"""`jaxmem plan` and `jaxmem fit`: memory before it is used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxmem.cli.options import ConfigFile, Html, Json, Overrides, Png, Reserve, Simulate
from jaxmem.cli.output import only_json, show
from jaxmem.cli.start import load, take_devices
from jaxmem.errors import UserError


def plan(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", show_default=False)] = None,
    overrides: Overrides = None,
    target: Annotated[
        str | None, typer.Option(metavar="T", help="h100-80gb:16x8, cpu:8, my-gpu.yaml; or: list", show_default=False)
    ] = None,
    reserve: Reserve = None,
    simulate: Simulate = None,
    html: Html = None,
    png: Png = None,
    names: Annotated[bool, typer.Option("--names", help="Names of activations that memory.remat can save.")] = False,
    as_json: Json = False,
) -> None:
    """Plan memory per device without running: for local devices, or for any number of GPUs that are not here."""
    if target == "list":
        from jaxmem.planning.table import TargetList
        from jaxmem.planning.targets import targets_json

        show(targets_json() if as_json else TargetList())
        return
    if config is None:
        raise UserError("CONFIG is missing; give a YAML file such as configs/demo.yaml, or --target list")
    if target and simulate:
        raise UserError(f"--simulate {simulate} and --target {target} both give devices; use one of them")
    cfg = load(config, overrides, simulate, only_compile=True)
    from jaxmem import planning, report

    if names:
        from jaxmem.planning.layers import named_values
        from jaxmem.planning.table import named_values_table

        values = named_values(cfg, target)
        show({"names": [one.as_json() for one in values]} if as_json else named_values_table(values))
        return
    with only_json(as_json):
        planned = planning.plan(cfg, target, reserve_gib=reserve)
        if html:
            report.write_page(planned, html)
        if png:
            report.write_figure(planned, png)
    show(planned.as_json() if as_json else planned.table())


def fit(
    config: ConfigFile,
    overrides: Overrides = None,
    target: Annotated[
        str | None, typer.Option(metavar="T", help="h100-80gb:8, cpu:8, my-gpu.yaml", show_default=False)
    ] = None,
    allow: Annotated[
        str | None,
        typer.Option(metavar="WORDS", help="What may change: mesh,remat,update,batch,chunks", show_default=False),
    ] = None,
    maximize: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="The largest value of KEY that fits, such as model.layers.", show_default=False
        ),
    ] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the best config.", show_default=False)
    ] = None,
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a figure: memory against time.", show_default=False)
    ] = None,
    reserve: Reserve = None,
    compiles: Annotated[int, typer.Option(metavar="N", min=1, help="Compile at most N steps.")] = 20,
    as_json: Json = False,
) -> None:
    """Search for configs that fit, fastest first. Exit code 3: none fits."""
    from jaxmem.config import load_config

    cfg = load_config(config, overrides or [])
    if target is not None:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # no local device is used
    take_devices(None, only_compile=True, spill=cfg.memory.spill != "none")
    from jaxmem.search import fastest, largest

    given: dict[str, Any] = {"target": target, "reserve_gib": reserve}
    if allow is not None:
        given["allow"] = [word.strip() for word in allow.split(",") if word.strip()]
    if maximize and png:
        largest.check_drawable(maximize, png)
    found: Any
    with only_json(as_json):
        if maximize:
            found = largest.maximize(cfg, maximize, **given)
        else:
            found = fastest.fit(cfg, compiles=compiles, **given)
        if png:
            found.figure(png)
        if found.best and write:
            found.write(write)
    show(found.as_json() if as_json else found.table())
    raise typer.Exit(0 if found.best else 3)
