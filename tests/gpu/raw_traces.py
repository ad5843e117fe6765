"""The profiler's records of one step as plain rows: what they say by themselves, and files of them for tests without a GPU.

Nothing here uses the chapter's own reading of a trace, which is held against it. Needs no torch.
"""

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Span = tuple[float, float]  # nanoseconds


def rows(records: Iterable[Any]) -> list[Row]:
    """One row a record of Kineto, in the form that tests/unit/traces.py reads."""
    return [
        {
            "name": record.name(),
            "start": record.start_ns(),
            "length": record.duration_ns(),
            "device": record.device_type().name,
            "id": record.correlation_id(),
            "from": record.linked_correlation_id(),
            "thread": record.start_thread_id(),
            "sequence": record.sequence_nr(),
            "scope": record.scope(),
            "annotation": record.is_user_annotation(),
            "activity": getattr(record, "activity_type", str)(),
            "shapes": record.shapes(),
            "types": record.dtypes(),
            "structured": getattr(record, "structured_input_shapes", lambda: None)(),
            "bytes": record.nbytes(),
            "index": record.device_index(),
            "stream": record.device_resource_id(),
        }
        for record in records
    ]


def write(folder: str | Path, name: str, about: str, records: Sequence[Row]) -> Path:
    """Stores rows as FOLDER/NAME.json.gz, the form of the fixtures of traces."""
    path = Path(folder) / f"{name}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"made_by_hand": False, "about": about, "records": list(records)}, file)
    return path


def covered(spans: Iterable[Span], gap: float = 0) -> float:
    """The length of the union of intervals; what lies between two that are at most `gap` apart counts too."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        begin = end if start - end <= gap else max(start, end)
        total += max(0.0, stop - begin)
        end = max(end, stop)
    return total


def overlap(one: Sequence[Span], other: Sequence[Span]) -> float:
    """The length of what two sets of intervals share."""
    return covered(one) + covered(other) - covered([*one, *other])


def closed(spans: Iterable[Span], gap: float) -> list[Span]:
    """The same intervals, with gaps of at most `gap` between them filled."""
    filled: list[Span] = []
    for start, stop in sorted(spans):
        if filled and start - filled[-1][1] <= gap:
            filled[-1] = (filled[-1][0], max(stop, filled[-1][1]))
        else:
            filled.append((start, stop))
    return filled


def kernels(records: Iterable[Row]) -> list[Row]:
    """What ran on a device: neither allocations nor the device's copies of the host's annotations."""
    return [
        row
        for row in records
        if row["device"] != "CPU" and row["name"] != "[memory]" and not row["annotation"]
        and row["activity"] != "gpu_user_annotation"
    ]  # fmt: skip


def is_communication(row: Row) -> bool:
    """Whether a kernel is NCCL's own (RCCL's have the same names)."""
    return row["name"].startswith(("ncclDev", "ncclKernel"))


def spans(records: Iterable[Row]) -> list[Span]:
    return [(row["start"], row["start"] + row["length"]) for row in records]


def launches(records: Iterable[Row]) -> int:
    """How many collectives the host asked for."""
    return sum(row["name"].startswith("c10d::") for row in records)
