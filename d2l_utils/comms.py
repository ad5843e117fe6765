"""Collectives in a profiler trace: which launch belongs to which backend operation, and what it carries."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from d2l_utils.events import Event
from d2l_utils.traffic import sent_by_gloo, sent_on_ring

# c10d operator -> the name that torch.distributed users know. Underscores at the ends are dropped first.
_NAMES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "gather_into_tensor": "gather",
    "scatter": "scatter",
    "send": "send",
    "recv": "recv",
    "recv_any_source": "recv",
    "barrier": "barrier",
    "monitored_barrier": "barrier",
}
# Which backend operations may carry out a collective: gloo scatters what it has reduced everywhere.
_CARRIERS = {"reduce_scatter": ("reduce_scatter", "all_reduce"), "broadcast": ("broadcast", "_broadcast")}
_NCCL = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "AllToAll": "all_to_all",
    "SendRecv": "send_recv",
    "Reduce": "reduce",
}
_ITEM_BYTES = {
    "bool": 1, "unsigned char": 1, "signed char": 1, "byte": 1, "char": 1,
    "short": 2, "short int": 2, "int": 4, "long": 8, "long int": 8, "long long": 8,
    "half": 2, "bfloat16": 2, "float": 4, "double": 8,
    "complexhalf": 4, "complex<float>": 8, "complexfloat": 8, "complex<double>": 16, "complexdouble": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


class Payload(NamedTuple):
    """What a launch carries: elements of the whole tensor, bytes of one, ranks in the group; or None."""

    elements: int | None
    item: int | None
    group_size: int | None


_P2P = ("send", "recv")
_SKEW = 20e-6  # seconds by which a device's clock may seem to run ahead of the host's


def is_backend(name: str) -> bool:
    """Whether a host's record is the work of a communication backend."""
    return name.startswith("gloo:")


def is_device_backend(name: str) -> bool:
    """Whether a device's record is the work of a communication backend."""
    return re.match(r"nccl(Sym\w*)?(Dev)?Kernel", name) is not None


def match(
    launches: Iterable[tuple[Any, Any]],
    backends: Iterable[tuple[Any, Any]],
    groups: Sequence[Any],
    default_group: tuple[int, int] | None,
    rank: int,
    done_by: Sequence[float] = (),
    kernels: Sequence[Any] = (),
) -> list[Event]:
    """One event a launch, with the end that its backend operation had.

    launches, backends: pairs of a span (name, start, end, thread) and the profiler's record. On the CPU nothing in a
        trace names the pair, but a process group takes its work up in the order of the launches: each launch
        takes the first operation left that started after it, can carry it out and has its size.
    kernels: the backend's work on a device (``trace.Kernel``), which has links to the launches.
    groups: spans called "rank/size" around launches from Python; other launches are of ``default_group``.
    done_by: moments at which all earlier launches from C++ were known to be done. gloo's thread tells the waiting
        thread before the profiler, and on a busy machine may be held up between the two.
    """
    left = sorted(backends, key=lambda pair: pair[0].start)
    launches = sorted(launches, key=lambda pair: pair[0].start)
    carried = _carried([span for span, _ in launches], kernels)
    events = []
    for number, (span, record) in enumerate(launches):
        operator, name = span.name.removeprefix("c10d::").strip("_"), _name(span)
        payload = _payload(name, record)
        group = _group(span, groups)
        known = min((moment for moment in done_by if moment >= span.start), default=math.inf)
        group_rank, group_size = group or default_group or (None, payload.group_size)
        elements = payload.elements
        # The list form of reduce-scatter shows only its output, and gloo runs it as one all-reduce a rank.
        parts = group_size or 1 if operator == "reduce_scatter" else 1
        on_device = carried[number]
        mine = [] if on_device else _take(left, name, span.start, elements, parts)
        if elements is not None and operator in ("allgather", "reduce_scatter", "gather", "scatter"):
            elements = elements * group_size if group_size is not None else None
        item = payload.item or _item_bytes(mine)
        size = elements * item if elements is not None and item is not None else None
        if name == "barrier":
            size = 0
        ran = sorted(on_device, key=lambda kernel: kernel.start) or [part for part, _ in mine]
        operation = operation_of(ran[0].name) if ran else None
        events.append(
            Event(
                kind="collective",
                name=name,
                rank=rank,
                start=ran[0].start if on_device else span.start,
                end=min(max(part.end for part in ran), known if group is None else math.inf) if ran else None,
                bytes=size,
                sent_bytes=sent_on_ring(name, size, group_size),
                backend=f"{'nccl' if on_device else 'gloo'}:{operation}" if operation else None,
                backend_bytes=sent_by_gloo(operation, size, group_size, group_rank, _root(name, record))
                if operation and not on_device
                else None,
                backend_start=ran[0].start if ran else None,
                group_size=group_size,
                launch_time=span.start if on_device else None,
            )
        )
    return events


def _group(span: Any, groups: Sequence[Any]) -> tuple[int, int] | None:
    """(rank in the group, its size) from the mark around a launch."""
    for mark in groups:
        if mark.start <= span.start <= mark.end and mark.thread == span.thread:
            rank, _, size = mark.name.partition("/")
            return int(rank), int(size)
    return None


