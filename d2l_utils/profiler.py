"""torch.profiler as this package uses it: one at a time in a process, warmed up, asked for the device's work too.

Kineto has one profiler a process and says nothing when a second one starts: the first one's records are lost.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from d2l_utils.device import rank_device

RUNNING = "a profiler is already running here: a process has one at a time"
_STARTS = ("_prepare_profiler", "_enable_profiler", "_enable_profiler_legacy")
_warm: set[str] = set()  # device types whose profiler this process has used


def check_none_runs() -> None:
    """Raises RuntimeError when a profiler of any kind runs in this process."""
    if torch.autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled:
        raise RuntimeError(RUNNING)


@contextlib.contextmanager
def profiling(device: torch.device, *, shapes: bool = False, memory: bool = False) -> Iterator[Any]:
    """Gives a ``torch.profiler.profile`` that runs in the ``with`` block, in which no other can start.

    device: what the work runs on; its activity is recorded beside the CPU's.
    Raises RuntimeError when a profiler runs already, and inside the block from another one's start.
    """
    check_none_runs()
    _warm_up(device)
    with contextlib.ExitStack() as clean_up:
        profile = clean_up.enter_context(_profile(device, shapes, memory))
        for module in (torch.autograd.profiler, getattr(torch.autograd, "profiler_legacy", None)):
            for name in _STARTS:
                if (start := getattr(module, name, None)) is not None:
                    setattr(module, name, _refuse)
                    clean_up.callback(setattr, module, name, start)
        yield profile


def default_device() -> torch.device:
    """This rank's device; outside a rank the CPU, so that nothing touches an accelerator by itself."""
    in_a_rank = "D2L_DEVICE_TYPE" in os.environ or "LOCAL_RANK" in os.environ
    return rank_device() if in_a_rank else torch.device("cpu")


def ends_without_beginning(profile: Any) -> Counter[tuple[int, int]]:
    """Releases on the CPU of memory whose allocation this profile does not hold, as (nanoseconds since 1970, bytes < 0).

    The profiler reports the end of whatever any profile of this process saw come, an earlier one's too, and of nothing
    else: what it tells of older memory depends on what was recorded before.
    """
    changes, nodes = [], list(profile.profiler.kineto_results.experimental_event_tree())  # only this has addresses
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if node.name == "[memory]" and node.extra_fields.device.type == "cpu":
            changes.append((node.start_time_ns, node.extra_fields.alloc_size, node.extra_fields.ptr))
    return unmatched(changes)


def unmatched(changes: Iterable[tuple[int, int, int]]) -> Counter[tuple[int, int]]:
    """The (time, bytes) of releases among (time, bytes, address) that follow no allocation at their address."""
    alive: set[int] = set()
    unseen: Counter[tuple[int, int]] = Counter()
    for time, change, address in sorted(changes, key=lambda one: one[0]):
        if change > 0:
            alive.add(address)
        elif address in alive:
            alive.remove(address)
        else:
            unseen[time, change] += 1
    return unseen


def _refuse(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError(RUNNING)


def _profile(device: torch.device, shapes: bool, memory: bool) -> Any:
    # Kineto reads it when the first profile of the process starts; up to level 5 it reports its stages on stderr.
    os.environ["KINETO_LOG_LEVEL"] = "99"
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if device.type != "cpu":
        activities.append(getattr(ProfilerActivity, device.type.upper(), ProfilerActivity.PrivateUse1))
    return profile(activities=activities, record_shapes=shapes, profile_memory=memory)


def _warm_up(device: torch.device) -> None:
    """The first profile of a device's work starts the device's own profiler, which takes seconds."""
    if device.type == "cpu" or device.type in _warm:
        return
    _warm.add(device.type)
    with _profile(device, False, False):
        torch.ones(1, device=device).add_(1)
        torch.accelerator.synchronize(device)
