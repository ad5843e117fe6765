"""Records one training step of one rank: what it computed, what it communicated, and what memory it took.

    with record(model, optimizer, allocations=True) as recording:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
    recording.events, recording.memory, recording.peak

Everything comes from ``torch.profiler``, whose records of one step ``trace`` turns into events. What it lacks
is
added as marks on its own clock: where a block's forward begins and ends, and where Python waits for a
    collective. The model's graph is not touched, so the step computes the same numbers bit by bit.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from d2l_utils import trace, wire
from d2l_utils.events import Recording

__all__ = ["Recording", "record"]

# Wrappers whose inner module is what a reader calls the block or the model.
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
# The methods of a process group that torch.distributed's functions call, under their names in all its
# versions.
_LAUNCHES = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "send", "recv", "recv_anysource", "barrier",
    "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced", "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base",
    "all_to_all_single", "gather", "gather_single", "gather_into_tensor", "scatter",
)  # fmt: skip


@contextlib.contextmanager
def record(
    model: nn.Module,
    optimizer: Any = None,
    allocations: bool = False,
    *,
    blocks: Mapping[str, nn.Module] | None = None,
    enabled: bool = True,
) -> Iterator[Recording]:
    """Records what this rank does inside the ``with`` block, which should be one training step.

    Arguments:
        model: the module that is trained, wrapped (DDP, FSDP) or not.
        optimizer: only needed where it is not a ``torch.optim.Optimizer``: its ``step`` is then marked.
        allocations: record the memory curve and the peak too; it costs more time.
        blocks: name -> module, the units of ``forward`` and ``backward`` events. Default:
            ``default_blocks(model)``.
        enabled: False records nothing and costs nothing, so that a loop can record chosen steps only.

    The recording is filled when the block ends without an exception; hooks and marks are removed in any case.
    Raises RuntimeError if a profiler is already running in this process, TypeError or ValueError for wrong
    arguments.
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
        marks = _Marks(clean_up)
        marks.blocks(units)
        marks.end_of_backward(model)
        marks.calls()
        marks.optimizer(optimizer)
        if on_device:
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            held = torch.cuda.memory_allocated(device)
        before = wire.bytes_sent()
        profiler.__enter__()
        clean_up.callback(profiler.__exit__, None, None, None)
        clean_up.callback(marks.close)
        with marks.mark("step"):
            yield recording
            if on_device:
                torch.cuda.synchronize(device)
        recording.wire_bytes = wire.since(before)
    found = trace.Trace(profiler.profiler.kineto_results.events(), on_device)
    recording.seconds = found.seconds
    recording.began = found.began
    recording.events = trace.read(found, recording.rank, _default_group(model))
    if allocations:
        recording.memory = trace.memory_curve(found)
        recording.peak = max(point.bytes for point in recording.memory)
    if on_device:
        recording.peak = torch.cuda.max_memory_allocated(device) - held


def default_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The units that a reader would name: members of the outermost ``ModuleList``s, and the modules beside them.

    A Transformer gives ``embed``, ``blocks.0``, ``blocks.1``, ..., ``head``; a model without lists its
    children; one without children itself, as ``model``. Wrappers (DDP, FSDP1, checkpoint, compile) are looked
    through.
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
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return _unwrap(module.module)
    for name in _WRAPPERS:
        if name in module._modules or name in module.__dict__:
            return _unwrap(getattr(module, name))
    return module


def _profiler(on_device: bool, allocations: bool) -> Any:
    # Kineto reads it when the first profile starts, and reports its own stages on stderr otherwise.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
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


class _Marks:
    """Sets named intervals in the profiler's trace, and takes everything it has hung up down again."""

    def __init__(self, clean_up: contextlib.ExitStack) -> None:
        self._clean_up = clean_up
        self._open: list[Any] = []
        self._over = False

    @contextlib.contextmanager
    def mark(self, kind: str, name: str = "") -> Iterator[None]:
        with torch.autograd.profiler.record_function(f"{trace.MARK}{kind}:{name}"):
            yield

    def begin(self, kind: str, name: str = "") -> None:
        mark = torch.autograd.profiler.record_function(f"{trace.MARK}{kind}:{name}")
        mark.__enter__()
        self._open.append(mark)

    def end(self) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def close(self) -> None:
        """Ends marks that an exception left open; later ones are not set."""
        self._over = True
        while self._open:
            self.end()

    def blocks(self, units: Mapping[str, nn.Module]) -> None:
        """Marks each call of each block."""
        for name, module in units.items():
            before = module.register_forward_pre_hook(lambda *_, name=name: self.begin("forward", name))
            after = module.register_forward_hook(lambda *_: self.end(), always_call=True)
            self._clean_up.callback(before.remove)
            self._clean_up.callback(after.remove)

    def end_of_backward(self, model: nn.Module) -> None:
        """Marks what autograd does after the last gradient: DDP waits for its buckets there, in C++."""

        def closing() -> None:
            # Callbacks run in the order in which they were asked for, later ones too: this one was asked for
            # before DDP's, the one that it asks for comes after it.
            self.begin("closing")
            torch.autograd.Variable._execution_engine.queue_callback(self.end)

        def started(gradient: torch.Tensor) -> None:
            if self._over:  # the tensor outlived the recording
                return
            torch.autograd.Variable._execution_engine.queue_callback(closing)

        def returned(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(started)

        self._clean_up.callback(model.register_forward_hook(returned).remove)

    def calls(self) -> None:
        """Marks what Python asks of ``torch.distributed``: each ``wait()``, and each launch with its group."""
        if not dist.is_available():
            return
        self._around(dist.Work, "wait", "wait", lambda work: "work.wait")
        for name in _LAUNCHES:
            if name in vars(dist.ProcessGroup):
                self._around(dist.ProcessGroup, name, "group", lambda group: f"{group.rank()}/{group.size()}")

    def _around(self, owner: Any, method: str, kind: str, name: Callable[[Any], str]) -> None:
        # The entry of the class itself: what getattr gives for a method in C++ would no longer bind when put
        # back.
        original = vars(owner)[method]
        function = getattr(owner, method)

        def marked(this: Any, *arguments: Any, **options: Any) -> Any:
            with self.mark(kind, name(this)):
                return function(this, *arguments, **options)

        setattr(owner, method, marked)
        self._clean_up.callback(setattr, owner, method, original)

    def optimizer(self, optimizer: Any) -> None:
        """Marks ``optimizer.step`` of a hand-written optimizer; the profiler knows torch's own."""
        if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
            return
        step = getattr(optimizer, "step", None)
        if not callable(step):
            raise TypeError(f"optimizer={optimizer!r}: it has no step() to record")

        def marked(*arguments: Any, **options: Any) -> Any:
            with self.mark("optimizer", type(optimizer).__name__):
                return step(*arguments, **options)

        own = vars(optimizer).get("step")
        optimizer.step = marked
        restore = (setattr, optimizer, "step", own) if own is not None else (delattr, optimizer, "step")
        self._clean_up.callback(*restore)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for member in value.values():
            yield from _tensors(member)
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from _tensors(member)
