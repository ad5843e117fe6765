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
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from d2l_utils import marks, memory, profiler, throttle, trace, wire
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
        allocations: record the memory curve and the peak too; it costs more time. On the CPU, of memory that is older
            than the step, releases are seen of parameters, buffers, gradients and optimizer states only, and what
            other threads than this one and backward's allocate is not seen. PyTorch prints a warning about such
            releases unless TORCH_CPP_LOG_LEVEL=ERROR was set before its import, as ``launch`` does. On an accelerator
            the allocator tells all of it.
        blocks: name -> module, the units of ``forward`` and ``backward`` events. Default: ``default_blocks(model)``.
        holdings: record what this rank holds of each block at each moment, and which blocks each collective works for.
            A sample costs about a millisecond for a hundred parameters, so these steps are for looking, not for
            timing. A function gives further (kind, block, tensor) to count: see ``d2l_utils.holdings``.
        enabled: False records nothing and costs nothing, so that a loop can record chosen steps only.

    The recording is filled when the block ends without an exception; hooks and marks are removed in any case.
    Raises RuntimeError if a profiler is already running in this process, or another one starts inside the block;
    TypeError for wrong arguments.
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
    profiler.check_none_runs()
    rank_device = profiler.default_device()
    device = next((p.device for p in model.parameters() if not p.is_meta), rank_device)
    on_device = device.type != "cpu"
    # A rank on a device always records it: a process whose first profile was the CPU's alone may see no kernels later.
    profiled = device if on_device else rank_device
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
        if allocations or on_device:
            gc.collect()  # garbage that went inside the step would make its peak too small
        # Shapes are where the bytes of a collective are found.
        profile = clean_up.enter_context(profiler.profiling(profiled, shapes=True, memory=allocations))
        if on_device:
            torch.accelerator.synchronize(device)
            allocator = memory.allocator(device)
            allocator.reset_peak_memory_stats(device)
            held = allocator.memory_allocated(device)
        before = wire.bytes_sent()
        clean_up.callback(hung.close)
        with hung.mark("step"):
            if watch is not None:
                watch.sample("start")
            yield recording
            if watch is not None:
                watch.sample("end")
            if on_device:
                torch.accelerator.synchronize(device)
        recording.wire_bytes = wire.since(before)
        if on_device:
            recording.peak = allocator.max_memory_allocated(device) - held
    records = profile.profiler.kineto_results.events()
    if profiled.type != "cpu" and not on_device:
        records = [one for one in records if one.device_type().name == "CPU"]
    found = trace.Trace(records, on_device)
    recording.seconds = found.seconds
    recording.began = found.began
    ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    # the profiler does not see what a throttle's own thread begins
    late = throttle.recorded(recording.rank, found.began, found.seconds)
    recording.events = trace.read(found, recording.rank, _default_group(model), ddp, late)
    if watch is not None:
        recording.holdings = watch.read(found)
        recording.events = watch.assign(found, recording.events)
    if not wire.carried(recording.events, profiled):
        recording.wire_bytes = None
    if allocations:
        recording.memory = trace.memory_curve(found, profiler.ends_without_beginning(profile))
        if not on_device:
            recording.peak = max(point.bytes for point in recording.memory)


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


def _default_group(model: nn.Module) -> tuple[int, int] | None:
    """(rank, size) in the group of collectives that C++ launches: DDP's, else the only one that there is."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.process_group.rank(), model.process_group.size()
    groups = {(group.rank(), group.size()) for group in dist.distributed_c10d._world.pg_map if group.rank() >= 0}
    return groups.pop() if len(groups) == 1 else None
