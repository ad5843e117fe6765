"""Memory pass by pass, in a step that accumulates."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chapter19_9.train import Result

__all__ = ["least_by_pass"]


def least_by_pass(results: Iterable[Result], parts: int = 8) -> dict[float, int]:
    """{passes that are done: least bytes above the start of the step}, for ``parts`` equal parts of each pass.

    The least in each part, and of all the recordings: what cannot be let go of. Above it come and go what is computed
    on, and what a backend's thread still holds of a collective that is over.
    """
    found: dict[float, int] = {}
    for result in results:
        events, memory = result.recording.events, result.recording.memory
        inputs = min((e for e in events if e.kind == "forward"), key=lambda event: event.start).name
        starts = [e.start for e in events if e.kind == "forward" and e.name == inputs]
        ends = [*starts[1:], next(e.start for e in events if e.kind == "optimizer")]
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            edges = [start + (end - start) * part / parts for part in range(parts + 1)]
            for part, (low, high) in enumerate(pairwise(edges)):
                at_first = max((p for p in memory if p.time <= low), key=lambda point: point.time).bytes
                lowest = min([at_first, *(p.bytes for p in memory if low < p.time <= high)])
                place = number + part / parts
                found[place] = min(lowest, found.get(place, lowest))
    return found