def _carried(launches: Sequence[Any], kernels: Sequence[Any]) -> dict[int, list[Any]]:
    """The backend's kernels of each launch, by the launch's number in order of start.

    A kernel belongs to the launch inside which it was launched, as the operator behind it says, or else the runtime
    call. Sends and receives of a batch share one kernel, which is launched when the batch is closed: it carries all of
    them that still have none. A kernel that nothing links takes the first launch left that it can carry out.
    """
    carried: dict[int, list[Any]] = defaultdict(list)
    names = [_name(span) for span in launches]
    unlinked = []
    for kernel in sorted(kernels, key=lambda kernel: (_launched(kernel), kernel.start)):
        operation = operation_of(kernel.name)
        around = _around(launches, kernel)
        if operation == "send_recv" and (around is None or names[around] in _P2P):
            before = _launched(kernel)
            batch = [i for i, span in enumerate(launches) if names[i] in _P2P and span.start <= before]
            numbers = {i for i in batch if not carried[i]} | ({around} if around is not None else set())
        else:
            numbers = {around} if around is not None else set()
        for number in numbers:
            carried[number].append(kernel)
        if not numbers:
            unlinked.append(kernel)
    for kernel in sorted(unlinked, key=lambda kernel: kernel.start):
        operation = operation_of(kernel.name)
        fits = [i for i, name in enumerate(names) if operation in _carriers(name) and not carried[i]]
        if fits and launches[fits[0]].start <= kernel.start + _SKEW:
            carried[fits[0]].append(kernel)
    return carried


def _launched(kernel: Any) -> float:
    return float(kernel.start + _SKEW if kernel.launched is None else kernel.launched)


def _around(launches: Sequence[Any], kernel: Any) -> int | None:
    """The number of the innermost launch inside which the host launched this kernel."""
    if kernel.operator is not None:
        at, thread = kernel.operator
    elif kernel.launched is not None:
        at, thread = kernel.launched, None
    else:
        return None
    inside = [i for i, span in enumerate(launches) if span.start <= at <= span.end and thread in (None, span.thread)]
    return inside[-1] if inside else None


def _name(span: Any) -> str:
    operator = span.name.removeprefix("c10d::").strip("_")
    return _NAMES.get(operator, operator)


def _carriers(name: str) -> tuple[str, ...]:
    """The backend operations that may carry out a collective."""
    return (*_CARRIERS.get(name, (name,)), *(("send_recv",) if name in _P2P else ()))


def _take(left: list[tuple[Any, Any]], name: str, after: float, elements: int | None, parts: int) -> list:
    """Removes and returns gloo's operations that carry out a launch: the first that fit, ``parts`` of them."""
    taken: list[tuple[Any, Any]] = []
    for pair in left:
        if pair[0].start < after or operation_of(pair[0].name) not in _carriers(name):
            continue
        shapes = _shapes(pair[1])
        # An all-gather's operation shows the input; the launch may show input or output.
        sizes = {sum(map(math.prod, shapes)), *(math.prod(shape) for shape in shapes)} if shapes else set()
        if sizes and elements is not None and name != "all_gather" and elements not in sizes:
            continue
        taken.append(pair)
        if len(taken) == parts or not pair[0].name.startswith("gloo:all_reduce"):
            break
    for pair in taken:
        left.remove(pair)
    return taken


def operation_of(name: str) -> str:
    """The operation in the words of torch.distributed, from gloo:all_reduce or ncclDevKernel_AllReduce_..."""
    if name.startswith("gloo:"):
        return name.partition(":")[2].strip("_")
    found = re.match(r"nccl(?:Sym\w*)?(?:Dev)?Kernel_([A-Za-z]+)", name)
    return _NCCL.get(found.group(1), found.group(1)) if found else name


def _payload(name: str, record: Any) -> Payload:
    """Elements as the operator's arguments show them: outputs come first, then inputs."""
    shapes, types = (
        _arguments(record),
        [kind for kind in record.dtypes() if kind in _ITEM_BYTES or "::" in kind],
    )
    item = _size_of(types[0]) if types else None
    if not shapes:
        return Payload(None, item, None)
    first = sum(map(math.prod, shapes[0]))
    second = sum(map(math.prod, shapes[1])) if len(shapes) > 1 else 0
    if name == "all_to_all":
        lists = len(shapes[1]) if len(shapes) > 1 and len(shapes[1]) > 1 else None
        return Payload(second, item, lists)
    if name == "all_gather" and first and second:
        return Payload(first, item, first // second)
    if name == "reduce_scatter" and first and second:
        return Payload(second, item, second // first)
    return Payload(first or second or None, item, None)


def _arguments(record: Any) -> list[list[list[int]]]:
    """Arguments in order, each as a list of shapes: one for a tensor, several for a list of tensors."""
    if not hasattr(record, "structured_input_shapes"):
        return [[shape] if shape else [] for shape in record.shapes()]
    return [
        shape if shape and isinstance(shape[0], (list, tuple)) else [shape] if shape else []
        for shape in record.structured_input_shapes()
    ]


def _shapes(record: Any) -> list[Sequence[int]]:
    return [shape for shape in record.shapes() if shape]


def _item_bytes(pairs: list[tuple[Any, Any]]) -> int | None:
    for _, record in pairs:
        for kind in record.dtypes():
            return _size_of(kind)
    return None


def _size_of(kind: str) -> int | None:
    return _ITEM_BYTES.get(kind.removeprefix("c10::").lower())


def _root(name: str, record: Any) -> int | None:
    """The root rank among the operator's numbers, which the profiler keeps beside the shapes."""
    if not hasattr(record, "concrete_inputs"):
        return None
    at = {"broadcast": 2, "reduce": 3, "gather": 3, "scatter": 3}.get(name)
    values = record.concrete_inputs()
    return values[at] if at is not None and len(values) > at and isinstance(values[at], int) else None
