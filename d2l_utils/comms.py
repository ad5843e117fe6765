"""Collectives in a profiler trace: which launch belongs to which backend operation, and what it carries."""

from __future__ import annotations

import math
import re
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


def is_backend(name: str) -> bool:
    """Whether a record is the work of a communication backend."""
    return name.startswith(("gloo:", "nccl:", "ncclDevKernel", "ncclKernel"))


def match(
    launches: Iterable[tuple[Any, Any]],
    backends: Iterable[tuple[Any, Any]],
    groups: Sequence[Any],
    default_group: tuple[int, int] | None,
    rank: int,
    done_by: Sequence[float] = (),
) -> list[Event]:
    """One event a launch, with the end that its backend operation had.

    launches, backends: pairs of a span (name, start, end, thread) and the profiler's record. Nothing in a
        trace names the pair, but a process group takes its work up in the order of the launches: each launch
        takes the first operation left that started after it, can carry it out and has its size.
    groups: spans called "rank/size" around launches from Python; other launches are of ``default_group``.
    done_by: moments at which all earlier launches from C++ were known to be done. gloo's thread tells the waiting
        thread before the profiler, and on a busy machine may be held up between the two.
    """
    left = sorted(backends, key=lambda pair: pair[0].start)
    events = []
    for span, record in sorted(launches, key=lambda pair: pair[0].start):
        operator = span.name.removeprefix("c10d::").strip("_")
        name = _NAMES.get(operator, operator)
        payload = _payload(name, record)
        group = _group(span, groups)
        known = min((moment for moment in done_by if moment >= span.start), default=math.inf)
        group_rank, group_size = group or default_group or (None, payload.group_size)
        elements = payload.elements
        # The list form of reduce-scatter shows only its output, and gloo runs it as one all-reduce a rank.
        parts = group_size or 1 if operator == "reduce_scatter" else 1
        mine = _take(left, name, span.start, elements, parts)
        if elements is not None and operator in ("allgather", "reduce_scatter", "gather", "scatter"):
            elements = elements * group_size if group_size is not None else None
        item = payload.item or _item_bytes(mine)
        size = elements * item if elements is not None and item is not None else None
        if name == "barrier":
            size = 0
        first = mine[0][0] if mine else None
        operation = _operation(first.name) if first else None
        on_gloo = first is not None and first.name.startswith("gloo:")
        events.append(
            Event(
                kind="collective",
                name=name,
                rank=rank,
                start=span.start if first is None or on_gloo else first.start,
                end=min(max(part.end for part, _ in mine), known if group is None else math.inf) if mine else None,
                bytes=size,
                sent_bytes=sent_on_ring(name, size, group_size),
                backend=f"{'gloo' if on_gloo else 'nccl'}:{operation}" if operation else None,
                backend_bytes=sent_by_gloo(operation, size, group_size, group_rank, _root(name, record))
                if operation and on_gloo
                else None,
                backend_start=first.start if first else None,
                group_size=group_size,
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


def _take(left: list[tuple[Any, Any]], name: str, after: float, elements: int | None, parts: int) -> list:
    """Removes and returns the operations that carry out a launch: the first that fit, ``parts`` of them."""
    carriers = (*_CARRIERS.get(name, (name,)), *(("send_recv",) if name in ("send", "recv") else ()))
    taken: list[tuple[Any, Any]] = []
    for pair in left:
        if pair[0].start < after or _operation(pair[0].name) not in carriers:
            continue
        shapes = [] if pair[0].name.startswith("nccl") else _shapes(pair[1])
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


def _operation(name: str) -> str:
    """The operation in the words of torch.distributed, from gloo:all_reduce or ncclDevKernel_AllReduce_..."""
    if ":" in name and not name.startswith("ncclDev"):
        return name.partition(":")[2].strip("_")
    found = re.match(r"nccl(?:Dev)?Kernel_([A-Za-z]+)", name)
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
    for span, record in pairs:
        for kind in record.dtypes() if span.name.startswith("gloo:") else []:
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
