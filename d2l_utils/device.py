"""Which device type and backend N ranks use on this machine, and why.

    >>> print(choose(4))
    4 ranks on CPU with gloo: no GPU found

Nothing here initialises an accelerator in the calling process, and choosing imports no torch. What torch can really
use is asked by a process of its own, once (``usable_devices``): the driver's own count holds devices that this torch
has no kernels for, that a driver is too old for, or that another process keeps for itself.

Environment
-----------
D2L_DEVICE         ``cpu`` keeps the ranks off the accelerators. ``cuda``, ``xpu``, ... is a preference: where that
                   type cannot serve, the ranks run on the CPU, and the reason is said.
D2L_DEVICE_STRICT  ``1`` makes D2L_DEVICE a demand: where its type cannot serve, there is an error. ``0`` is the default.
D2L_WORLD_SIZE     the default number of ranks.
D2L_DEVICE_TYPE    set by ``launch`` for its ranks: the type it chose.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import operator
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MAX_WORLD_SIZE = 64
DEFAULT_WORLD_SIZE = 4
BATCH = 24  # the batch of most lessons: a default world size divides it
PROBE_SECONDS = 90.0

# What a driver leaves where a program can find it, by platform: its library, or its device files.
_DRIVER_LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/nvhost-ctrl", "/dev/dxg", "/dev/kfd")
_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")  # others are asked of torch

_largest = 0  # ranks of this lesson's largest launch, where its first cell has said it: see `keep_one_device`


@dataclass(frozen=True)
class Devices:
    """The accelerators of this machine that torch can use.

    type    : their device type, such as ``"cuda"``; None where there are none.
    count   : how many, counted from number 0 without a gap.
    backend : the name of the backend for their tensors, such as ``"nccl"``.
    reason  : what was found, in a few words; where ``type`` is None, why there are none.
    """

    type: str | None
    count: int
    backend: str
    reason: str


@dataclass(frozen=True)
class Choice:
    """What N ranks run on. ``str`` is one line, for a reader.

    device_type : ``"cpu"`` or an accelerator's type, such as ``"cuda"``.
    backend     : the backend of that device's tensors.
    world_size  : the number of ranks, over all nodes.
    reason      : why this and not another, in a few words.
    falls_back  : whether the ranks run on the CPU although this machine has accelerators, or some were preferred.
    """

    device_type: str
    backend: str
    world_size: int
    reason: str
    falls_back: bool = False

    def __str__(self) -> str:
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        where = "CPU" if self.device_type == "cpu" else self.device_type
        return f"{ranks} on {where} with {self.backend}: {self.reason}"


def check_world_size(value: object = None, name: str = "world_size") -> int:
    """``value`` as a number of ranks; ``None`` means the default of ``default_world_size``. Never imports torch.

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
    """The number of ranks a lesson takes when it is not told: ``D2L_WORLD_SIZE`` if set; else, with two accelerators or
    more, the largest number of them that divides the lessons' batch of 24; else 4.

    Raises ValueError when D2L_WORLD_SIZE is not a whole number from 1 to 64.
    """
    text = os.environ.get("D2L_WORLD_SIZE", "").strip()
    if text:
        # isdecimal alone takes other scripts' digits; int() takes "1_0" and has its own words for long ones
        given = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else text
        return check_world_size(given, "D2L_WORLD_SIZE")
    if preferred_type() == "cpu":
        return DEFAULT_WORLD_SIZE
    count = usable_devices().count
    if count < max(2, _largest):
        return DEFAULT_WORLD_SIZE
    return max(divisor for divisor in range(1, BATCH + 1) if BATCH % divisor == 0 and divisor <= count)


def keep_one_device(largest: int) -> None:
    """From here on this process launches on accelerators only if there are at least ``largest`` of them.

    A lesson that compares launches of 1, 2 and 4 ranks then never compares a GPU with a CPU. Its first cell says how
    many ranks its largest launch has; 0 decides for each launch by itself. Raises ValueError as ``check_world_size``.
    """
    global _largest
    _largest = check_world_size(largest, "largest") if largest else 0


