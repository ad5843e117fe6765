"""Floating-point operations of one step, counted from a model's sizes.

    >>> of_step(PRESETS["gpt3-175b"], tokens=300e9, length=2048)  # the paper says 3.14e23 for 300 billion tokens

A weight costs each token two operations in forward, a multiplication and an addition, and four in backward, for the
gradients of its input and of itself: 6 x parameters x tokens, where embeddings that are looked up are no parameters.
Attention's two products with the other tokens add 12 x layers x width x length for each token (PaLM, arXiv 2204.02311,
appendix B; causal attention is counted whole, as there). Checkpointing computes the blocks' forward once more: 8 x.
"""

from __future__ import annotations

from dataclasses import dataclass

from chapter19_9.choosing.presets import Model


@dataclass(frozen=True)
class Flops:
    """Operations by phase: forward and backward of one block, and of the output layer with the loss."""

    block_forward: float
    block_backward: float
    output_forward: float
    output_backward: float
    layers: int

    @property
    def total(self) -> float:
        blocks = self.layers * (self.block_forward + self.block_backward)
        return blocks + self.output_forward + self.output_backward


def count(model: Model, tokens: float, length: int, checkpointing: bool = False) -> Flops:
    """For so many tokens, in sequences of ``length``."""
    block = tokens * (2 * model.block + 4 * model.width * length)
    output = tokens * 2 * model.vocabulary * model.width
    return Flops(block, (3 if checkpointing else 2) * block, output, 2 * output, model.layers)


def of_step(model: Model, tokens: float, length: int, checkpointing: bool = False) -> float:
    """All of a forward and a backward."""
    return count(model, tokens, length, checkpointing).total
