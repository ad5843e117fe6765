"""What a recorded step is made of: events with times and bytes, and what can be read off a list of them.

The dataclasses are frozen and hold only numbers and strings, so they cross process boundaries as they are.
All times are seconds from the start of the recorded step on the rank's own clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

Interval = tuple[float, float]

KINDS = ("forward", "backward", "optimizer", "collective", "wait")
COMPUTE = ("forward", "backward", "optimizer")
REST = "rest"  # the name of backward work that belongs to no block, such as the loss


@dataclass(frozen=True)
class Event:
    """One thing that happened on one rank during the recorded step.

    kind: one of ``KINDS``. ``forward`` and ``backward`` carry the block's name, ``optimizer`` the
        optimizer's, ``collective`` the operation's (``all_reduce``, ``all_gather``, ``reduce_scatter``,
        ``broadcast``, ``send``, ...). ``wait`` is time during which this rank could not go on before a
        collective was done.
    start, end: seconds from the start of the step. A collective starts when it is launched and ends when the
        backend is done with it (``send`` and ``recv``: when the caller saw that it was done); ``end`` is None
        for one that had not ended when the step did. On an accelerator both are the device's: the time of its
        kernels, not of the launches that the host runs ahead with.
    bytes: the payload of a collective, that is the size of its whole tensor: what is reduced (``all_reduce``,
        ``reduce``), the gathered output (``all_gather``, ``gather``), the input before it is scattered
        (``reduce_scatter``, ``scatter``, ``all_to_all``), the tensor itself (``broadcast``, ``send``,
        ``recv``).
    sent_bytes: what one rank sends for that payload on an ideal ring (see ``d2l_utils.traffic``): logical,
        not seen.
    backend: the backend's own name of what it ran, e.g. ``gloo:all_reduce``; it can differ from ``name``.
    backend_bytes: what this rank sends by the algorithm of that backend operation.
    backend_start: when the backend took the operation up: after ``start`` by what it spent in a queue.
    group_size: the number of ranks that took part.
    of, blocks: "parameters" or "gradients", and the names of the blocks that they belong to. Only of collectives,
        and only where holdings were recorded and it could be told.
    launch_time: when the host launched it, where ``start`` is a device's; None on the CPU, where both are one.

    None means that it was not measured or cannot be told, never zero.
    """

    kind: str
    name: str
    rank: int
    start: float
    end: float | None
    bytes: int | None = None
    sent_bytes: float | None = None
    backend: str | None = None
    backend_bytes: float | None = None
    backend_start: float | None = None
    group_size: int | None = None
    of: str | None = None
    blocks: tuple[str, ...] | None = None
    launch_time: float | None = None

    @property
    def launched(self) -> float:
        """When the host launched it: what to compare with the times of memory and of holdings, which are the host's."""
        return self.start if self.launch_time is None else self.launch_time

    @property
    def seconds(self) -> float | None:
        """Length in seconds, or None where the end was not seen."""
        return None if self.end is None else self.end - self.start


@dataclass(frozen=True)
class MemoryPoint:
    """Tensor memory at a moment: ``bytes`` above what was held when the step started (below: negative).

    ``time`` is when the host allocated or released, on a device too: compare it with ``Event.launched`` and with the
    times of holdings. An event's ``start`` and ``end`` on a device come later.
    """

    time: float
    bytes: int


@dataclass(frozen=True)
class Holding:
    """What a rank held of one block from ``time`` on, until the next holding of that block.

    block: one of the recording's blocks that is a member of a list of modules (where there are none, any of them); ""
        is everything else together.
    parameters, gradients, optimizer: bytes that live tensors cover on this rank, by distinct memory.
    at: where the sample was taken: "start" or "end" of the step, "forward", "after forward", "backward", "launch" (of a
        collective, or a wait for one), "closing" (backward is done), "optimizer". At "forward" and "backward" this
        block begins to be used; "" is a sample that was taken because another one does.
    """

    time: float
    block: str
    parameters: int
    gradients: int
    optimizer: int
    at: str = ""


