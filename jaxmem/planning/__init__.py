"""Memory per device before anything is allocated: the real step is compiled, and the compiler's decisions are read.

It works for local devices and for any number of GPUs that are not here, since XLA's GPU compiler runs without one. A
plan of 8 B parameters for 8 GPUs takes some ten seconds of a processor and 1 GiB of memory; for 1,024 GPUs hardly more,
since every device runs the same program.

    compile      the step is compiled: XLA's scheduled module (hlo) and buffer assignment (buffers)
    breakdown    each buffer at the peak belongs to a part: by the inputs it comes from (origins), its shape
                 (known_shapes), its pass and its source line (sources)
    timeline     the schedule in seconds: kernels, collectives, host copies (communication); history: memory over it
    predict      bytes and seconds by arithmetic: state, passes (one traced row), share, step_time
    budget       `memory.remat: budget`, from the operations of one traced layer (layers)
    result       the plan: all of these, warnings (advice), JSON and a table
"""

from jaxmem.lazy import lazy_names

_MODULES = {
    "Compiled": "compile",
    "Plan": "result",
    "Target": "targets",
    "bytes_on_device": "state",
    "format_bytes": "units",
    "ideal_flops": "predict",
    "parse_target": "targets",
    "plan": "result",
    "plan_program": "result",
    "resolve_budget": "budget",
}
__all__ = list(_MODULES)
__getattr__ = lazy_names(__name__, _MODULES)
