"""Holds this rank's collectives back, as a slower link would.

    slow = Throttle(Link(bandwidth=50e6, latency=1e-4), model)
    with slow:
        loss.backward()
    slow.charged, slow.transfers

What is real: the ranks, their work, the order of their collectives, what waits for what, and every byte, which goes
over the backend's own connections as always. What is pretended: a collective begins only when a link of the given
bandwidth and latency would have carried it. The link is one for each rank and carries one thing at a time: a
collective takes ``link.seconds`` of it, bytes of an ideal ring whatever the backend's own algorithm sends, after what
was asked for before. Held back is the launch, in a thread of its own: who asked for an asynchronous collective goes on
computing, and who waits for it sleeps. What the backend itself takes comes on top. Only for ranks on the CPU.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from d2l_utils.events import Event
from d2l_utils.link import Link
from d2l_utils.traffic import sent_on_ring

__all__ = ["Link", "Throttle", "Transfer", "recorded", "throttles"]

# The methods of a process group that torch.distributed's functions call, in all its versions. Others (gather,
# scatter, all_to_all) pass as they are, and so does what C++ asks for without Python: see ``Throttle``.
_METHODS = {
    "all_reduce": ("allreduce", "allreduce_coalesced"),
    "all_gather": (
        "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced",
        "all_gather_single_coalesced", "allgather_into_tensor_coalesced",
    ),
    "reduce_scatter": (
        "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
        "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced",
    ),
    "broadcast": ("broadcast",),
    "reduce": ("reduce",),
    "send": ("send",),
    "recv": ("recv", "recv_anysource"),
    "barrier": ("barrier",),
}  # fmt: skip
_current: Throttle | None = None


@dataclass(frozen=True)
class Transfer:
    """One collective on the link. Times are seconds since 1970: when it was asked for, when it had the link from and
    to, and when the backend was done with it. bytes: its payload, the whole tensor."""

    name: str
    bytes: int
    group_size: int
    asked: float
    begins: float
    ends: float
    done: float


class LateWork(dist.Work):
    """The handle of a collective that is held back: what its asker waits for."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors, self._over, self._error = tensors, threading.Event(), None
        self._future: Any = torch.futures.Future()

    def wait(self, timeout: Any = None) -> bool:
        """Sleep until it is done; raises what the backend raised. The backend's own timeout holds."""
        self._over.wait()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and self._error is None

    def exception(self) -> Any:
        return self._error

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> Any:
        """A future of the tensors; DDP's hooks ask for it."""
        return self._future

    def finish(self, error: Any = None) -> None:
        self._error = error
        self._over.set()
        if error is None:
            self._future.set_result(self._tensors)
        else:
            self._future.set_exception(error)
        self._tensors = []


@dataclass
class _Asked:
    """A collective on its way: from the asker to the link's thread, and on to the one that waits for the backend."""

    start: Callable[[], Any] | None
    work: LateWork
    name: str
    bytes: int
    group_size: int
    asked: float
    begins: float
    ends: float
    real: Any = None


