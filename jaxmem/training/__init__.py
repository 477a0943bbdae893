"""The training loop, and what it shows and writes.

`run.py` has the phases of a run in order: prepare (devices, program, directory), finished (nothing is left to do),
train (compile, restore, open), loop. To resume, also on another mesh: restore.py, checkpoint/saved_state.py.

From a batch to its metrics, for each step of the loop in `run.py`:

    data/loader.py        the rows of this process: {name: array [micro-batches, rows, sequence]}
    step/batches.py       `Program.place`: the rows on the devices of this process
    step/step.py          the compiled step: loss and gradients, update, metrics (its docstring has the order)
    telemetry.py          metrics are read one step later, so that the devices do not wait, and checked for divergence
    progress.py           the line or the bar that shows them; trackers.py: metrics.jsonl, TensorBoard, Weights & Biases

Around the loop: directory.py (lock and files of a run), restore.py (resume), signals.py (stop), memory_check.py
(planned and measured memory), lines.py (what is printed at the start and the end).
"""
