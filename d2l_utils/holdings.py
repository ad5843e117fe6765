"""What a rank holds of each block, moment by moment: bytes of parameters, gradients and optimizer states.

``record(..., holdings=True)`` takes a sample at each of its marks: around each block's forward, before its backward,
around each collective and wait that Python asks for, around optimizer steps. A sample looks at the tensors that
exist then and at nothing else. It counts the bytes that they cover in live storages: a freed storage counts 0, tied
and aliased tensors count once, padding that a tensor covers counts.

It also finds which blocks a collective works for: by the memory that it is given, by the name that PyTorch's FSDP2
puts around its collectives, or by the tensor that appears when it is done.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from d2l_utils.events import Event, Holding
from d2l_utils.ranges import Range, byte_range, covered, in_memory

Further = Callable[[], Iterable[tuple[str, str, Tensor]]]

KINDS = ("parameters", "gradients", "optimizer")


@dataclass
class _Launch:
    """A collective that Python asked for: the storages of its tensors, and the blocks that it turned out to serve."""

    storages: list[tuple[weakref.ref[Any], int, int]]  # storage, its address, bytes of the tensor in it
    of: str | None = None
    blocks: set[str] = field(default_factory=set)


@dataclass
class _Bucket:
    """A storage with gradients in it."""

    bytes: int
    filled: int  # number of the sample in which its last gradient was first seen
    blocks: set[str] = field(default_factory=set)


class Holdings:
    """Takes the samples of one recording. ``marks`` gives them their times.

    units: name -> module, the recording's blocks; of them, the members of lists are told apart (see ``columns``).
    further: gives (kind, block, tensor) of what is neither a parameter of a module, nor the ``grad`` of one, nor in
        the optimizer's state under a parameter: a hand-written strategy knows where it keeps such things.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        units: Mapping[str, nn.Module],
        marks: Any,
        further: Further | None = None,
        unwrap: Callable[[nn.Module], nn.Module] = lambda module: module,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._marks, self._further = marks, further or (lambda: ())
        self._units, self._blocks = units, ["", *columns(model, units)]
        inside = {id(part): name for name in self._blocks[1:] for part in units[name].modules()}
        # a wrapper belongs to what it wraps
        self._modules = [(m, inside.get(id(m), inside.get(id(unwrap(m)), ""))) for m in model.modules()]
        self._sharded = _sharded_units(
            model, dict(zip(map(id, model.modules()), (n for _, n in self._modules), strict=True))
        )
        self._seen: dict[str, dict[int, weakref.ref[Tensor]]] = {block: {} for block in self._blocks}
        self._ranges: dict[str, dict[str, set[Range]]] = {
            kind: {block: set() for block in self._blocks} for kind in KINDS
        }
        self._states: dict[str, set[Range]] = {name: set() for name in self._blocks}
        self._rows: list[list[tuple[str, tuple[int, ...], str]]] = []
        self._last: dict[str, tuple[int, ...]] = {}
        self._launches: list[_Launch] = []
        self._buckets: dict[int, _Bucket] = {}
        self._device = next((p.device for p in model.parameters() if p.device.type not in ("cpu", "meta")), None)

    def hang(self, clean_up: contextlib.ExitStack) -> None:
        """Sets what ``marks`` does not: samples before each block's backward and around torch's optimizer steps."""
        for name, module in self._units.items():
            clean_up.callback(module.register_forward_hook(self._before_backward_of(name)).remove)
        done = self._model.register_forward_hook(lambda *_: self.sample("after forward"), always_call=True)
        clean_up.callback(done.remove)
        before = register_optimizer_step_pre_hook(lambda *_: self.sample("optimizer"))
        after = register_optimizer_step_post_hook(lambda *_: self.sample("optimizer"))
        clean_up.callback(before.remove)
        clean_up.callback(after.remove)

    def _before_backward_of(self, name: str) -> Callable[..., None]:
        def arrived(gradient: Tensor) -> None:
            self.sample("backward", name)

        def returned(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in output if isinstance(output, (tuple, list)) else [output]:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(arrived)

        return returned

    @contextlib.contextmanager
    def around(self, arguments: Any) -> Iterator[None]:
        """Samples before and after a collective's launch or a wait, and remembers the launch's tensors."""
        self.sample("launch")
        tensors = list(_tensors(arguments))
        launch = _Launch(
            [(weakref.ref(s := t.untyped_storage()), s._cdata, t.numel() * t.element_size()) for t in tensors]
        )
        self._launches.append(launch)
        with self._marks.mark("launch", str(len(self._launches) - 1)):
            yield
        self._resolve({})
        self.sample("launch")

    def sample(self, at: str, block: str | None = None) -> None:
        """One sample, timed by a mark. ``block`` is the one that is used at this moment."""
        if self._marks.over:  # a hook that outlived the recording
            return
        if self._device is not None:
            # The host runs ahead of the device: only when it waits do the two tell one story.
            torch.accelerator.synchronize(self._device)
        now, new = self._look(at in ("start", "optimizer", "end")), {}
        for name in self._blocks:
            if appeared := now["gradients"][name] - self._ranges["gradients"][name]:
                new[name] = {last - first for _, first, last in appeared}
        before, self._ranges = self._ranges, now
        self._resolve(new)
        self._fill_buckets(new)
        rows = []
        block = block if block is None or block in self._blocks else ""
        for name in self._blocks:
            last = self._last.get(name, (0, 0, 0))
            held = tuple(  # most samples find most of it as it was
                known if now[kind][name] == before[kind][name] else covered(now[kind][name])
                for kind, known in zip(KINDS, last, strict=True)
            )
            if held != last or name == block:
                rows.append((name, held, at if block is None or name == block else ""))
                self._last[name] = held
        with self._marks.mark("sample", str(len(self._rows))):
            self._rows.append(rows)

    def _look(self, states: bool) -> dict[str, dict[str, set[Range]]]:
        """The bytes that live tensors cover now, by kind and block; optimizer states as before unless ``states``."""
        found: dict[str, dict[str, set[Range]]] = {kind: {name: set() for name in self._blocks} for kind in KINDS}
        for module, name in self._modules:
            # a strategy may put an ordinary tensor where a parameter was
            for tensor in [*module._parameters.values(), *vars(module).values(), *_flat_parameter(module)]:
                if isinstance(tensor, Tensor) and (tensor.is_floating_point() or tensor.is_complex()):
                    known = self._seen[name].get(id(tensor))
                    if known is None or known() is not tensor:
                        self._seen[name][id(tensor)] = weakref.ref(tensor)
        for name, known_tensors in self._seen.items():
            for number, reference in list(known_tensors.items()):
                # what a module showed once counts as long as it lives, shown or not
                tensor = reference()
                if tensor is None:
                    del known_tensors[number]
                    continue
                found["parameters"][name] |= byte_range(tensor)
                if tensor.is_leaf and tensor.grad is not None:
                    found["gradients"][name] |= byte_range(tensor.grad)
                for label, hung in vars(tensor).items() if hasattr(tensor, "_local_shard") else ():
                    if isinstance(hung, Tensor):  # FSDP1 hangs its tensors on the flat parameter
                        found["gradients" if "grad" in label else "parameters"][name] |= byte_range(hung)
        if states:
            self._states = {name: set() for name in self._blocks}
            for name, tensor in self._optimizer_states():
                self._states[name] |= byte_range(tensor)
        found["optimizer"] = {name: set(ranges) for name, ranges in self._states.items()}
        for kind, name, tensor in self._further():
            found[kind][name if name in found[kind] else ""] |= byte_range(tensor)
        return found

    def _optimizer_states(self) -> Iterator[tuple[str, Tensor]]:
        owner = {number: name for name, seen in self._seen.items() for number in seen}
        optimizers = [self._optimizer, getattr(self._optimizer, "optim", None)]
        for optimizer in (one for one in optimizers if isinstance(one, torch.optim.Optimizer)):
            for parameter, state in optimizer.state.items():
                if id(parameter) in owner:
                    yield from ((owner[id(parameter)], tensor) for tensor in _tensors(state))

    def _resolve(self, new: Mapping[str, set[int]]) -> None:
        """Finds blocks for launches without: their memory belongs to a block, or a block's gradient has just come."""
        owners: dict[int, list[tuple[str, str]]] = {}
        for kind in ("parameters", "gradients"):
            for name, ranges in self._ranges[kind].items():
                for storage in {storage for storage, _, _ in ranges}:
                    owners.setdefault(storage, []).append((kind, name))
        for launch in self._launches:
            if launch.blocks:
                continue
            for reference, storage, _ in launch.storages:
                for kind, name in owners.get(storage, ()) if reference() is not None else ():
                    launch.of = kind
                    launch.blocks.add(name)
            if not launch.blocks:
                sizes = {size for _, _, size in launch.storages}
                launch.blocks = {name for name, lengths in new.items() if lengths & sizes}
                launch.of = "gradients" if launch.blocks else None

    def _fill_buckets(self, new: Mapping[str, set[int]]) -> None:
        for name in new:
            for storage, _, last in self._ranges["gradients"][name]:
                bucket = self._buckets.setdefault(storage, _Bucket(0, 0))
                if name not in bucket.blocks:
                    bucket.filled = len(self._rows)
                bucket.blocks.add(name)
                bucket.bytes = max(bucket.bytes, last)

    def read(self, trace: Any) -> list[Holding]:
        """The samples as holdings, those that changed something or are of a block in use, in order of time."""
        times = {int(mark.name): mark.start for mark in trace.marks.get("sample", [])}
        return [
            Holding(times[number] if number else 0.0, name, held[0], held[1], held[2], at)
            for number, rows in enumerate(self._rows)
            if number in times
            for name, held, at in rows
        ]

    def assign(self, trace: Any, events: Iterable[Event]) -> list[Event]:
        """The same events, collectives with the blocks that they work for, where that can be told."""
        marks = [(mark, self._launches[int(mark.name)]) for mark in trace.marks.get("launch", [])]
        buckets = sorted(self._buckets.values(), key=lambda bucket: bucket.filled)
        given = []
        for event in sorted(events, key=lambda event: event.launched):
            of: str | None = None
            blocks: set[str] = set()
            if event.kind == "collective":
                launch = next((one for mark, one in marks if mark.start <= event.launched <= mark.end), None)
                of, blocks = self._labelled(trace, event)
                if not blocks and launch is not None:
                    of, blocks = launch.of, launch.blocks
                elif not blocks and event.name == "all_reduce":
                    # launched in C++: DDP reduces whole buckets, in the order in which they fill
                    bucket = next((one for one in buckets if one.bytes == event.bytes), None)
                    if bucket is not None:
                        buckets.remove(bucket)
                        of, blocks = "gradients", bucket.blocks
            given.append(replace(event, of=of, blocks=tuple(sorted(blocks))) if blocks else event)
        return sorted(given, key=lambda event: event.start)

    def _labelled(self, trace: Any, event: Event) -> tuple[str | None, set[str]]:
        """From FSDP2's own record around the launch, such as ``FSDP::all_gather (blocks.0)``."""
        for span in trace.labels:
            if span.start <= event.launched <= span.end:
                what, _, where = span.name.partition(" ")
                kind = {"FSDP::all_gather": "parameters", "FSDP::post_backward_reduce": "gradients"}.get(what)
                if kind:
                    return kind, self._sharded.get(where.strip("()"), set())
        return None, set()


def columns(model: nn.Module, units: Mapping[str, nn.Module]) -> list[str]:
    """The units that are told apart: the members of lists where there are any, else all. The rest together is ""."""
    members = {id(member) for part in model.modules() if isinstance(part, nn.ModuleList) for member in part.modules()}
    return [name for name, unit in units.items() if id(unit) in members] or list(units)


def _sharded_units(model: nn.Module, column: Mapping[int, str]) -> dict[str, set[str]]:
    """The columns whose parameters each FSDP2 unit manages, by the unit's name in the model."""
    unit: dict[str, str] = {}
    units: dict[str, set[str]] = {}
    for name, module in model.named_modules():
        is_unit = any(base.__name__ == "FSDPModule" for base in type(module).__mro__)
        unit[name] = name if is_unit else unit.get(name.rpartition(".")[0], "")
        if module._parameters:
            units.setdefault(unit[name], set()).add(column[id(module)])
    return units


def _flat_parameter(module: nn.Module) -> list[Tensor]:
    """FSDP1's, which is in no module's parameters while the original ones are."""
    flat = getattr(vars(module).get("_handle"), "flat_param", None)
    return [flat] if isinstance(flat, Tensor) else []


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield from in_memory(value)
    elif isinstance(value, (list, tuple)):
        for member in value:
            yield from _tensors(member)
    elif isinstance(value, Mapping):
        for member in value.values():
            yield from _tensors(member)
