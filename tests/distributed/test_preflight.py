"""Which processes are named as slow; `test_together.py` measures real ones."""

from jaxmem.distributed.preflight import preflight, report


def test_a_process_below_half_of_the_median_is_named() -> None:
    rates = {"matmul": [10.0, 9.0, 3.0, 11.0], "copy": [5.0, 5.0, 5.0, 2.6]}
    assert report(38.1e9, rates, ["node1", "node1", "node7", "node7"]) == [
        "4 processes on 2 hosts: all-reduce 38.1 GB/s",
        "process 2 of 4 (node7) is slow: matmul at 32% of the median",
    ]


def test_of_two_only_a_much_slower_one() -> None:
    """The median of two lies between them."""
    assert not report(1e9, {"copy": [1.0, 2.0]}, [])[1:]
    assert report(1e9, {"copy": [1.0, 9.0]}, [])[1:] == ["process 0 of 2 is slow: copy at 20% of the median"]


def test_a_lone_process_can_measure_itself() -> None:
    (line,) = preflight()
    assert line.startswith("1 processes: all-reduce ")
