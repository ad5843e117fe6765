"""What a step costs one rank, predicted: bytes by part at each moment, and bytes that it sends. ``scaling`` has the time.

    >>> most = peak(moments("fsdp2", PRESETS["llama-7b"], 64, tokens=2048, precision=BF16))
    >>> most.name, most.total

A step is walked through in the order in which the strategies' code does things; a moment says what stands in memory
there. The peak is the largest moment. With the toy Transformer's own states the walk is held against the peak that
ranks measure, for every strategy.

What the walk rests on:

- Saved activations are counted tensor by tensor for a pre-norm block with fused attention and no dropout: 6 vectors of
  the model's width, keys and values, and 2 of the MLP's width (4 with a gate), for each token. With 16 bits, 4 x the
  width in the MLP and as many key heads as heads that is 32 bytes x tokens x width: the 34 of Korthikanti et al.
  (arXiv 2205.05198, equation 1) without its two dropout masks, and without the 5 a s / h of attention that keeps
  its s x s matrices.
- With checkpointing a block keeps its input only, and is computed again in its backward.
- The loss is taken in 32 bits: three times tokens x vocabulary at its backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from chapter19_9 import theory
from chapter19_9.choosing.presets import Model, of_toy
from chapter19_9.strategies import Strategy, get
from d2l_utils.transformer import TransformerConfig

PARTS = (
    "parameters", "gradients", "optimizer", "gathered", "whole_gradients", "activations", "loss", "buffers",
)  # fmt: skip


@dataclass(frozen=True)
class Precision:
    """Bytes of one parameter's states; ``element``: of one number that is computed with, kept or sent."""

    name: str
    parameters: int
    gradients: int
    optimizer: int
    element: int

    def states(self, count: float) -> theory.States:
        return theory.States(self.parameters * count, self.gradients * count, self.optimizer * count)


FP32 = Precision("fp32", 4, 4, 8, 4)
BF16 = Precision("bf16", 2, 2, 12, 2)  # 16-bit weights and gradients; 32-bit weights, momentum, variance
PRECISIONS = {precision.name: precision for precision in (FP32, BF16)}


@dataclass(frozen=True)
class Habits:
    """What a strategy's code holds inside a step, where the registry's facts leave it open.

    standing : gradients keep their memory from step to step (buckets, or a flat vector).
    kept     : weights that were gathered for forward stay until backward is done with them.
    ahead    : in backward, one block's weights are gathered ahead.
    buffered : weights arrive in a buffer that is held until the next unit's have arrived, and so are the
               gradients that leave.
    packed   : whole gradients are copied into one vector before they are reduced.
    """

    standing: bool = False
    kept: bool = False
    ahead: bool = False
    buffered: bool = False
    packed: bool = False


_STANDING = Habits(standing=True)
_KEPT2 = Habits(kept=True, buffered=True, packed=True)
HABITS = {
    "single": Habits(),
    "ddp": _STANDING,
    "zero1": _STANDING,
    "zero2": Habits(packed=True),
    "zero3": Habits(packed=True),
    "zero_redundancy": _STANDING,
    "fsdp1": Habits(ahead=True, packed=True),
    "fsdp1_grad_op": Habits(kept=True, packed=True),
    "fsdp2": Habits(ahead=True, buffered=True, packed=True),
    "fsdp2_no_reshard": _KEPT2,
    "fsdp2_root_only": _KEPT2,
}


@dataclass(frozen=True)
class Moment:
    """Bytes on one rank at one moment of a step. ``name`` says which.

    parameters, gradients, optimizer : what the rank keeps: whole states, or its shards.
    gathered                         : whole weights that stand there for a while, and 16-bit casts of weights.
    whole_gradients                  : whole gradients of strategies that keep shards.
    activations                      : saved for backward, and the gradient on its way back.
    loss                             : logits, their log-probabilities, and their gradients.
    buffers                          : what a collective sends from, or receives into.
    """

    name: str
    parameters: float
    gradients: float
    optimizer: float
    gathered: float = 0.0
    whole_gradients: float = 0.0
    activations: float = 0.0
    loss: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        return sum(getattr(self, part) for part in PARTS)


def saved_by_block(model: Model, tokens: float, element: int) -> float:
    """Bytes of activations that one block saves for its backward, without checkpointing."""
    numbers = 6 * model.width + 2 * model.kv_width + (4 if model.gated else 2) * model.inner
    # in 32 bits: the norms' statistics, and one number a head that fused attention keeps
    small = 4 * ((2 if model.gated else 4) + model.heads)
    return tokens * (element * numbers + small)


def activations(model: Model, tokens: float, element: int, checkpointing: bool = False) -> float:
    """Bytes of saved activations at the end of forward: all blocks, and what follows them but the loss."""
    x = tokens * model.width * element
    each = x if checkpointing else saved_by_block(model, tokens, element)
    return model.layers * each + 2 * x


