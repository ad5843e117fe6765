"""Turns one step's raw profiler events into the events that a lesson shows.

What the profiler gives (``torch.profiler``, Kineto): one record per operator, per backend operation and per
allocation, with start, length, thread, shapes, and for operators that autograd will differentiate a sequence
number that their backward node carries too. That number is how backward work finds the block whose forward
caused it, without a hook in the graph. The marks that ``record`` sets (``MARK`` and a kind) are records among
the others, on the same clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from d2l_utils import comms
from d2l_utils.events import REST, Event, Interval, MemoryPoint, difference, intersection, union

MARK = "d2l."  # our own records are called d2l.<kind>:<name>
_NODE = "autograd::engine::evaluate_function: "
_OPTIMIZER = "Optimizer.step#"
_FSDP2 = "FSDP::"
_LOOP = 20e-6  # seconds: less than that between two operators is the loop around them, not a wait


class Span(NamedTuple):
    """A stretch of one thread's time, in seconds from the start of the step."""

    name: str
    start: float
    end: float
    thread: int


class Trace:
    """The records of one step, sorted. Times are seconds from the start of the step's mark."""

    def __init__(self, raw: Iterable[Any], on_device: bool = False) -> None:
        self.on_device, self._raw = on_device, list(raw)
        names = [record.name() for record in self._raw]
        step = self._raw[names.index(f"{MARK}step:")]
        self.began = self._zero = step.start_ns()
        self.seconds, self.thread = step.duration_ns() * 1e-9, step.start_thread_id()

        self.marks: dict[str, list[Span]] = {}
        self.nodes: list[tuple[Span, int]] = []  # backward nodes with their sequence numbers
        self.numbered: list[tuple[float, int, int]] = []  # start, thread, sequence number of forward operators
        self.launches: list[tuple[Span, Any]] = []
        self.backends: list[tuple[Span, Any]] = []
        self.waits: list[Span] = []
        self.labels: list[Span] = []  # FSDP2's own records: which unit it works for
        self.optimizers: list[Span] = []
        self.allocations: list[tuple[float, int, bool]] = []  # time, bytes, on an accelerator
        self.kernels: list[tuple[Span, int]] = []  # device work with the correlation of the operator behind it
        self.correlated: dict[int, tuple[float, int]] = {}  # correlation -> start and thread of the operator

        sort_of: dict[str, str] = {}  # thousands of records share some dozens of names
        for record, name in zip(self._raw, names, strict=True):
            sort = sort_of.get(name) or sort_of.setdefault(name, _sort(name))
            # Asking for the device is slow, and without an accelerator the answer is known.
            self._sort_in(record, name, sort, on_device and record.device_type().name != "CPU")

    def _sort_in(self, record: Any, name: str, sort: str, device: bool) -> None:
        if self.on_device and not device:
            self.correlated[record.correlation_id()] = (self._seconds(record), record.start_thread_id())
        if sort == "memory":
            self.allocations.append((self._seconds(record), record.nbytes(), device))
        elif sort == "backend":
            self.backends.append((self._span(record, name), record))
        elif device:
            if not record.is_user_annotation():
                self.kernels.append((self._span(record, name), record.linked_correlation_id()))
        elif sort == "mark":
            kind, _, label = name.removeprefix(MARK).partition(":")
            self.marks.setdefault(kind, []).append(self._span(record, label))
        elif sort == "node":
            self.nodes.append((self._span(record, name.removeprefix(_NODE)), record.sequence_nr()))
        elif sort == "launch":
            self.launches.append((self._span(record, name), record))
        elif sort == "label":
            self.labels.append(self._span(record, name))
        elif sort == "wait":
            self.waits.append(self._span(record, "wait_tensor"))
        elif sort == "optimizer":
            self.optimizers.append(self._span(record, name.removeprefix(_OPTIMIZER).partition(".")[0]))
        elif (number := record.sequence_nr()) >= 0 and record.scope() == 0:
            self.numbered.append((self._seconds(record), record.start_thread_id(), number))

    def _seconds(self, record: Any) -> float:
        return (record.start_ns() - self._zero) * 1e-9

    def _span(self, record: Any, name: str) -> Span:
        start = record.start_ns() - self._zero
        return Span(name, start * 1e-9, (start + record.duration_ns()) * 1e-9, record.start_thread_id())

    def operators(self, windows: list[Interval]) -> list[Interval]:
        """When the recording thread was busy with operators that started in one of the windows."""
        found: list[Interval] = []
        for low, high in windows:
            first, last = self._zero + low * 1e9, self._zero + high * 1e9
            for record in self._raw:
                inside = first <= record.start_ns() <= last and record.start_thread_id() == self.thread
                if inside and record.scope() == 0:
                    _, start, end, _ = self._span(record, "")
                    found.append((start, end + _LOOP))
        return union(found)


def _sort(name: str) -> str:
    if name == "[memory]":
        return "memory"
    if comms.is_backend(name):
        return "backend"
    if name == "_c10d_functional::wait_tensor":
        return "wait"
    begins = {MARK: "mark", _NODE: "node", "c10d::": "launch", _OPTIMIZER: "optimizer", _FSDP2: "label"}
    return next((sort for start, sort in begins.items() if name.startswith(start)), "operator")


