"""Named intervals that ``record`` adds to the profiler's trace, for what the profiler does not tell by itself."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from d2l_utils.ranges import in_memory
from d2l_utils.throttle import LateWork
from d2l_utils.trace import MARK

# The methods of a process group that torch.distributed's functions call, under their names in all its versions.
_LAUNCHES = (
    "allreduce", "allreduce_coalesced", "broadcast", "reduce", "send", "recv", "recv_anysource", "barrier",
    "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced", "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base",
    "all_to_all_single", "gather", "gather_single", "gather_into_tensor", "scatter",
)  # fmt: skip


class Marks:
    """Sets named intervals in the profiler's trace, and takes everything it has hung up down again."""

    def __init__(self, clean_up: contextlib.ExitStack) -> None:
        self._clean_up = clean_up
        self._open: list[Any] = []
        self.over = False
        self.watch: Any = None  # takes samples of what is held at the marks, where that was asked for

    @contextlib.contextmanager
    def mark(self, kind: str, name: str = "") -> Iterator[None]:
        with torch.autograd.profiler.record_function(f"{MARK}{kind}:{name}"):
            yield

    def begin(self, kind: str, name: str = "") -> None:
        mark = torch.autograd.profiler.record_function(f"{MARK}{kind}:{name}")
        mark.__enter__()
        self._open.append(mark)

    def end(self) -> None:
        if self._open:
            self._open.pop().__exit__(None, None, None)

    def close(self) -> None:
        """Ends marks that an exception left open; later ones are not set."""
        self.over = True
        while self._open:
            self.end()

    def blocks(self, units: Mapping[str, nn.Module]) -> None:
        """Marks each call of each block."""
        for name, module in units.items():
            before = module.register_forward_pre_hook(lambda *_, name=name: self._begin_block(name))
            after = module.register_forward_hook(lambda *_: self._end_block(), always_call=True)
            self._clean_up.callback(before.remove)
            self._clean_up.callback(after.remove)

    def _begin_block(self, name: str) -> None:
        if self.watch is not None:
            self.watch.sample("forward", name)
        self.begin("forward", name)

    def _end_block(self) -> None:
        self.end()
        if self.watch is not None:
            self.watch.sample("after forward")

    def end_of_backward(self, model: nn.Module) -> None:
        """Marks what autograd does after the last gradient: DDP waits for its buckets there, in C++."""

        def closing() -> None:
            # Callbacks run in the order in which they were asked for, later ones too: this one was asked for before
            # DDP's, the one that it asks for comes after it.
            if self.watch is not None:
                self.watch.sample("closing")
            self.begin("closing")
            torch.autograd.Variable._execution_engine.queue_callback(self.end)

        def started(gradient: torch.Tensor) -> None:
            if self.over:  # the tensor outlived the recording
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
        for handle in (dist.Work, LateWork):
            self._around(handle, "wait", "wait", lambda work: "work.wait")
        for method in _LAUNCHES:
            self._around(dist.ProcessGroup, method, "group", lambda group: f"{group.rank()}/{group.size()}")

    def _around(self, owner: Any, method: str, kind: str, name: Callable[[Any], str]) -> None:
        if method not in vars(owner):  # another version's
            return
        # The entry of the class itself: what getattr gives for a method in C++ would no longer bind when put back.
        original = vars(owner)[method]
        function = getattr(owner, method)

        def marked(this: Any, *arguments: Any, **options: Any) -> Any:
            watching = contextlib.nullcontext() if self.watch is None else self.watch.around([arguments, options])
            with watching, self.mark(kind, name(this)):
                return function(this, *arguments, **options)

        setattr(owner, method, marked)
        self._clean_up.callback(setattr, owner, method, original)

    def releases(self, model: nn.Module, optimizer: Any) -> None:
        """Marks the end of storages older than the step: the profiler ignores a release it has seen no allocation of."""

        def released(size: int) -> None:
            with self.mark("free", str(size)):
                pass

        for storage in _storages(model, optimizer):
            end = weakref.finalize(storage, released, storage.nbytes())
            end.atexit = False
            self._clean_up.callback(end.detach)

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


def _storages(model: nn.Module, optimizer: Any) -> Iterator[torch.UntypedStorage]:
    """Each distinct storage on the CPU of what model and optimizer hold, local parts where they are sharded."""
    parameters = list(model.parameters())
    states = optimizer.state if isinstance(optimizer, torch.optim.Optimizer) else {}
    tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None), *model.buffers(), *_tensors(states)]
    seen = set()
    for part in (part for tensor in tensors for part in in_memory(tensor)):
        storage = part.untyped_storage()
        if storage.device.type == "cpu" and storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for member in value.values():
            yield from _tensors(member)
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from _tensors(member)
