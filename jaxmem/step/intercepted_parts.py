"""The parts of a network that cannot name them: the model of a script, with the loss of the script.

The network is run under `stack.intercept_with`. Its stacks of layers, and its operations with an embedding or output
matrix, are cut out where they are computed, and each function between two of these cuts is the complete network with
the known results of the earlier cuts; XLA removes the operations that do not contribute. The path of the weights of a
cut is found by the identity of its arrays.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import jax

from jaxmem.models.network import Flow, Layers, MatrixPart, NetworkPart, Part, Path
from jaxmem.models.vocab_slices import VocabOp, VocabOpResult
from jaxmem.quant.precision import Params
from jaxmem.stack import StackCall, intercept_with
from jaxmem.step.objective import Batch, Objective, Sums
from jaxmem.typing import Tree

Cut: TypeAlias = StackCall | VocabOp


def intercepted_parts(
    objective: Objective, network: Any, params: Params, batch: Batch, keys: jax.Array | None, *, matrices: bool = True
) -> list[NetworkPart]:
    """The parts of `network`, which has the weights `params`, and of the loss; the last one returns the sums.
    `matrices`: whether operations with an embedding or output matrix are parts."""
    run = _Interception(objective, batch, keys, matrices)
    cuts = run.cuts(network)
    parts: list[NetworkPart] = []
    for number, cut in enumerate(cuts):
        path = _path_of(params, cut.weights if isinstance(cut, StackCall) else cut.weight)
        # A lookup is the first part: it has no input that a part before it would compute.
        parts += [Part(run.input_of(number))] if cut.x is not None else []
        if isinstance(cut, StackCall):
            parts.append(Layers(path, run.stack(number)))
        else:
            parts.append(MatrixPart(_refuse, path, run.matrix(number)))
    return [*parts, Part(lambda network, flow: run.sums(network, _known(flow)))]


class _Interception:
    def __init__(self, objective: Objective, batch: Batch, keys: jax.Array | None, matrices: bool) -> None:
        self._objective = objective
        self._batch = batch
        self._keys = keys
        self._matrices = matrices

    def cuts(self, network: Any, known: tuple[Any, ...] = ()) -> list[Cut]:
        """The cuts of the network, in the order of the computation. `known` are the results of the first ones."""
        return self._run(network, known)[0]

    def sums(self, network: Any, known: tuple[Any, ...]) -> Sums:
        return self._run(network, known)[1]

    def input_of(self, number: int) -> Callable[[Any, Flow], Flow]:
        """The function from the cut before to the input of this cut."""

        def run(network: Any, flow: Flow) -> Flow:
            known = _known(flow) if number else ()
            return Flow(self.cuts(network, known)[number].x, known)

        return run

    def stack(self, number: int) -> Callable[[Any, Flow], StackCall]:
        def call(network: Any, flow: Flow) -> StackCall:
            cut = self.cuts(network, flow.kept)[number]
            assert isinstance(cut, StackCall)
            return replace(cut, x=flow.x)

        return call

    def matrix(self, number: int) -> Callable[[Any, Flow], VocabOpResult]:
        def separate(network: Any, flow: Flow) -> VocabOpResult:
            cut = self.cuts(network, flow.kept or ())[number]
            assert isinstance(cut, VocabOp)
            return cut.forward()

        return separate

    def _run(self, network: Any, known: tuple[Any, ...]) -> tuple[list[Cut], Sums]:
        """The cuts, and the sums of the objective."""
        cuts: list[Cut] = []

        def handle(part: Cut) -> Any:
            is_first_lookup = isinstance(part, VocabOp) and part.x is None and not cuts
            is_projection = isinstance(part, VocabOp) and part.x is not None
            if not (isinstance(part, StackCall) or (self._matrices and (is_first_lookup or is_projection))):
                return None
            cuts.append(part)
            number = len(cuts) - 1
            if isinstance(part, StackCall):  # beyond the known results, the input stands for the output
                return (known[number] if number < len(known) else part.x), None
            return known[number] if number < len(known) else None

        with intercept_with(handle):
            sums = self._objective(network, self._batch, self._keys)
        return cuts, sums


def _known(flow: Flow) -> tuple[Any, ...]:
    """The results of all cuts so far."""
    return (*(flow.kept or ()), flow.x)


def _refuse(_network: Any, _flow: Flow) -> Flow:
    raise AssertionError("an intercepted operation with a matrix is always separate")


def _path_of(params: Params, weights: Tree) -> Path:
    """The path of a matrix or of the weights of a stack in the parameter tree."""
    path, leaf = jax.tree_util.tree_leaves_with_path(weights)[0]
    complete = next(path_of_leaf for path_of_leaf, x in jax.tree_util.tree_leaves_with_path(params) if x is leaf)
    return tuple(step.key for step in complete[: len(complete) - len(path)])
