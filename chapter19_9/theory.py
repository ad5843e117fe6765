"""The formulas, derived from the registry's facts: model-state memory, bytes sent, global batch.

Notation: P, G, O are parameters, gradients and optimizer states; M_P, M_G, M_O their bytes on one device; N
the number of data-parallel ranks. Communication is logical: what each rank sends on an ideal ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from chapter19_9.strategies import Strategy, get
from d2l_utils.batch import Batch, combinations, global_batch, nearest
from d2l_utils.traffic import sent_on_ring

if TYPE_CHECKING:
    from d2l_utils.transformer import TransformerConfig

__all__ = ["Batch", "States", "adamw_states", "combinations", "global_batch", "memory", "nearest", "volume"]


STATES = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class States:
    """Bytes of the model states: M_P, M_G, M_O."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def adamw_states(config: TransformerConfig, element: int = 4) -> States:
    """M_P, M_G, M_O of the toy Transformer under AdamW, whole; ``element`` is the bytes of one number.

    AdamW keeps two numbers for every trained one and a step count of 4 bytes for every trained tensor. A
    frozen parameter has no gradient and no state.
    """
    import torch

    from d2l_utils.transformer import Transformer

    with torch.device("meta"):
        model = Transformer(config)
    trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
    return States(
        parameters=element * config.parameter_count,
        gradients=element * sum(trained),
        optimizer=2 * element * sum(trained) + 4 * len(trained),
    )


def memory(strategy: Strategy | str, states: States, n: int) -> States:
    """Bytes of model states on each of ``n`` ranks, at rest, as the textbook has it: a replicated state does
    not depend on ``n``, a sharded one is divided by it. ``exact_memory`` knows padding and uneven shares.

    Raises ValueError for an unknown strategy or a bad ``n``.
    """
    facts = _facts(strategy, n)
    divided = {name: getattr(states, name) / (n if getattr(facts, name) == "sharded" else 1) for name in STATES}
    return States(**divided)


def volume(strategy: Strategy | str, states: States, n: int) -> float:
    """Bytes that each of ``n`` ranks sends in one step: for DDP 2(N-1)/N M_G. Errors as in ``memory``."""
    facts = _facts(strategy, n)
    sent = (sent_on_ring(e.collective, getattr(states, e.of), n) for e in facts.communicates)
    return sum(bytes_sent or 0.0 for bytes_sent in sent)


def _facts(strategy: Strategy | str, n: int) -> Strategy:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n is {n!r}: it must be a whole number of at least 1")
    return get(strategy) if isinstance(strategy, str) else strategy
