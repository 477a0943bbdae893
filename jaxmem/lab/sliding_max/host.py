"""The maximum over a sliding window on one processor: three algorithms, each with fewer operations per number.

Comparisons for n numbers and a window of w: brute force n w; a heap at most n log n, where numbers that have left the
window are removed when they reach the top (2 n numbers stored at worst); a monotonic deque at most 2 n, w stored.
"""

import heapq
from collections import deque
from collections.abc import Sequence


def brute_force(x: Sequence[float], window: int) -> list[float]:
    return [max(x[i : i + window]) for i in range(len(x) - window + 1)]


def with_heap(x: Sequence[float], window: int) -> list[float]:
    found, heap = [], [(-value, i) for i, value in enumerate(x[: window - 1])]
    heapq.heapify(heap)
    for i in range(window - 1, len(x)):
        heapq.heappush(heap, (-x[i], i))
        while heap[0][1] <= i - window:
            heapq.heappop(heap)
        found.append(-heap[0][0])
    return found


def with_deque(x: Sequence[float], window: int) -> list[float]:
    """The deque has the places of decreasing numbers: each is a maximum once all before it have left the window."""
    found: list[float] = []
    places: deque[int] = deque()
    for i, value in enumerate(x):
        while places and x[places[-1]] <= value:
            places.pop()
        places.append(i)
        if places[0] <= i - window:
            places.popleft()
        if i >= window - 1:
            found.append(x[places[0]])
    return found


HOST = {"brute force": brute_force, "heap": with_heap, "monotonic deque": with_deque}
