"""What a rank holds of gradients, pass by pass, in a step that accumulates."""

from __future__ import annotations

from bisect import bisect_right

from chapter19_9.recorded import Recorded

__all__ = ["gradients_by_pass", "passes"]


def passes(recorded: Recorded) -> list[float]:
    """When each pass of the recorded step began: its first module's forward, seconds since the step's start."""
    forward = [event for event in recorded.recording.events if event.kind == "forward"]
    first = min(forward, key=lambda event: event.start).name
    return [event.start for event in forward if event.name == first]


def gradients_by_pass(recorded: Recorded) -> dict[float, int]:
    """{passes that are done: bytes of gradients that this rank holds then}, at the recording's samples.

    Within a pass, time counts as its share of the pass. Bytes are those of ``d2l_utils.holdings``: what live tensors cover.
    """
    edges, held, found = passes(recorded), dict[str, int](), {0.0: 0}
    edges.append(next(event.start for event in recorded.recording.events if event.kind == "optimizer"))
    for holding in recorded.recording.holdings:
        if holding.time >= edges[-1]:
            break
        held[holding.block] = holding.gradients
        number = max(0, bisect_right(edges, holding.time) - 1)
        start, end = edges[number : number + 2]
        found[max(0.0, number + (holding.time - start) / (end - start))] = sum(held.values())
    return found | {float(len(edges) - 1): sum(held.values())}
