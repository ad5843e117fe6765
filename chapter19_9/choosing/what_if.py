"""What would change the advisor's answer, computed by asking it again; and what comes next when nothing fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from chapter19_9 import theory
from chapter19_9.choosing import lines
from chapter19_9.choosing.advisor import MOST_RANKS, Answer, Option, Question, weigh
from chapter19_9.strategies import get

MOST = 2**24  # where looking for what fits ends


def least(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The smallest number from low to high that fits, where all above one that fits do; None when none does."""
    if low > high or not fits(high):
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def fewest_ranks(question: Question, strategy: str, checkpointing: bool) -> int | None:
    """The smallest number of ranks, from 2, at which that way fits; None when it fits at none."""

    def fits(n: int) -> bool:
        return weigh(replace(question, devices=n, nodes=1), strategy, checkpointing).fits

    return least(fits, 2, MOST_RANKS)


def largest(question: Question, field: str, strategy: str, checkpointing: bool) -> int:
    """The largest ``micro_batch`` or ``length`` at which that way fits; 0 when it fits at none."""
    most = int(min(MOST, question.sizes.longest)) if field == "length" else MOST

    def fails(value: int) -> bool:
        changed: dict[str, Any] = {field: value}
        return not weigh(replace(question, **changed), strategy, checkpointing).fits

    broken = least(fails, 1, most)
    return most if broken is None else broken - 1


def beyond(question: Question, last: Option) -> str:
    """What to look at when not even ``last`` fits: more devices, a smaller micro-batch, or the technique that attacks
    the largest part of what one sequence takes."""
    if question.ranks == 1:
        sharded = fewest_ranks(question, "fsdp2", True)
        if sharded:
            return f"more devices: with FSDP2 and checkpointing it fits on {sharded}"
    if question.micro_batch > 1 and (fits := largest(question, "micro_batch", last.strategy, True)):
        return f"a micro-batch of {fits}, with gradient accumulation"
    one = weigh(replace(question, micro_batch=1), last.strategy, True).peak
    parts = {
        "tensor parallelism: a single layer is too large": one.gathered + one.whole_gradients + one.buffers,
        "sequence or context parallelism: the activations of one sequence are too large": one.activations + one.loss,
        "more devices to shard over, or pipeline and tensor parallelism": sum(
            getattr(one, state) for state in theory.STATES
        ),
    }
    return max(parts, key=lambda name: parts[name])


def changes(answer: Answer) -> list[str]:
    """Numbers at which the answer becomes another: ranks, micro-batch, length, checkpointing, device memory."""
    question, chosen = answer.question, answer.chosen
    way = chosen or answer.options[-1]
    passed = [option for option in answer.asked if option is not chosen and option.checkpointing == way.checkpointing]
    found = []
    for option in dict.fromkeys([way, *passed]):
        if question.ranks > 1 and get(option.strategy).optimizer == "sharded":
            n = fewest_ranks(question, option.strategy, option.checkpointing)
            found.append(f"{option.title}: {'at no number of ranks' if n is None else f'from {n:,} ranks on'}")
    if chosen:
        for field, words in (("micro_batch", "micro-batch"), ("length", "length")):
            most = largest(question, field, chosen.strategy, chosen.checkpointing)
            all_of_them = ", the positions that it has learned" * (field == "length" and most == question.sizes.longest)
            found.append(f"{chosen.title}: {words} up to {most:,}{all_of_them}")
    lighter = next((option for option in answer.options if option.checkpointing and option.fits), None)
    if chosen and lighter and passed and not chosen.checkpointing and lighter.strategy != chosen.strategy:
        found.append(f"with checkpointing, {lines.SHORT[lighter.strategy]} fits")
    first = answer.options[0]
    for option in dict.fromkeys([first, way]):
        if not option.fits:
            found.append(f"{option.title}: on devices of {memory_for(question, option):,} GB")
    return found


def memory_for(question: Question, option: Option) -> int:
    """GB of a device on which it fits."""
    return math.ceil(option.peak.total / 1e9 / (1 - question.reserve))
