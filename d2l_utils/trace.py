"""Turns one step's raw profiler events into the events that a lesson shows.

What the profiler gives (``torch.profiler``, Kineto): one record per operator, per backend operation and per
allocation, with start, length, thread, shapes, and for operators that autograd will differentiate a sequence
number that their backward node carries too. That number is how backward work finds the block whose forward
caused it, without a hook in the graph. The marks that ``record`` sets (``MARK`` and a kind) are records among
the others, on the same clock.

On an accelerator the work itself is in the device's records: see ``kernels``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from d2l_utils import comms, kernels
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
        self.allocations: list[tuple[float, int, bool, int]] = []  # time, bytes, on an accelerator, ns since 1970
        self._on_device: list[tuple[Span, Any]] = []
        self._operators: dict[int, tuple[float, int]] = {}  # torch's correlation id -> start and thread
        self._calls: dict[int, float] = {}  # the device library's correlation id -> start of the runtime call

        sort_of: dict[str, str] = {}  # thousands of records share some dozens of names
        for record, name in zip(self._raw, names, strict=True):
            sort = sort_of.get(name) or sort_of.setdefault(name, _sort(name))
            # Asking for the device is slow, and without an accelerator the answer is known.
            self._sort_in(record, name, sort, on_device and record.device_type().name != "CPU")
        work = [self._kernel(span, record) for span, record in self._on_device]
        self.kernels = [kernel for kernel in work if not comms.is_device_backend(kernel.name)]
        self.carriers = [kernel for kernel in work if comms.is_device_backend(kernel.name)]

    def _sort_in(self, record: Any, name: str, sort: str, device: bool) -> None:
        if sort == "memory":
            self.allocations.append((self._seconds(record), record.nbytes(), device, record.start_ns()))
        elif device:
            # An annotation of the host appears a second time, on the device: it is no work.
            if sort == "operator" and not record.is_user_annotation():
                self._on_device.append((self._span(record, name), record))
        elif self.on_device and (what := kernels.activity(record)) not in kernels.OPERATORS:
            if what.endswith(("runtime", "driver")):
                self._calls[record.correlation_id()] = self._seconds(record)
        else:
            if self.on_device:
                self._operators[record.correlation_id()] = (self._seconds(record), record.start_thread_id())
            self._sort_in_operator(record, name, sort)

    def _sort_in_operator(self, record: Any, name: str, sort: str) -> None:
        if sort == "backend":
            self.backends.append((self._span(record, name), record))
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
        elif sort == "operator" and (number := record.sequence_nr()) >= 0 and record.scope() == 0:
            self.numbered.append((self._seconds(record), record.start_thread_id(), number))

    def _kernel(self, span: Span, record: Any) -> kernels.Kernel:
        linked = record.linked_correlation_id()
        operator = self._operators.get(linked) if linked else None
        launched = self._calls.get(record.correlation_id(), operator[0] if operator else None)
        return kernels.Kernel(span.name, span.start, span.end, operator, launched)

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
    if name.startswith("nccl:"):
        return "title"  # ends when the launch returns, and says nothing of the work
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
    events = [Event(kind, span.name, rank, span.start, span.end) for kind, span in spans]
    if trace.on_device:
        events = kernels.on_device(spans, trace.kernels, rank)
    sends = comms.match(
        trace.launches,
        trace.backends,
        trace.marks.get("group", []),
        default_group,
        rank,
        done_by=sorted(mark.end for mark in trace.marks.get("closing", [])) if ddp and not trace.on_device else (),
        kernels=trace.carriers,
    )
    sends += late
    events += sends
    in_flight = union((event.start, event.end) for event in sends if event.end is not None)
    waits = _waits(trace, in_flight)
    if trace.on_device:
        waits = [("device", start, end) for start, end in kernels.waits(trace.kernels, in_flight)]
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


def memory_curve(trace: Trace, unseen: Counter[tuple[int, int]] | None = None) -> list[MemoryPoint]:
    """Bytes above the start of the step after each allocation and release, from 0 at time 0, by the host's clock.

    unseen: (nanoseconds since 1970, bytes) of changes to leave out, as ``profiler.ends_without_beginning`` gives them.
    """
    unseen, changes = Counter(unseen or ()), []
    for time, change, on_device, at in trace.allocations:
        if unseen[at, change] > 0:
            unseen[at, change] -= 1
        elif on_device == trace.on_device:
            changes.append((time, change))
    changes += [(mark.start, -int(mark.name)) for mark in trace.marks.get("free", [])]
    points, held = [MemoryPoint(0.0, 0)], 0
    for time, change in sorted(changes):
        if 0 <= time <= trace.seconds:
            held += change
            points.append(MemoryPoint(time, held))
    return points