def choose(world_size: int | None = None, nodes: int = 1, device: str | None = None) -> Choice:
    """The device type and backend for ``world_size`` ranks on this host, as a value that prints as one line.

    An accelerator is chosen when this host has one for each rank; otherwise the CPU with gloo. ``nodes`` > 1 means
    nodes that are simulated on this host: two ranks then share a local rank, and with it a device, so they run on the
    CPU. ``device`` names the type and goes before D2L_DEVICE: ``"cpu"``, or a type that must serve.

    Raises ValueError for a bad ``world_size``, ``nodes`` or ``device``, and when a type that must serve cannot.
    """
    n = check_world_size(world_size)
    nodes = check_world_size(nodes, "nodes")
    source = "D2L_DEVICE" if device is None else "device"
    wanted = preferred_type() if device is None else check_type(device, "device")
    if wanted == "cpu":
        return Choice("cpu", "gloo", n, f"{source}=cpu" + _held_by_this_process())
    found = usable_devices()
    obstacle = _obstacle(found, n, nodes, wanted, 0 if device else _largest)
    if obstacle and wanted and (device or _is_strict()):
        raise ValueError(
            f"{source} is {wanted!r}, which cannot serve world_size={n}: {obstacle}; allowed is 'cpu', or a type that can"
        )
    if obstacle:
        why = f"D2L_DEVICE={wanted} cannot serve, {obstacle}" if wanted else obstacle
        return Choice("cpu", "gloo", n, why + _held_by_this_process(), falls_back=bool(found.count or wanted))
    why = f"{source}={wanted}, {found.reason}" if wanted else found.reason
    return Choice(str(found.type), found.backend, n, why + _held_by_this_process())


def _obstacle(found: Devices, n: int, nodes: int, wanted: str | None, largest: int) -> str:
    """Why ``n`` ranks cannot use the accelerators that were found; "" when they can."""
    if found.type is None or not found.count:
        return found.reason
    if wanted not in (None, found.type):
        return f"this machine has {found.type}"
    counted = f"{found.count} {found.type} device{'s' * (found.count != 1)} found"
    if found.count < n:
        return f"{counted}, {n} needed"
    if found.count < largest:
        return f"{counted}, and this lesson launches up to {largest} ranks"
    if nodes > 1:
        return f"{nodes} simulated nodes would share {found.type} devices"
    return ""


def rank_device() -> torch.device:
    """This rank's ``torch.device``: ``cpu``, or the accelerator whose index is LOCAL_RANK.

    Under ``launch`` the type is the one it chose. Under plain torchrun, on one node or many, it is the machine's
    accelerator where there is one for each rank of this node. Outside both it is the device of a single rank.

    Raises ValueError where D2L_DEVICE_STRICT is 1 and the type that D2L_DEVICE names cannot serve.
    """
    import torch

    kind = os.environ.get("D2L_DEVICE_TYPE", "").strip()
    if not kind and "LOCAL_RANK" in os.environ:
        # A rank need not ask another process: it is going to use the device.
        needed, wanted = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), preferred_type()
        here = Devices(None, 0, "", "D2L_DEVICE=cpu") if wanted == "cpu" else visible_devices()
        obstacle = _obstacle(here, needed, 1, wanted, 0)
        if obstacle and wanted not in (None, "cpu") and _is_strict():
            raise ValueError(
                f"D2L_DEVICE is {wanted!r}, which cannot serve the {needed} ranks of this node: {obstacle}"
            )
        kind = "cpu" if obstacle else str(here.type)
    kind = kind or choose(1).device_type
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))


def _is_strict() -> bool:
    """D2L_DEVICE_STRICT. ValueError when it is neither 0 nor 1."""
    text = os.environ.get("D2L_DEVICE_STRICT", "").strip()
    if text not in ("", "0", "1"):
        raise ValueError(f"D2L_DEVICE_STRICT is {text!r}: allowed are 0 and 1")
    return text == "1"


def preferred_type() -> str | None:
    """D2L_DEVICE in lower case, or None where it is not set. ValueError when it names no device type."""
    text = os.environ.get("D2L_DEVICE", "").strip()
    return check_type(text, "D2L_DEVICE") if text else None


def check_type(value: object, name: str) -> str:
    """``value`` as a device type in lower case. ValueError when it is none."""
    text = value.strip().lower() if isinstance(value, str) else ""
    known = text in _TYPES
    if not known and re.fullmatch(r"[a-z]\w*", text, re.ASCII):
        import torch

        try:
            device = torch.device(text)
            known = device.index is None and device.type not in ("meta", "mkldnn", "opengl", "fpga")
        except RuntimeError:
            known = False
    if not known:
        raise ValueError(f"{name} is {value!r}: it must be a device type without a number, such as cpu or cuda")
    return text