def read(
    trace: Trace,
    rank: int,
    default_group: tuple[int, int] | None,
    ddp: bool = False,
    late: Sequence[Event] = (),
) -> list[Event]:
    """All events of the step in order of their starts.

    default_group: (this rank in it, size) of the process group of collectives that are launched from C++, where that
        can be told.
    ddp: whether the model is DistributedDataParallel, which leaves no backward before its collectives are done.
    late: collectives that a throttle has recorded.
    """
    spans = [("forward", span) for span in trace.marks.get("forward", [])]
    spans += [("backward", span) for span in _backward(trace)]
    spans += [("optimizer", span) for span in _outermost(trace.optimizers + trace.marks.get("optimizer", []))]
    if trace.on_device:
        spans = [(kind, moved) for kind, span in spans if (moved := _device_time(trace, span)) is not None]
    sends = comms.match(
        trace.launches,
        trace.backends,
        trace.marks.get("group", []),
        default_group,
        rank,
        done_by=sorted(mark.end for mark in trace.marks.get("closing", [])) if ddp and not trace.on_device else (),
    )
    events = [Event(kind, span.name, rank, span.start, span.end) for kind, span in spans]
    sends += late
    events += sends
    in_flight = union((event.start, event.end) for event in sends if event.end is not None)
    waits = _device_waits(trace, in_flight) if trace.on_device else _waits(trace, in_flight)
    events += [Event("wait", name, rank, start, end) for name, start, end in waits]
    return sorted(events, key=lambda event: event.start)


def _backward(trace: Trace) -> list[Span]:
    """Backward work as runs of nodes of one block; what no block caused is called ``REST``."""
    owner = _owners(trace)
    runs: list[Span] = []
    for node, number in sorted(trace.nodes, key=lambda pair: pair[0].start):
        if runs and node.end <= runs[-1].end:
            continue  # inside another node: a backward that a checkpoint runs
        # Nodes without a number (gradient accumulation, and what hangs on it) follow the node that fed them.
        name = owner.get(number, REST) if number >= 0 else runs[-1].name if runs else REST
        if runs and runs[-1].name == name and runs[-1].thread == node.thread:
            runs[-1] = runs[-1]._replace(end=node.end)
        else:
            runs.append(node._replace(name=name))
    return runs


def _owners(trace: Trace) -> dict[int, str]:
    """Sequence number -> the innermost block whose forward was open when the operator with it started."""
    marks = sorted(trace.marks.get("forward", []), key=lambda mark: mark.start)
    open_marks: dict[int, list[Span]] = {}
    owner, at = {}, 0
    for start, thread, number in sorted(trace.numbered):
        while at < len(marks) and marks[at].start <= start:
            open_marks.setdefault(marks[at].thread, []).append(marks[at])
            at += 1
        stack = open_marks.get(thread, [])
        while stack and stack[-1].end < start:
            stack.pop()
        # An operator that makes no node leaves its number to the next one, so the last to carry it owns it.
        owner[number] = stack[-1].name if stack else REST
    return owner


def _outermost(spans: list[Span]) -> list[Span]:
    """Without those inside another one: an optimizer that steps another counts once."""
    kept: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        if not kept or span.end > kept[-1].end:
            kept.append(span)
    return kept


def _waits(trace: Trace, in_flight: list[Interval]) -> list[tuple[str, float, float]]:
    """Where the recording thread sat in a wait, by the name of what it waited in.

    Waits asked for in Python are marked. DistributedDataParallel waits in C++ when backward is over: there,
    time in the closing callbacks is a wait where a collective was in flight and the thread ran no operator.
    """
    asked = trace.waits + trace.marks.get("wait", [])
    waits = [(span.name, span.start, span.end) for span in _outermost(asked)]
    closing = union((mark.start, mark.end) for mark in trace.marks.get("closing", []))
    known = union((start, end) for _, start, end in waits)
    silent = difference(
        difference(intersection(closing, in_flight), trace.operators(intersection(closing, in_flight))), known
    )
    return waits + [("backward", start, end) for start, end in silent]


def _device_time(trace: Trace, span: Span) -> Span | None:
    """The same work on the device: from its first kernel to the end of its last; None if it started none."""
    mine = []
    for kernel, correlation in trace.kernels:
        start, thread = trace.correlated.get(correlation, (-1.0, -1))
        if span.start <= start <= span.end and thread == span.thread:
            mine.append(kernel)
    if not mine:
        return None
    return span._replace(start=min(k.start for k in mine), end=max(k.end for k in mine))


def _device_waits(trace: Trace, in_flight: list[Interval]) -> list[tuple[str, float, float]]:
    """On a device nobody sits and waits: a collective is exposed where no other kernel ran beside it."""
    busy = union((kernel.start, kernel.end) for kernel, _ in trace.kernels)
    return [("device", start, end) for start, end in difference(in_flight, busy)]


def memory_curve(trace: Trace) -> list[MemoryPoint]:
    """Bytes above the start of the step after each allocation and release, from 0 at time 0."""
    changes = [(time, change) for time, change, on_device in trace.allocations if on_device == trace.on_device]
    changes += [(mark.start, -int(mark.name)) for mark in trace.marks.get("free", [])]
    points, held = [MemoryPoint(0.0, 0)], 0
    for time, change in sorted(changes):
        if 0 <= time <= trace.seconds:
            held += change
            points.append(MemoryPoint(time, held))
    return points
