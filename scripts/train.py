"""A training run on one or several hosts, from top to bottom: mesh, model, data, optimizer, step, loop, checkpoints.

    python scripts/train.py configs/demo.yaml --simulate 2             # two simulated devices
    python scripts/train.py configs/llama3-8b.yaml data.path=... data.tokenizer=...
    jaxmem launch -n 2 -- python scripts/train.py configs/demo.yaml  # or without launch, by Slurm

`jaxmem train` runs the same program, and adds evaluation, trackers, progress, handling of signals and of divergence,
and DPO, for which it computes the log-probabilities of the reference model first.
The same command again resumes from the newest checkpoint, also on another number of devices.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax

import jaxmem
from jaxmem.checkpoint.paths import checkpoint_directory
from jaxmem.checkpoint.saved_state import SavedState
from jaxmem.data.loader import merge_states
from jaxmem.distributed.agree import any_process, gather_objects, serialized
from jaxmem.distributed.join import joined
from jaxmem.inference.load import initial_state
from jaxmem.planning.budget import resolve_remat
from jaxmem.planning.result import plan_program
from jaxmem.planning.targets import local_target
from jaxmem.training.restore import data_fingerprint, latest_of_same_run, restore


def train(config: str, overrides: Sequence[str] = ()) -> list[float]:
    """Trains the config and returns the loss of each step."""
    cfg = jaxmem.load_config(config, overrides)
    with joined(cfg.cluster.heartbeat_timeout, cfg.cluster.start_timeout):
        return run(cfg, is_first=jax.process_index() == 0)


def run(cfg: jaxmem.Config, *, is_first: bool) -> list[float]:
    devices = jax.devices()  # of all hosts
    cfg, _ = resolve_remat(cfg, local_target(devices, gather_objects))  # replaces memory.remat=auto

    # Mesh, network and optimizer, all as the config names them. `spec` has the shape and the sharding of each array of
    # the state and of a batch: [micro-batches, rows, ...].
    program = jaxmem.program(cfg, devices)
    cfg = program.cfg
    spec = program.spec

    # The compiled step (state, batch) -> (state, metrics), and the bytes that it needs, before anything is allocated.
    plan = plan_program(program)
    if is_first:
        print(f"{program.model.parameter_count:,} parameters on {dict(spec.layout.mesh.shape)}")
        print(f"{plan.peak / 2**30:.2f} GiB per device; fits: {plan.fits}", flush=True)
    if not plan.fits:
        raise jaxmem.UserError(f"{cfg.name} does not fit; `jaxmem fit {cfg.name}.yaml` finds settings that do")

    # Data: each process reads the rows of its devices.
    losses = []
    directory = Path(cfg.output, cfg.name)
    path = checkpoint_directory(directory, cfg.checkpoint.path, cfg.name)
    fingerprint = data_fingerprint(cfg)
    latest_of_same_run(program, directory, path, fingerprint)  # refuses checkpoints of other data or another model
    with (
        jaxmem.Loader(cfg, rows=program.rows, agree=any_process) as loader,
        jaxmem.Checkpoints(path, cfg.checkpoint.every, cfg.checkpoint.keep) as checkpoints,
    ):
        # The newest checkpoint, or a new state. Every array is created or read sharded.
        step, state, position = restore(program, checkpoints) or (0, initial_state(program), {})
        if position:
            loader.restore(position)
        saved = SavedState(program)
        sources = {"fingerprint": fingerprint} | ({"base": saved.base} if saved.base else {})

        def save(*, force: bool) -> None:
            if checkpoints.is_due(step, force=force):
                position = merge_states(gather_objects(loader.state())) | sources
                checkpoints.save(step, saved.to_save(state), position, cfg.model_dump(mode="json"), force=force)

        batches = iter(loader)
        while step < cfg.steps and (batch := next(batches, None)) is not None:
            step += 1
            # The old state is donated. On CPUs, `serialized` waits for the step before other programs communicate.
            state, metrics = serialized(plan.executable(state, program.place(batch)))
            losses.append(metrics["loss"])  # not read yet: devices run ahead of the host
            if is_first and (step == cfg.steps or step % cfg.train.log_every == 0):
                print(f"step {step}  loss {float(losses[-1]):.4f}", flush=True)
            save(force=False)
        save(force=True)  # the last step, also if the data ended before `cfg.steps`
        checkpoints.wait()
    return [float(loss) for loss in losses]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a config.")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--simulate", type=int, metavar="N", help="train on N simulated CPU devices")
    options = parser.parse_intermixed_args()
    if options.simulate:
        jaxmem.simulate(options.simulate)
    train(options.config, options.overrides)