def usable_devices() -> Devices:
    """The accelerators that torch can use on this machine, asked once by a process of its own.

    It makes a tensor on each device. Where there is no trace of a driver nothing is asked. The answer holds as long as
    the variables that hide devices stay as they are. Apple's MPS counts as none: it is one device, and gloo cannot
    reach it.
    """
    if not driver_found():
        return Devices(None, 0, "", "no GPU found")
    view = tuple(os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"))
    if view not in _answers:
        try:
            _answers[view] = _ask_process()
        except _NoAnswer as error:  # it is asked again the next time: the machine may have been busy
            return Devices(None, 0, "", str(error))
    return _answers[view]


class _NoAnswer(Exception):
    """The process that was asked for devices did not say any; the text says why."""


_answers: dict[tuple[str | None, ...], Devices] = {}  # by the variables that an answer depends on


def driver_found() -> bool:
    """Whether this machine shows any trace of an accelerator's driver. Loads a library at most; asks no driver."""
    # Intel's device files are there on most laptops, and of use to a torch that was built for them only.
    if sys.platform != "linux" or "+xpu" in importlib.metadata.version("torch"):
        return True
    return any(os.path.exists(file) for file in _DRIVER_FILES) or any(_loads(name) for name in _DRIVER_LIBRARIES)


@functools.cache
def _loads(library: str) -> bool:
    import ctypes

    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _ask_process() -> Devices:
    """The answer of a fresh process that runs this file. _NoAnswer where it gives none."""
    command = [sys.executable, "-P", os.path.abspath(__file__)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
        )
        return Devices(**json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        raise _NoAnswer(f"torch has not said within {PROBE_SECONDS:.0f} s which GPUs it can use") from None
    except (OSError, IndexError, ValueError) as error:
        raise _NoAnswer(f"torch cannot be asked for GPUs ({type(error).__name__})") from error


def visible_devices() -> Devices:
    """What torch counts in this very process, without using a device. For a rank; it may initialise the driver."""
    import torch
    import torch.distributed as dist

    accelerator = torch.accelerator.current_accelerator()  # the compiled-in type: touches no device
    if accelerator is None:
        return Devices(None, 0, "", "no GPU found")
    kind = accelerator.type
    if kind == "mps":
        return Devices(None, 0, "", "Apple's MPS has no backend for several ranks")
    count = torch.accelerator.device_count()
    if not count:
        return Devices(None, 0, "", "no GPU found")
    try:
        backend = dist.get_default_backend_for_device(kind)
    except ValueError:
        return Devices(None, 0, "", f"torch names no backend for {kind}")
    if not dist.is_backend_available(backend):
        return Devices(None, 0, "", f"this torch has no {backend} for {kind}")
    return Devices(kind, count, backend, f"{count} device{'s' * (count != 1)} found")


def ask_torch() -> Devices:
    """Those of ``visible_devices`` that can make a tensor and add to it. Runs in the process that ``usable_devices`` starts."""
    import torch

    found = visible_devices()
    for index in range(found.count):
        try:
            (torch.ones(1, device=f"{found.type}:{index}") + 1).item()
        except (RuntimeError, AssertionError) as error:
            words = str(error).strip().splitlines() or [type(error).__name__]
            why = f"torch cannot use {found.type}:{index} of {found.count}, {words[0].partition('. ')[0][:200].rstrip('.')}"
            if index == 0:
                return Devices(None, 0, "", why)
            usable = f"{index} device{'s' * (index != 1)} found"
            return Devices(found.type, index, found.backend, f"{usable}; {why}")
    return found


def _held_by_this_process() -> str:
    """A remark when this process itself keeps accelerator memory that its ranks would miss, else nothing."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda") or not torch.cuda.is_initialized():
        return ""
    held = sum(torch.cuda.memory_reserved(i) for i in range(torch.cuda.device_count()))
    return f" (this process itself holds {held / 2**20:.0f} MiB of GPU memory)" if held else ""


if __name__ == "__main__":
    print(json.dumps(asdict(ask_torch())))
