"""Counts the memory of tensors that have none: which of them are alive, from where in the step to where, and what for.

A fake tensor has a storage of so many bytes and no memory behind it. Every operation passes through the mode, which
sees storages come; a weak reference tells when one goes; ``resize_`` of a storage, which is how FSDP2 and hand-written
ZeRO-3 free gathered weights, is watched too. What a storage was for may show only later (a gradient is known when it is
packed), so the log keeps numbers, and the curve is drawn up at the end.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from chapter19_9.dryrun.outcome import PARTS, Collective, Moment

DEVICE = torch.ops.prim.device.default


class Accounts(FakeTensorMode):
    """Inside it tensors are fake; between ``begin`` and ``end`` they are counted."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.watching, self._depth = False, 0
        self._ignored: set[int] = set()
        self._log: list[tuple[int, int]] = []  # number of a storage, bytes that came or went
        self._number: dict[int, int] = {}  # of a living storage
        self._bytes: list[int] = []
        self._alive: list[Any] = []  # weak references
        self._part: dict[int, str] = {}
        self.marks: list[tuple[int, str, str]] = []
        self._sent: Counter[tuple[str, str, int]] = Counter()

    def __enter__(self) -> Any:
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        self._depth -= 1
        return super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # half of all calls
        out = super().__torch_dispatch__(func, types, args, kwargs)
        # DTensor enters the mode once more to learn the shapes of whole tensors, which no rank has
        if self.watching and self._depth == 1 and out is not NotImplemented:
            if isinstance(out, Tensor):
                self._see(out)
            elif isinstance(out, (tuple, list)):
                for one in out:
                    if isinstance(one, Tensor):
                        self._see(one)
            name = func._opname
            if name in SPECIAL:
                SPECIAL[name](self, args, kwargs or {})
        return out

    def _see(self, tensor: Tensor) -> int:
        """The number of the storage behind a tensor."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if (number := self._number.get(key)) is not None:
            return number
        if key in self._ignored:
            return -1
        number, size = len(self._bytes), storage.nbytes()
        self._number[key] = number
        self._bytes.append(size)
        self._log.append((number, size))
        self._alive.append(weakref.ref(storage, lambda _: self._gone(key, number)))
        return number

    def _gone(self, key: int, number: int) -> None:
        if self.watching:
            self._log.append((number, -self._bytes[number]))
            self._number.pop(key, None)

    def label(self, part: str, tensors: Iterable[Tensor]) -> None:
        """What these tensors' memory is for; the last word counts."""
        for tensor in tensors:
            self._part[self._see(getattr(tensor, "_local_tensor", tensor))] = part

    def mark(self, name: str, phase: str) -> None:
        """From here on the step is at ``name``."""
        self.marks.append((len(self._log), name, phase))

    @contextmanager
    def watch(self, ignored: Iterable[Tensor]) -> Iterator[None]:
        """Count inside the block. ignored: memory that is there and not the training's."""
        self._ignored = {tensor.untyped_storage()._cdata for tensor in ignored}
        plain = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            before, number = storage.nbytes(), self._number.get(storage._cdata)
            done = plain(storage, size)
            if number is not None and size != before:
                self._bytes[number] = size
                self._log.append((number, size - before))
            return done

        self.watching = True
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            self.watching = False
            torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]

    def collective(self, name: str, size: int) -> None:
        self._sent[name, self.phase, size] += 1

    @property
    def phase(self) -> str:
        return self.marks[-1][2]

    def held(self, part: str) -> int:
        """Bytes that are alive now and labelled so."""
        return sum(self._bytes[number] for number in self._number.values() if self._part.get(number) == part)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return tuple(Collective(name, phase, count, size) for (name, phase, size), count in self._sent.items())

    def curve(self) -> tuple[Moment, ...]:
        """Two moments of each stretch between marks: its fullest, and its last.

        Optimizer states count from the beginning: the first step makes them, and every later one begins with them.
        """
        # what is for nothing else: in the optimizer's phase, what passes in its arithmetic
        last = next((first for first, _, phase in self.marks if phase == "optimizer"), len(self._log))
        late = {number for number, _ in self._log[last:]} - {number for number, _ in self._log[:last]}
        parts = [self._part.get(n, "buffers" if n in late else "activations") for n in range(len(self._bytes))]
        column = [PARTS.index(part) for part in parts]
        states = PARTS.index("optimizer")
        now = [0] * len(PARTS)
        now[states] = sum(change for number, change in self._log if number >= 0 and column[number] == states)
        found, ends = [], [first for first, _, _ in self.marks[1:]] + [len(self._log)]
        at = 0
        for (_, name, phase), end in zip(self.marks, ends, strict=True):
            fullest, most = tuple(now), sum(now)
            total = most
            for number, change in self._log[at:end]:
                if column[number] != states:
                    now[column[number]] += change
                    total += change
                    if total > most:
                        fullest, most = tuple(now), total
            at = end
            found += [Moment(name, phase, *fullest), Moment(name, phase, *now)]
        return tuple(found)


def _all_gather(accounts: Accounts, args: Any, _: Any) -> None:
    whole, part = args[:2]
    accounts.collective("all_gather", whole.nbytes)
    for tensor, what in ((whole, "gathered"), (part, "buffers")):  # the part may lie in the whole
        accounts._part.setdefault(accounts._see(tensor), what)


def _reduce_scatter(accounts: Accounts, args: Any, _: Any) -> None:
    part, whole = args[:2]
    accounts.collective("reduce_scatter", whole.nbytes)
    for tensor in (part, whole):
        accounts._part.setdefault(accounts._see(tensor), "buffers")


def _other(name: str) -> Callable[[Accounts, Any, Any], None]:
    def told(accounts: Accounts, args: Any, _: Any) -> None:
        accounts.collective(name, sum(tensor.nbytes for tensor in args[0]))

    return told


def _arrived(accounts: Accounts, args: Any, kwargs: Any) -> None:
    """FSDP2 copies what it gathered out of the buffer, to each weight's own memory."""
    buffer, out = args[0], kwargs.get("out", ())
    accounts._part[accounts._see(buffer)] = "buffers"
    accounts.label("gathered", out)


def _packed(accounts: Accounts, args: Any, kwargs: Any) -> None:
    """What is laid end to end are gradients: by FSDP2, by hand, or by autograd when the weights were parts of one vector."""
    if accounts.phase == "backward":
        for tensor in args[0]:
            accounts._part.setdefault(accounts._see(tensor), "gradients")


def _added(accounts: Accounts, args: Any, _: Any) -> None:
    """A gradient that is added to those that are kept is one until then."""
    kept, more = args[:2]
    if isinstance(more, Tensor) and accounts._part.get(accounts._see(kept)) == "gradients":
        accounts._part.setdefault(accounts._see(more), "gradients")


SPECIAL: dict[str, Callable[[Accounts, Any, Any], None]] = {
    "_allgather_base_": _all_gather,
    "_reduce_scatter_base_": _reduce_scatter,
    "allreduce_": _other("all_reduce"),
    "broadcast_": _other("broadcast"),
    "split_with_sizes_copy": _arrived,
    "chunk_cat": _packed,
    "cat": _packed,
    "add_": _added,
}
