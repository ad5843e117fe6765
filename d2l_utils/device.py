"""Which device type and backend N ranks use on this machine, and why.

    >>> print(choose(4))
    4 ranks on CPU with gloo: no GPU found

Nothing here initialises an accelerator in the calling process: devices are counted through the driver's
management library (NVML on NVIDIA), which creates no context. torch is imported only when a question needs
it.

Environment
-----------
D2L_DEVICE        ``cpu``, ``cuda``, ``xpu``, ...: forces the device type.
D2L_WORLD_SIZE    the default number of ranks.
D2L_DEVICE_TYPE   set by ``launch`` for its ranks: the type it chose.
"""

from __future__ import annotations

import operator
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MAX_WORLD_SIZE = 64
DEFAULT_WORLD_SIZE = 4


@dataclass(frozen=True)
class Choice:
    """What N ranks run on. ``str`` is one line, for a reader.

    device_type : ``"cpu"`` or an accelerator's type, such as ``"cuda"``.
    backend     : the name to give ``init_process_group``.
    world_size  : the number of ranks, over all nodes.
    reason      : why this and not another, in a few words.
    """

    device_type: str
    backend: str
    world_size: int
    reason: str

    def __str__(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        where = "CPU" if self.device_type == "cpu" else self.device_type
        return f"{ranks} on {where} with {self.backend}: {self.reason}"


def check_world_size(value: object = None, name: str = "world_size") -> int:
    """``value`` as a number of ranks; ``None`` means the default of ``default_world_size``. Never imports
    torch for a given value.

    Raises ValueError for anything but a whole number from 1 to 64: zero, negatives, fractions, strings,
    booleans.
    """
    if value is None:
        return default_world_size()
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or not 1 <= number <= MAX_WORLD_SIZE:
        raise ValueError(f"{name} is {value!r}: it must be a whole number from 1 to {MAX_WORLD_SIZE}")
    return number


def default_world_size() -> int:
    """The number of ranks a lesson takes when it is not told: ``D2L_WORLD_SIZE`` if set, else one rank for
    each accelerator if there are at least two, else 4.

    Raises ValueError when D2L_WORLD_SIZE is not a whole number from 1 to 64.
    """
    text = os.environ.get("D2L_WORLD_SIZE", "").strip()
    if text:
        # isdecimal alone takes other scripts' digits; int() takes "1_0" and has its own words for long ones
        given = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else text
        return check_world_size(given, "D2L_WORLD_SIZE")
    if _forced() == "cpu":
        return DEFAULT_WORLD_SIZE
    count = _accelerators()[1]
    return min(count, MAX_WORLD_SIZE) if count >= 2 else DEFAULT_WORLD_SIZE


def choose(world_size: int | None = None, nodes: int = 1) -> Choice:
    """The device type and backend for ``world_size`` ranks on this host, as a value that prints as one line.

    An accelerator is chosen when this host has one for each rank; otherwise the CPU with gloo. ``nodes`` >
    1 means nodes that are simulated on this host: two ranks then share a local rank, and with it a device,
    so they run on the CPU.

    Raises ValueError for a bad ``world_size`` or ``nodes``, and when ``D2L_DEVICE`` names a type that cannot
    serve these ranks.
    """
    n = check_world_size(world_size)
    nodes = check_world_size(nodes, "nodes")
    forced = _forced()
    if forced == "cpu":
        return Choice("cpu", "gloo", n, "D2L_DEVICE=cpu" + _held_by_this_process())
    kind, count = _accelerators()
    backend, obstacle = _obstacle(kind, count, n, nodes)
    if forced is not None:
        if forced != kind:
            obstacle = "no GPU found" if kind is None else f"this machine has {kind}"
            if forced == "mps" or _mps_available():
                obstacle = "Apple's MPS has no backend for several ranks"
        if obstacle:
            raise ValueError(
                f"D2L_DEVICE={forced} cannot serve world_size={n}: {obstacle}; unset it or use D2L_DEVICE=cpu"
            )
    if obstacle:
        return Choice("cpu", "gloo", n, obstacle + _held_by_this_process())
    found = "1 device" if count == 1 else f"{count} devices"
    why = f"D2L_DEVICE={forced}, {found} found" if forced else f"{found} found"
    return Choice(str(kind), backend, n, why + _held_by_this_process())


def rank_device() -> torch.device:
    """This rank's ``torch.device``: ``cpu``, or the accelerator whose index is LOCAL_RANK.

    Under ``launch`` the type is the one it chose. Under plain torchrun, on one node or many, it is what
    ``choose`` says for the ranks of this node. Outside both it is the device of a single rank.
    """
    import torch

    kind = os.environ.get("D2L_DEVICE_TYPE", "").strip()
    if not kind:
        kind = choose(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))).device_type
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))


def _forced() -> str | None:
    """D2L_DEVICE in lower case, or None. ValueError when it names no device type."""
    text = os.environ.get("D2L_DEVICE", "").strip().lower()
    if text in ("", "cpu"):
        return text or None
    import torch

    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.index is not None or device.type in ("meta", "mkldnn", "opengl", "fpga"):
        raise ValueError(
            f"D2L_DEVICE is {os.environ['D2L_DEVICE']!r}: "
            "it must be a device type without a number, such as cpu or cuda"
        )
    return device.type


def _accelerators() -> tuple[str | None, int]:
    """The type of this machine's accelerator and how many there are; (None, 0) where there is none.

    Apple's MPS counts as none: it is one device and gloo cannot reach it.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator()  # the compiled-in type: touches no device
    if accelerator is None or accelerator.type == "mps":
        return None, 0
    count = torch.accelerator.device_count()
    return (accelerator.type, count) if count else (None, 0)


def _mps_available() -> bool:
    import torch

    return bool(torch.backends.mps.is_available())


def _obstacle(kind: str | None, count: int, n: int, nodes: int) -> tuple[str, str]:
    """(backend, why N ranks cannot use the accelerator); the second is empty when they can."""
    import torch.distributed as dist

    if kind is None:
        return "", "Apple's MPS has no backend for several ranks" if _mps_available() else "no GPU found"
    if count < n:
        return "", f"{count} {kind} device{'s' * (count != 1)} found, {n} needed"
    if nodes > 1:
        return "", f"{nodes} simulated nodes would share {kind} devices"
    try:
        backend = dist.get_default_backend_for_device(kind)
    except ValueError:
        return "", f"torch names no backend for {kind}"
    if not dist.is_backend_available(backend):
        return "", f"this torch has no {backend} for {kind}"
    return backend, ""


def _held_by_this_process() -> str:
    """A remark when this process itself keeps accelerator memory that its ranks would miss, else nothing."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return ""
    held = sum(torch.cuda.memory_reserved(i) for i in range(torch.cuda.device_count()))
    return f" (this process itself holds {held / 2**20:.0f} MiB of GPU memory)" if held else ""
