"""Packed rows against a slow reference that places one token at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.data.packing import OrderedRecords, RowStream, TextRows
from jaxmem.data.records import Document

Records = list[list[int]]
records = st.lists(st.lists(st.integers(1, 255), max_size=12), min_size=1, max_size=15)


def expected_rows(stream: Records, time: int, packing: bool) -> list[list[tuple[int, int, int, int, int]]]:
    """Rows of (input, target, position, segment, mask), written from the definition."""
    rows: list[list[tuple[int, int, int, int, int]]] = [[]]
    for record in stream:
        last_segment = None
        for i, token in enumerate(record):
            if len(rows[-1]) == time:
                if not packing:
                    break
                rows.append([])
                last_segment = None
            row = rows[-1]
            if last_segment is None:  # the record begins in this row, or goes on in it
                last_segment = row[-1][3] + 1 if row else 1
                started = i
            has_target = i + 1 < len(record)
            row.append((token, record[i + 1] if has_target else 0, i - started, last_segment, int(has_target)))
        if not packing or len(rows[-1]) == time:
            rows.append([])
    rows = rows if rows[-1] else rows[:-1]
    return [row + [(0, 0, 0, 0, 0)] * (time - len(row)) for row in rows]


def as_rows(batch: dict[str, np.ndarray], column: int) -> list[tuple[int, int, int, int, int]]:
    arrays = [batch[name][0, column] for name in ("inputs", "targets", "positions", "segment_ids", "mask")]
    return [(int(a), int(b), int(c), int(d), int(e)) for a, b, c, d, e in zip(*arrays, strict=True)]


def text_rows(data: Records, count: int, time: int, packing: bool, most: int = 31) -> TextRows:
    def read(place: int) -> list[Document]:
        return [Document(np.array(data[place], np.int32))]

    ordered = OrderedRecords(read, range(len(data)).__contains__)
    streams = [RowStream(ordered, row, count, most if packing else None) for row in range(count)]
    return TextRows(streams, np.arange(count)[None], time)


@given(records, st.integers(1, 3), st.integers(1, 9), st.booleans())
def test_every_row_is_what_the_definition_says(data: Records, count: int, time: int, packing: bool) -> None:
    rows = text_rows(data, count, time, packing)
    found: list[list[list[tuple[int, int, int, int, int]]]] = [[] for _ in range(count)]
    while not rows.has_ended:
        batch = rows.batch()
        for column in range(count):
            found[column].append(as_rows(batch, column))
    for column in range(count):
        stream = data[column::count]
        expected = expected_rows(stream if not packing else [r for r in stream if r], time, packing)
        padding = [[(0, 0, 0, 0, 0)] * time] * (len(found[column]) - len(expected))
        assert found[column] == expected + padding


@pytest.mark.exhaustive
@given(records, st.integers(1, 9), st.booleans())
def test_rows_go_on_from_any_position(data: Records, time: int, packing: bool) -> None:
    rows, positions, batches = text_rows(data, 2, time, packing), [], []
    while not rows.has_ended:
        positions.append(rows.position)
        batches.append(rows.batch())
    for start, position in enumerate(positions):
        again = text_rows(data, 2, time, packing)
        again.position = position
        for batch in batches[start:]:
            for name, value in again.batch().items():
                np.testing.assert_array_equal(value, batch[name])
        assert again.has_ended


def test_a_document_continued_in_the_next_row_is_predicted_across_the_edge() -> None:
    rows = text_rows([[10, 11, 12, 13, 14, 256], [20, 256]], 1, 4, packing=True)
    first, second = rows.batch(), rows.batch()
    assert first["inputs"].ravel().tolist() == [10, 11, 12, 13]
    assert first["targets"].ravel().tolist() == [11, 12, 13, 14]  # 14 is the next row's first token
    assert first["mask"].ravel().tolist() == [1, 1, 1, 1]
    assert second["inputs"].ravel().tolist() == [14, 256, 20, 256]
    assert second["targets"].ravel().tolist() == [256, 0, 256, 0]
    assert second["mask"].ravel().tolist() == [1, 0, 1, 0]  # nothing is predicted from the end of a document
    assert second["positions"].ravel().tolist() == [0, 1, 0, 1]
    assert second["segment_ids"].ravel().tolist() == [1, 1, 2, 2]


def test_a_position_after_the_end_of_its_document_goes_on_with_the_next() -> None:
    """Of a run that an earlier version began, in which the row read another document."""
    rows = text_rows([[10, 11, 256], [20, 256]], 1, 4, packing=True)
    rows.position = {"rows": [(0, 0, 100)]}
    assert rows.batch()["inputs"].ravel().tolist() == [20, 256, 0, 0]


@given(records, st.integers(2, 9), st.integers(1, 3))
def test_a_row_has_a_limited_number_of_documents(data: Records, time: int, most: int) -> None:
    """The rest of a row is padding, and no token is lost."""
    rows = text_rows(data, 1, time, packing=True, most=most)
    tokens, segments = [], []
    while not rows.has_ended:
        row = as_rows(rows.batch(), 0)
        used = [cell for cell in row if cell[3]]
        tokens += [cell[0] for cell in used]
        segments.append(len({cell[3] for cell in used}))
    assert tokens == [token for record in data for token in record]
    assert max(segments) <= most
