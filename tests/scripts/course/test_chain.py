"""The stop of chains: no layer runs without its input, and memory and recomputation are those of the schedule."""

import itertools
import xml.etree.ElementTree as ET

import pytest

from jaxmem.stack.recompute_plan import recompute_plan
from scripts.course.chain import KEY, POLICIES, animation, frames, inference, measure, play


@pytest.mark.parametrize("layers", [5, 16])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_layer_runs_only_with_its_input(policy: str, layers: int) -> None:
    chain = list(frames(policy, layers))
    for before, now in itertools.pairwise(chain):
        ran = next((n for n, letter in enumerate(before) if letter in "FR"), None)
        for n, letter in enumerate(now):
            assert letter == "." or before[n] != "." or n == (ran is not None and ran + 1)
    plan = recompute_plan(policy, layers)
    assert plan is not None
    assert sum("R" in frame for frame in chain) == plan.runs
    assert max(layers - frame.count(".") for frame in chain) == plan.slots
    assert [frame.index("B") for frame in chain if "B" in frame] == list(reversed(range(layers)))


def test_inference_needs_two_inputs_for_any_number_of_layers() -> None:
    for layers in (4, 40):
        assert max(layers - frame.count(".") for frame in inference(layers)) == 2


def test_an_animation_has_a_colour_per_layer_and_tick() -> None:
    chains = {"sqrt": list(frames("sqrt", 6)), "inference": list(inference(6))}
    root = ET.fromstring(animation(chains))
    animated = [node for node in root.iter() if node.tag.endswith("animate")]
    assert len(animated) == 2 * 6
    assert {len(node.attrib["values"].split(";")) for node in animated} == {len(chains["sqrt"])}


def test_frames_are_printed_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    play("sqrt", 6, 0.0)
    assert sum(line.startswith("tick") for line in capsys.readouterr().out.splitlines()) == len(list(frames("sqrt", 6)))


def test_the_table_compares_all(capsys: pytest.CaptureFixture[str]) -> None:
    found = measure(9)
    assert [row["policy"] for row in found.tables[0].rows][1:-1] == list(POLICIES)
    assert all(set("".join(panel.rows.values())) <= set(KEY) for panel in found.panels)  # type: ignore[union-attr]