class Throttle:
    """This rank's link, in force inside ``with``, which can be entered again.

    model: DistributedDataParallel launches its collectives in C++. PyTorch's own ``allreduce_hook`` brings them to
    Python: the same division, the same buckets, the same all-reduce.
    Raises ValueError for a model that is not on the CPU: there is no holding back what a device has queued.
    """

    def __init__(self, link: Link, model: nn.Module | None = None) -> None:
        if not isinstance(link, Link):
            raise TypeError(f"link is {link!r}: it must be a Link(bandwidth, latency)")
        devices = {parameter.device.type for parameter in model.parameters()} if model is not None else set()
        if away := devices - {"cpu"}:
            raise ValueError(f"link is {link}: only ranks on the CPU can have one, and the model is on {away.pop()}")
        self.link = link
        self.transfers: list[Transfer] = []
        self._free_from, self._failed = 0.0, False
        self._epoch = time.time() - time.perf_counter()
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._begun: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._inside: contextlib.ExitStack | None = None
        if isinstance(model, nn.parallel.DistributedDataParallel) and not getattr(model, "_comm_hooks", None):
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

            model.register_comm_hook(None, allreduce_hook)

    @property
    def charged(self) -> float:
        """Seconds that the link was busy so far."""
        return sum(transfer.ends - transfer.begins for transfer in self.transfers)

    def __enter__(self) -> Throttle:
        global _current
        if _current is not None:
            raise RuntimeError("a throttle is already in force on this rank: it has one link")
        if self._failed:
            raise RuntimeError("this throttle was left with an error, and its link may still be busy: make another one")
        self._inside = contextlib.ExitStack()
        threads = [threading.Thread(target=one, name="link", daemon=True) for one in (self._carry, self._await)]
        for thread in threads:
            thread.start()
        self._inside.callback(self._end, threads)
        for name, methods in _METHODS.items():
            for method in methods:
                if method in vars(dist.ProcessGroup):
                    self._between(name, method)
        _current = self
        return self

    def __exit__(self, *error: Any) -> None:
        global _current
        _current = None
        assert self._inside is not None
        self._failed = error[0] is not None
        self._inside.close()

    def _between(self, name: str, method: str) -> None:
        # The entry of the class itself: what getattr gives for a method in C++ would no longer bind when put back.
        original, function = vars(dist.ProcessGroup)[method], getattr(dist.ProcessGroup, method)

        def held_back(group: Any, *arguments: Any, **options: Any) -> Any:
            if group.size() == 1:
                return function(group, *arguments, **options)
            return self._ask(name, lambda: function(group, *arguments, **options), arguments, group.size())

        setattr(dist.ProcessGroup, method, held_back)
        assert self._inside is not None
        self._inside.callback(setattr, dist.ProcessGroup, method, original)

    def _ask(self, name: str, start: Callable[[], Any], arguments: tuple[Any, ...], n: int) -> LateWork:
        tensors = [list(_tensors(argument)) for argument in arguments[:2]]
        # outputs come first, then inputs: the whole tensor is the larger
        size = max((sum(tensor.nbytes for tensor in many) for many in tensors), default=0)
        work = LateWork(tensors[0] if tensors else [])
        with self._lock:
            now = time.perf_counter()
            begins = max(now, self._free_from)
            self._free_from = ends = begins + self.link.seconds(name, size, n)
            self._asked.put(_Asked(start, work, name, size, n, now, begins, ends))
        return work

    def _carry(self) -> None:
        """The link: each collective has its time on it, then really begins."""
        while (one := self._asked.get()) is not None:
            time.sleep(max(0.0, one.ends - time.perf_counter()))
            try:
                assert one.start is not None
                one.real = one.start()
            except Exception as error:
                one.real = error
            one.start = None  # it holds the tensors
            self._begun.put(one)
        self._begun.put(None)

    def _await(self) -> None:
        """Waits for the backend, apart from the link: a send may not be done before a receive behind it has begun."""
        while (one := self._begun.get()) is not None:
            error = one.real if isinstance(one.real, Exception) else None
            try:
                if error is None and one.real is not None:
                    one.real.wait()
            except Exception as raised:
                error = raised
            one.real = None
            times = (self._epoch + moment for moment in (one.asked, one.begins, one.ends, time.perf_counter()))
            self.transfers.append(Transfer(one.name, one.bytes, one.group_size, *times))
            one.work.finish(error)

    def _end(self, threads: list[threading.Thread]) -> None:
        self._asked.put(None)
        for thread in threads if not self._failed else ():  # an error is told now, whatever is still on the link
            thread.join()


def throttles(
    link: Link | Sequence[Link | None] | None, steps: int, model: nn.Module
) -> list[contextlib.AbstractContextManager[Any]]:
    """What each step goes through: the same link in all of them, or one for each; without a link, nothing.

    Raises ValueError when there are not as many links as steps.
    """
    links = [link] * steps if link is None or isinstance(link, Link) else list(link)
    if len(links) != steps:
        raise ValueError(f"link has {len(links)} links: it must be one for each of {steps} steps, or one for all")
    made = {one: contextlib.nullcontext() if one is None else Throttle(one, model) for one in links}
    return [made[one] for one in links]


def recorded(rank: int, began: int, seconds: float) -> list[Event]:
    """The transfers of a step that began then (ns since 1970), for ``d2l_utils.record``; [] without a throttle.

    They are on the clock from when they were asked for, with the time that they waited for the link.
    """
    events = []
    for transfer in _current.transfers if _current is not None else ():
        asked, begun, done = (moment - began * 1e-9 for moment in (transfer.asked, transfer.ends, transfer.done))
        if 0 <= asked <= seconds:
            sent = sent_on_ring(transfer.name, transfer.bytes, transfer.group_size)
            events.append(
                Event(
                    "collective", transfer.name, rank, asked, done,
                    bytes=transfer.bytes, sent_bytes=sent, backend_start=begun, group_size=transfer.group_size,
                )
            )  # fmt: skip
    return events


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for member in value:
            yield from _tensors(member)
