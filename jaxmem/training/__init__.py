"""The training loop, and what it shows and writes.

`run.py` has the phases of a run in order: prepare (devices, program, directory), finished (nothing is left to do),
train (compile, restore, open), loop; its docstring follows a batch to its metrics. To resume, also on another mesh:
restore.py, checkpoint/saved_state.py.

Around the loop: telemetry.py and progress.py (metrics, and the line or the bar that shows them), trackers.py
(metrics.jsonl, TensorBoard, Weights & Biases), directory.py (lock and files of a run), restore.py (resume), signals.py
(stop), memory_check.py (planned and measured memory), lines.py (what is printed at the start and the end).
"""
