"""A step on an accelerator: kernels, the operators behind them, and where the device waited.

The host's records say when work was launched, the device's when it ran. Two kinds of numbers link them. A kernel and the
runtime call that launched it (``cudaLaunchKernel``) have the same ``correlation_id``, the device library's. The kernel's
``linked_correlation_id`` is that of the operator around the call, which is torch's. Both count from 1, so they must not be
looked up in one table.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from d2l_utils.events import Event, Interval, difference, union

if TYPE_CHECKING:
    from d2l_utils.trace import Span

OPERATORS = ("cpu_op", "user_annotation")  # activity types whose correlation ids are torch's
_LAUNCH_GAP = 50e-6  # seconds: less than that between two kernels is what launching takes, not a wait
_CALL = re.compile(r"(cuda|cu|hip|ze|ur)[A-Z]")


class Kernel(NamedTuple):
    """Work of the device, in seconds from the start of the step.

    operator: start and thread of the operator behind it. launched: when the host launched it. None where no record tells.
    """

    name: str
    start: float
    end: float
    operator: tuple[float, int] | None
    launched: float | None


def activity(record: Any) -> str:
    """What kind of record it is, in Kineto's words. A torch whose records do not tell (2.11) links runtime calls to
    operators, and operators to nothing."""
    if told := getattr(record, "activity_type", str)():
        return str(told)
    if record.device_type().name != "CPU":
        return "gpu_user_annotation" if record.is_user_annotation() else "kernel"
    if record.linked_correlation_id() or _CALL.match(record.name()):
        return "cuda_runtime"
    return "user_annotation" if record.is_user_annotation() else "cpu_op"


def on_device(spans: Iterable[tuple[str, Span]], kernels: Iterable[Kernel], rank: int) -> list[Event]:
    """The host's (kind, span) as events of the device, each from its first kernel's start to its last one's end; a span
    that started no kernel is left out."""
    by_thread: dict[int, list[tuple[float, Kernel]]] = defaultdict(list)
    for kernel in kernels:
        if kernel.operator is not None:
            by_thread[kernel.operator[1]].append((kernel.operator[0], kernel))
    for pairs in by_thread.values():
        pairs.sort(key=lambda pair: pair[0])
    events = []
    for kind, span in spans:
        pairs = by_thread[span.thread]
        first = bisect_left(pairs, span.start, key=lambda pair: pair[0])
        last = bisect_right(pairs, span.end, key=lambda pair: pair[0])
        if mine := [kernel for _, kernel in pairs[first:last]]:
            start, end = min(kernel.start for kernel in mine), max(kernel.end for kernel in mine)
            events.append(Event(kind, span.name, rank, start, end, launch_time=span.start))
    return events


def waits(kernels: Iterable[Kernel], in_flight: list[Interval]) -> list[Interval]:
    """Where a collective was in flight and the next kernel, launched by the host, could not run.

    Before the host has launched it the device is idle: it would be so without the collective too. The short gap between
    a kernel and the next is what launching takes.
    """
    busy: list[Interval] = []
    end = 0.0
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        if kernel.start > end:
            idle_until = end if kernel.launched is None else min(kernel.launched, kernel.start)
            busy.append((end, kernel.start if kernel.start - end < _LAUNCH_GAP else idle_until))
        busy.append((kernel.start, kernel.end))
        end = max(end, kernel.end)
    return difference(in_flight, union(busy))