@dataclass
class Recording:
    """One rank's recorded step, filled when the ``with record(...)`` block ends.

    seconds: length of the step as recorded.
    began: when the step started, nanoseconds since 1970 by the host's clock.
    events: in the order of their starts.
    memory: the memory curve, empty unless allocations were asked for.
    peak: highest memory of the step in bytes above its start, or None where it was not measured. On an accelerator it is
        the allocator's own peak; it counts whole allocations, and so may be above the curve's.
    holdings: what the rank held of each block and when, empty unless asked for. In order of time.
    wire_bytes: bytes that this process really sent over its TCP connections during the step. It includes headers and
        the store's small traffic. None where nothing counts them (only Linux does), and where a collective of the
        step did not run on gloo: shared memory and NVLink pass no socket.
    """

    rank: int = 0
    world_size: int = 1
    seconds: float | None = None
    began: int | None = None
    events: list[Event] = field(default_factory=list)
    memory: list[MemoryPoint] = field(default_factory=list)
    peak: int | None = None
    wire_bytes: int | None = None
    holdings: list[Holding] = field(default_factory=list)


class Overlap(NamedTuple):
    """Seconds of one rank's communication by what the rank did meanwhile; ``hidden + exposed == total``."""

    hidden: float
    exposed: float
    total: float


def by_rank(events: Iterable[Event | Recording | Sequence[Event]]) -> dict[int, list[Event]]:
    """Events of several ranks, as ``{rank: events in order of start}``.

    Takes single events, lists of them (``run.results`` of a function that returned ``recording.events``) or
    recordings.
    """
    ranks: dict[int, list[Event]] = {}
    for item in events:
        many = [item] if isinstance(item, Event) else item.events if isinstance(item, Recording) else item
        for event in many:
            ranks.setdefault(event.rank, []).append(event)
    return {rank: sorted(ranks[rank], key=lambda event: event.start) for rank in sorted(ranks)}


def on_one_clock(recordings: Iterable[Recording]) -> dict[int, list[Event]]:
    """``by_rank`` with times counted from the earliest start of all: ranks of one host share its clock.

    Raises ValueError for a recording that was not filled.
    """
    recordings = list(recordings)
    began = {r.rank: r.began for r in recordings if r.began is not None}
    if missing := sorted({r.rank for r in recordings} - set(began)):
        raise ValueError(f"recordings of ranks {missing} hold no step")
    shift = {rank: (start - min(began.values())) * 1e-9 for rank, start in began.items()}
    return {
        rank: [
            replace(
                event,
                start=event.start + shift[rank],
                end=None if event.end is None else event.end + shift[rank],
                backend_start=None if event.backend_start is None else event.backend_start + shift[rank],
                launch_time=None if event.launch_time is None else event.launch_time + shift[rank],
            )
            for event in events
        ]
        for rank, events in by_rank(recordings).items()
    }


def hidden_and_exposed(events: Iterable[Event], during: Sequence[str] = COMPUTE) -> Overlap:
    """How much of one rank's communication was hidden behind its own computing.

    total: length of the union of the collectives' intervals, so two collectives at once count once. Those
        whose end was not seen are left out.
    hidden: the part of that union in which the rank was inside an event of a kind in ``during`` and not
        waiting.
    exposed: the rest: the rank waited, or had nothing to compute.

    Raises ValueError for events of more than one rank, or a kind that does not exist.
    """
    events = list(events)
    if unknown := sorted(set(during) - set(KINDS)):
        raise ValueError(f"during={unknown}: allowed kinds are {', '.join(KINDS)}")
    if len(ranks := {event.rank for event in events}) > 1:
        raise ValueError(f"events of ranks {sorted(ranks)}: give those of one rank, for example by_rank(events)[0]")
    running = union((e.start, e.end) for e in events if e.kind == "collective" and e.end is not None)
    computing = union((e.start, e.end) for e in events if e.kind in during and e.end is not None)
    waiting = union((e.start, e.end) for e in events if e.kind == "wait" and e.end is not None)
    total = length(running)
    hidden = length(intersection(running, difference(computing, waiting)))
    return Overlap(hidden, total - hidden, total)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals in order; empty ones are dropped."""
    merged: list[Interval] = []
    for start, end in sorted(pair for pair in intervals if pair[1] > pair[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def intersection(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Points in both of two unions."""
    common, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if end > start:
            common.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """Points of the first union that are not in the second."""
    left = []
    for start, end in one:
        for low, high in intersection([(start, end)], other):
            if low > start:
                left.append((start, low))
            start = high
        if end > start:
            left.append((start, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    """Total length of a union."""
    return sum(end - start for start, end in intervals)