def moments(
    strategy: str,
    model: Model,
    n: int,
    tokens: float,
    precision: Precision = FP32,
    *,
    checkpointing: bool = False,
    states: theory.States | None = None,
    gloo: bool = False,
    every: bool = True,
) -> list[Moment]:
    """A step of one rank of ``n``, in order: forward, loss, backward block by block, optimizer.

    tokens: of one rank's micro-batch. states: bytes that the rank keeps, where known; else the textbook's. gloo:
    a collective receives into memory of its own, as on CPU ranks, and not with NCCL. every: False leaves out the blocks in
    the middle, where no peak is: from one block to the next all changes by the same. Raises ValueError for a strategy that
    is not registered.
    """
    facts, habits = get(strategy), HABITS[strategy]
    kept = states or theory.memory(facts, precision.states(model.parameters), n)
    if n == 1:  # nothing to gather ahead; FSDP1 shards nothing at all
        alone = strategy.startswith("fsdp1")
        facts = get("single") if alone else facts
        habits = HABITS["single"] if alone else replace(habits, ahead=False, buffered=False)
    return list(_walk(facts, habits, model, n, tokens, precision, checkpointing, kept, gloo and n > 1, every))


def peak(walked: list[Moment]) -> Moment:
    """The moment with the most bytes."""
    return max(walked, key=lambda moment: moment.total)


def toy_moments(strategy: str, config: TransformerConfig, n: int, batch: int) -> list[Moment]:
    """The same for the toy Transformer as it trains on CPU ranks over gloo; states to the byte, of the fullest rank.

    batch: samples over all ranks, as in ``train``.
    """
    states = max(theory.exact_memory(strategy, theory.shapes(config), n), key=lambda each: each.total)
    return moments(strategy, of_toy(config), n, batch // n * config.length, states=states, gloo=True)


def _walk(
    facts: Strategy,
    habits: Habits,
    model: Model,
    n: int,
    tokens: float,
    precision: Precision,
    checkpointing: bool,
    states: theory.States,
    gloo: bool,
    every: bool,
) -> Iterator[Moment]:
    """The step as the strategies' files do it: ``have`` is what stands, ``moment`` adds what passes."""
    element, sharded, by_block = precision.element, facts.parameters == "sharded", facts.units == "blocks"
    x = tokens * model.width * element  # one vector of the model's width for each token
    logits = 4 * tokens * model.vocabulary
    full = saved_by_block(model, tokens, element)
    saved = x if checkpointing else full
    block, output = element * model.block, element * model.output
    unit = block if by_block else 0  # what is gathered, or leaves, with a block
    root = element * (model.root if by_block else model.parameters)
    gathered, landing = sharded * unit, sharded * unit * gloo
    have = dict.fromkeys(PARTS, 0.0)
    have |= {"parameters": states.parameters, "optimizer": states.optimizer}
    have["gradients"] = states.gradients if habits.standing else 0.0
    # under autocast, a 16-bit cast of each 32-bit weight
    have["gathered"] = 2 * model.parameters if facts.cut == "none" and precision is BF16 else 0.0

    def moment(name: str, **passing: float) -> Moment:
        return Moment(name, **{part: have[part] + passing.get(part, 0.0) for part in PARTS})

    def told(number: int) -> bool:
        return every or number < 2 or number >= model.layers - 2

    def grow(size: float) -> None:
        if not habits.standing:
            have["whole_gradients" if habits.packed else "gradients"] += size

    have["gathered"] += sharded * root
    for number in range(model.layers):
        have["gathered"] += gathered
        if sharded and told(number):
            yield moment(f"forward of block {number}", activations=x, buffers=landing + habits.buffered * unit)
        have["activations"] += saved
        have["gathered"] -= gathered * (not habits.kept)
    have["activations"] += 2 * x  # what the last norm and the output layer have read
    yield moment("loss", loss=2 * logits, buffers=habits.buffered * (unit or root))

    have["gathered"] += gathered * habits.ahead
    yield moment("backward of the loss", loss=3 * logits)
    have["activations"] -= x  # the gradient on its way back takes the place of the other
    grow(output)
    leaving = 0.0
    for number in reversed(range(model.layers)):
        if not habits.kept:
            have["gathered"] += gathered if not habits.ahead or number else 0.0
            if sharded and told(number):
                yield moment(f"weights of block {number}", buffers=leaving + landing)
        have["activations"] += full - saved  # computed again
        # The block's last layer goes first: its input, and so its gradient, is as wide as the MLP.
        wide, matrix = tokens * model.inner * element, model.inner * model.width * element
        if told(number):
            yield moment(f"backward of block {number}", activations=wide, whole_gradients=matrix, buffers=leaving)
        have["activations"] -= full
        grow(block)
        if told(number):
            yield moment(f"gradients of block {number}", buffers=leaving)
        if habits.packed and by_block:
            have["gathered"] -= gathered * habits.buffered  # freed before the gradients are packed, or after
            if told(number):
                yield moment(f"gradients of block {number} leave", buffers=unit)
            have["gathered"] -= gathered * (not habits.buffered)
            have["whole_gradients"] -= block
            have["gradients"] += block / n
            leaving = unit * habits.buffered
    grow(element * model.root - output)
    have["gathered"] -= sharded * root * habits.buffered
    yield moment("gradients of the root leave", buffers=root * habits.packed)
    have |= {"gradients": states.gradients, "gathered": 0.0, "whole_gradients": 0.0, "activations": 0.0}
    yield moment("optimizer")  # fused: it takes nothing for itself


def sent(strategy: str, model: Model, n: int, precision: Precision = FP32) -> float:
    """Bytes that each rank sends in one step, on an ideal ring; the textbook's 2 or 3 times (N-1)/N M_P."""
    return theory.volume(strategy, precision.states(model.parameters), n)
