"""What a dry run found, as a value, as text and as JSON. Needs no torch.

Bytes are those of the distinct tensor memory that is alive on the rank at once, as ``d2l_utils.memory`` counts it on
real ranks. They are the code's own, done with the operations of the CPU, among which the optimizer goes from tensor to
tensor. Not in them: what a backend or a kernel takes for itself inside one operation (gloo receives into memory of its
own, NCCL has buffers), an allocator's gaps, the context of a device, time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from chapter19_9.dryrun.plan import Plan
from chapter19_9.theory import States
from d2l_utils.traffic import sent_on_ring
from d2l_utils.units import format_bytes

PARTS = ("parameters", "gathered", "gradients", "optimizer", "activations", "buffers")
NAMES = {
    "parameters": "P", "gathered": "gathered weights", "gradients": "G", "optimizer": "O",
    "activations": "activations", "buffers": "buffers",
}  # fmt: skip


@dataclass(frozen=True)
class Moment:
    """Bytes on the rank at one moment. ``name`` says where in the step it stands; ``phase`` is one of forward, backward,
    optimizer.

    parameters  : what the rank keeps of the weights: shards, or the whole.
    gathered    : whole weights that stand there for a while.
    gradients   : whole ones, as long as they are there, and what the rank keeps of them.
    optimizer   : states, and 32-bit weights beside 16-bit ones.
    activations : saved for backward, in use, and their gradients; logits and loss.
    buffers     : what a collective sends from or receives into, where it is none of these.
    """

    name: str
    phase: str
    parameters: int = 0
    gathered: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    buffers: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, part) for part in PARTS)


@dataclass(frozen=True)
class Collective:
    """So many collectives of one kind and size in one phase. ``bytes``: of the whole tensor of one of them."""

    name: str
    phase: str
    count: int
    bytes: int


@dataclass(frozen=True)
class DryRun:
    """One step of one pretended rank.

    parameters  : numbers in the model; of tied weights once.
    rest        : bytes of P, G and O after the step, before its gradients are forgotten.
    curve       : each stretch of the step at its fullest, and as it ends.
    collectives : what the step launched.
    seconds, cpu_seconds, memory : of the process that found it, imports included; memory in bytes.
    """

    plan: Plan
    parameters: int
    rest: States
    curve: tuple[Moment, ...]
    collectives: tuple[Collective, ...]
    seconds: float
    cpu_seconds: float
    memory: int

    @property
    def peak(self) -> Moment:
        """The first moment with the most bytes."""
        return max(self.curve, key=lambda moment: moment.total)

    def count(self, name: str, phase: str | None = None) -> int:
        """Collectives of that name in the step, or in one phase of it."""
        return sum(one.count for one in self.collectives if one.name == name and phase in (None, one.phase))

    @property
    def sent(self) -> float:
        """Bytes that the rank sends in the step, on an ideal ring."""
        n = self.plan.world_size
        return sum(one.count * (sent_on_ring(one.name, one.bytes, n) or 0.0) for one in self.collectives)

    def to_json(self) -> dict[str, Any]:
        """Plain values, and beside the fields ``peak`` and ``sent``."""
        return {**asdict(self), "plan": self.plan.to_json(), "peak": asdict(self.peak), "sent": self.sent}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> DryRun:
        """The value that ``to_json`` was called on."""
        made: dict[str, Any] = {
            "plan": Plan.from_json(found["plan"]),
            "rest": States(**found["rest"]),
            "curve": tuple(Moment(**one) for one in found["curve"]),
            "collectives": tuple(Collective(**one) for one in found["collectives"]),
        }
        return cls(**{field.name: made.get(field.name, found[field.name]) for field in fields(cls)})

    def __str__(self) -> str:
        plan, peak = self.plan, self.peak
        parts = ", ".join(f"{NAMES[part]} {format_bytes(getattr(peak, part))}" for part in PARTS if getattr(peak, part))
        return (
            f"{plan.sizes.name}, {self.parameters:,} parameters, {plan.strategy}, rank {plan.rank} of "
            f"{plan.world_size:,}: peak {format_bytes(peak.total)} in {peak.name} ({parts}); {counted(self.collectives)}"
        )


def counted(collectives: Iterable[Collective]) -> str:
    """ "161 all_gather of 261 GB in all, ..."."""
    found: dict[str, list[int]] = {}
    for one in collectives:
        entry = found.setdefault(one.name, [0, 0])
        entry[0] += one.count
        entry[1] += one.count * one.bytes
    words = [f"{count:,} {name} of {format_bytes(size)}" for name, (count, size) in found.items()]
    return ", ".join(words) or "no collectives"
