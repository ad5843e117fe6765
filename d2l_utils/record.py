"""Records one training step of one rank: what it computed, what it communicated, and what memory it took.

    with record(model, optimizer, allocations=True) as recording:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
    recording.events, recording.memory, recording.peak

Everything comes from ``torch.profiler``, whose records of one step ``trace`` turns into events. What it lacks is added
as marks on its own clock (``marks``): where a block's forward begins and ends, and where Python waits for a collective.
The model's graph is not touched, so the step computes the same numbers bit by bit.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from d2l_utils import marks, throttle, trace, wire
from d2l_utils.events import Recording
from d2l_utils.holdings import Further, Holdings

__all__ = ["Recording", "record"]

# Wrappers whose inner module is what a reader calls the block or the model.
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


@contextlib.contextmanager
def record(
    model: nn.Module,
    optimizer: Any = None,
    allocations: bool = False,
    *,
    blocks: Mapping[str, nn.Module] | None = None,
    holdings: bool | Further = False,
    enabled: bool = True,
) -> Iterator[Recording]:
    """Records what this rank does inside the ``with`` block, which should be one training step.

    Arguments:
        model: the module that is trained, wrapped (DDP, FSDP) or not.
        optimizer: only needed where it is not a ``torch.optim.Optimizer``: its ``step`` is then marked.
        allocations: record the memory curve and the peak too; it costs more time. Of memory that is older than the
            step, releases are seen of parameters, buffers, gradients and optimizer states. PyTorch prints a warning
            about such releases unless TORCH_CPP_LOG_LEVEL=ERROR was set before its import, as ``launch`` does.
        blocks: name -> module, the units of ``forward`` and ``backward`` events. Default: ``default_blocks(model)``.
        holdings: record what this rank holds of each block at each moment, and which blocks each collective works for.
            A sample costs about a millisecond for a hundred parameters, so these steps are for looking, not for
            timing. A function gives further (kind, block, tensor) to count: see ``d2l_utils.holdings``.
        enabled: False records nothing and costs nothing, so that a loop can record chosen steps only.

    The recording is filled when the block ends without an exception; hooks and marks are removed in any case.
    Raises RuntimeError if a profiler is already running in this process, TypeError for wrong arguments.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model={model!r}: a torch.nn.Module is needed")
    recording = Recording()
    if dist.is_available() and dist.is_initialized():
        recording.rank, recording.world_size = dist.get_rank(), dist.get_world_size()
    if not enabled:
        yield recording
        return
    units = default_blocks(model) if blocks is None else dict(blocks)
    if wrong := [name for name, module in units.items() if not isinstance(module, nn.Module)]:
        raise TypeError(f"blocks[{wrong[0]!r}]={units[wrong[0]]!r}: a torch.nn.Module is needed")
    if torch.autograd._profiler_enabled():
        raise RuntimeError("a profiler is already running here: a step can be recorded once at a time")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    on_device = device.type == "cuda"
    profiler = _profiler(on_device, allocations)
    with contextlib.ExitStack() as clean_up:
        hung = marks.Marks(clean_up)
        hung.blocks(units)
        hung.end_of_backward(model)
        hung.calls()
        hung.optimizer(optimizer)
        watch = None
        if holdings:
            watch = Holdings(model, optimizer, units, hung, holdings if callable(holdings) else None, _unwrap)
        if watch is not None:
            watch.hang(clean_up)
            hung.watch = watch
        if allocations and not on_device:
            hung.releases(model, optimizer)
        if on_device:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device)
        before = wire.bytes_sent()
        if allocations:
            gc.collect()  # what an earlier recording saw allocated would be seen to go in this one
        profiler.__enter__()
        clean_up.callback(profiler.__exit__, None, None, None)
        clean_up.callback(hung.close)
        with hung.mark("step"):
            if watch is not None:
                watch.sample("start")
            yield recording
            if watch is not None:
                watch.sample("end")
            if on_device:
                torch.cuda.synchronize(device)
        recording.wire_bytes = wire.since(before)
    found = trace.Trace(profiler.profiler.kineto_results.events(), on_device)
    recording.seconds = found.seconds
    recording.began = found.began
    ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    # the profiler does not see what a throttle's own thread begins
    late = throttle.recorded(recording.rank, found.began, found.seconds)
    recording.events = trace.read(found, recording.rank, _default_group(model), ddp, late)
    if watch is not None:
        recording.holdings = watch.read(found)
        recording.events = watch.assign(found, recording.events)
    if allocations:
        recording.memory = trace.memory_curve(found)
        recording.peak = max(point.bytes for point in recording.memory)
    if on_device:
        recording.peak = torch.cuda.max_memory_allocated(device) - held


def default_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The units that a reader would name: members of the outermost ``ModuleList``s, and the modules beside them.

    A Transformer gives ``tokens``, ``positions``, ``blocks.0``, ``blocks.1``, ..., ``head``; a model without lists its
    children; one without children itself, as ``model``. Wrappers (DDP, FSDP1, checkpoint, compile) are looked through.
    """
    inner = _unwrap(model)
    units: dict[str, nn.Module] = {}

    def walk(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            child, here = _unwrap(child), f"{path}{name}"
            if isinstance(child, nn.ModuleList):
                units.update({f"{here}.{index}": _unwrap(member) for index, member in enumerate(child)})
            elif any(isinstance(part, nn.ModuleList) for part in child.modules()):
                walk(child, f"{here}.")
            else:
                units[here] = child

    walk(inner, "")
    return units or {"model": inner}


def _unwrap(module: nn.Module) -> nn.Module:
    children = module._modules
    if list(children) == ["module"] and children["module"] is not None:  # as DDP calls what it wraps, and others do
        return _unwrap(children["module"])
    for name in _WRAPPERS:
        if name in module._modules or name in module.__dict__:
            return _unwrap(getattr(module, name))
    return module


def _profiler(on_device: bool, allocations: bool) -> Any:
    # Kineto reads it when the first profile of the process starts; up to level 5 it reports its stages on stderr.
    os.environ["KINETO_LOG_LEVEL"] = "99"
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_device
    # Shapes are where the bytes of a collective are found.
    return profile(activities=activities, record_shapes=True, profile_memory=allocations)


def _default_group(model: nn.Module) -> tuple[int, int] | None:
    """(rank, size) in the group of collectives that C++ launches: DDP's, else the only one that there is."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.process_group.rank(), model.process_group.size()
    groups = {(group.rank(), group.size()) for group in dist.distributed_c10d._world.pg_map if group.rank() >= 0}
    return groups.pop() if len(groups) == 1 else None
