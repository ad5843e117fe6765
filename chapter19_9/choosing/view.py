"""An answer of the advisor in pictures: the flow with the path that was taken, and each way's bytes on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from chapter19_9.choosing.cost import PARTS, Moment
from chapter19_9.choosing.text import headline
from d2l_utils import figure as style
from d2l_utils.flow import Box, flow
from d2l_utils.stacks import stacks

if TYPE_CHECKING:
    from chapter19_9.choosing.advisor import Answer

LOOKS = {
    "parameters": ("P", style.BLUE, ""),
    "gradients": ("G", style.ORANGE, "///"),
    "optimizer": ("O", style.GREEN, "..."),
    "gathered": ("gathered weights", style.SKY, "\\\\\\"),
    "whole_gradients": ("whole gradients", style.YELLOW, "xx"),
    "activations": ("activations", style.PURPLE, "--"),
    "loss": ("logits, loss", style.VERMILION, "++"),
    "buffers": ("buffers", style.GREY, "||"),
}


def flow_of(answer: Answer) -> Figure:
    """The questions in their order. Each box: a way to train, the GB that one rank would need, and the time
    its links are busy in a step."""
    question, chosen, asked = answer.question, answer.chosen, answer.asked
    lanes: dict[bool, list[Box]] = {}
    for option in answer.options:
        state = "yes" if option is chosen else "no" if option in asked else ""
        name = option.title.removesuffix(" + checkpointing")
        words = f"{name}\n{_number(option.peak.total / 1e9)} GB\nlink {_time(option.time.link)}"
        box = Box(words, state)
        lanes.setdefault(option.checkpointing, []).append(box)
    names = {False: "does one rank's part fit?", True: "and with activation checkpointing?"}
    start = f"{question.sizes.name} on {question.ranks:,} ranks, {question.room / 1e9:.3g} GB to fill on each"
    words = "another technique" if chosen else _wrapped(answer.next or "")
    return flow(
        [(names[lane], boxes) for lane, boxes in lanes.items()], start, Box(words, "" if chosen else "yes"),
        title=headline(answer) if chosen else "Nothing fits",
    )  # fmt: skip


def bars_of(answer: Answer) -> Figure:
    """Bytes on one rank at each way's fullest moment, against the device's memory: the ways of the last lane asked."""
    question, chosen, lane = answer.question, answer.chosen, answer.asked[-1].checkpointing
    options = [option for option in answer.options if option.checkpointing == lane]
    bars, fit = {option.title: parts_of(option.peak) for option in options}, sum(option.fits for option in options)
    return stacks(
        bars, LOOKS, limit=1e9 * question.memory, room=question.room, marked=chosen.title if chosen else None,
        title=f"{fit} of {len(options)} ways {'fits' if fit == 1 else 'fit'}", unit="GB",
    )  # fmt: skip


def beside_measured(predicted: Mapping[str, Moment], measured: Mapping[str, float], title: str | None = None) -> Figure:
    """The toy model: each strategy's predicted parts, and what its ranks really reached at their fullest."""
    return stacks({name: parts_of(moment) for name, moment in predicted.items()}, LOOKS, dots=measured, title=title)


def parts_of(moment: Moment) -> dict[str, float]:
    return {part: getattr(moment, part) for part in PARTS}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else style.short(value)


def _time(seconds: float) -> str:
    return f"{style.short(seconds)} s" if seconds >= 1 else f"{style.short(1e3 * seconds)} ms"


def _wrapped(words: str) -> str:
    head, _, rest = words.partition(": ")
    return f"{head}:\n{rest}" if rest else words
