"""The examples for clusters can be read by who will read them, and what they run exists."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from jaxmem.cli import app
from jaxmem.config import load_config

ROOT = Path(__file__).parents[1]
CLUSTERS = ROOT / "docs" / "clusters"
COMMANDS = typer.main.get_command(app).commands


def checked(words: list[str]) -> None:
    """A jaxmem command: it exists, and so do its options; its config is read with its overrides."""
    name, *arguments = words[words.index("jaxmem") + 1 :]
    arguments = arguments[: arguments.index("--")] if "--" in arguments else arguments  # another command follows
    parameters = COMMANDS[name].params
    options = {option for parameter in parameters for option in parameter.opts}
    for word in arguments:
        if word.startswith("-"):
            assert word in options, f"{name} {word}"
    if name == "train":
        config, *overrides = [word for word in arguments if not word.startswith("-")]
        load_config(ROOT / ("configs/llama3-8b.yaml" if "$" in config else config), overrides)


def test_slurm() -> None:
    script = CLUSTERS / "slurm.sh"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    text = script.read_text()
    options = [line.split()[1] for line in text.splitlines() if line.startswith("#SBATCH")]
    assert all(re.fullmatch(r"--[a-z-]+(=\S+)?", option) for option in options)
    assert {"--signal=USR1@300", "--requeue"} <= set(options)
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("srun ")]
    assert len(commands) == 1
    checked(commands[0])


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [(75, 9, True), (137, 0, True), (137, 5, False), (130, 0, False), (0, 0, False), (1, 0, False)],
)
def test_slurm_queues_a_job_again(tmp_path: Path, code: int, restarts: int, requeued: bool) -> None:
    """After an interruption always; after a killed process, which srun reports as 137, five times; never after Ctrl-C,
    130."""
    for name, content in (("srun", f"exit {code}"), ("scontrol", f"touch {tmp_path}/requeued")):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n{content}\n")
        program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
    command = ["bash", CLUSTERS / "slurm.sh", "config.yaml"]
    assert subprocess.run(command, env=environment, check=False).returncode == code
    assert (tmp_path / "requeued").exists() == requeued


def test_kubernetes() -> None:
    service, job = yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text())
    assert (service["kind"], service["spec"]["clusterIP"], job["kind"]) == ("Service", "None", "Job")
    spec, name = job["spec"], job["metadata"]["name"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    told = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert spec["completionMode"] == "Indexed"
    assert told["JAX_NUM_PROCESSES"] == str(spec["completions"]) == str(spec["parallelism"])
    assert told["JAX_COORDINATOR_ADDRESS"].startswith(f"{name}-0.{pod['subdomain']}:")
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [75]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    checked(container["command"])


def test_container() -> None:
    lines = (CLUSTERS / "Containerfile").read_text().splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert [word for word, _ in steps] == ["FROM", "WORKDIR", "COPY", "RUN", "STOPSIGNAL", "CMD"]
    assert dict(steps)["STOPSIGNAL"] == "SIGUSR1"
    checked(yaml.safe_load(dict(steps)["CMD"]))
    extras = re.findall(r"\.\[(\w+)\]", dict(steps)["RUN"])
    assert all(f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text() for extra in extras)
    checked(shlex.split(lines[1].lstrip("# ").partition(" jaxmem ")[2]))


def test_the_page_about_several_hosts() -> None:
    """Links lead somewhere; commands and keys exist."""
    text = (ROOT / "docs/several-hosts.md").read_text()
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (ROOT / "docs" / link).exists(), link
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            for start in (n for n, word in enumerate(words) if word == "jaxmem"):
                checked(words[start:])
    for key in re.findall(r"`((?:cluster|checkpoint)\.\w+)`", text):
        section, field = key.split(".")
        assert field in type(getattr(load_config(ROOT / "configs" / "demo.yaml"), section)).model_fields, key
