"""What a process may use of this machine: processors, their time, and the limits that it hands on to what it starts."""

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def cores() -> int:
    """Processors that this process may run on, by its affinity and by its control group's share of processor time."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return math.ceil(min(allowed, cpu_quota()))


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), process: Path = Path("/proc/self/cgroup")) -> float:
    """Processors' worth of time that the control group allows, infinity without a limit. A container shows all of the
    machine's processors and may use a part of their time (Docker's ``--cpus``); more threads than that wait in turn.

    Looks at this process's group and those above it, in version 2 (cpu.max) and version 1 (cpu.cfs_quota_us).
    """
    try:
        lines = process.read_text().splitlines()
    except OSError:
        return math.inf
    found = [math.inf]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        base = root if not controllers else root / "cpu"
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder == root.parent:
                break
            found.append(_limit_of(folder))
    return min(found)


def _limit_of(folder: Path) -> float:
    """Processors' worth of time that one control group's folder allows."""
    try:
        if (file := folder / "cpu.max").exists():
            quota, period = file.read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if quota.strip() not in ("max", "-1") else math.inf
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf


def of_this_process() -> dict[str, Any]:
    """What a process hands on to those that it starts, beside its environment: processors, umask, niceness, limits."""
    import resource

    kinds = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    status = Path("/proc/self/status").read_text(errors="replace")
    return {
        "affinity": sorted(os.sched_getaffinity(0)),
        "umask": next((int(line.split()[1], 8) for line in status.splitlines() if line.startswith("Umask:")), 0o022),
        "nice": os.nice(0),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in kinds},
    }


def take(given: Mapping[str, Any]) -> None:
    """Give this process what ``of_this_process`` has found in another; what this one may not have stays as it is."""
    import resource

    os.umask(given["umask"])
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, given["affinity"])
    with contextlib.suppress(OSError):
        os.nice(given["nice"] - os.nice(0))
    for name, limit in given["limits"].items():
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(getattr(resource, name), tuple(limit))
