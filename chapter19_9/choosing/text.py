"""An answer of the advisor in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chapter19_9.choosing.cost import PARTS
from d2l_utils.memory import format_bytes

if TYPE_CHECKING:
    from chapter19_9.choosing.advisor import Answer, Option

NAMES = {
    "parameters": "P", "gradients": "G", "optimizer": "O", "gathered": "gathered weights",
    "whole_gradients": "whole gradients", "activations": "activations", "loss": "logits and loss", "buffers": "buffers",
}  # fmt: skip


def told(answer: Answer) -> str:
    """Model, recommended start, what each way needs, its parts, the link, what would change, the lines."""
    q, chosen = answer.question, answer.chosen
    text = [
        f"{q.sizes.name}: {q.sizes.parameters / 1e9:,.2f} billion parameters [{q.sizes.source}]",
        f"{q.ranks} ranks ({q.nodes} x {q.devices}), {q.memory:g} GB each, {q.room / 1e9:.1f} GB to fill; "
        f"{q.tokens:,} tokens a rank, {q.precision}",
        "",
        headline(answer),
        "",
        *(_line(option, option is chosen) for option in answer.options),
        "",
    ]
    way = chosen or answer.options[-1]
    text.append(f"{way.title}, fullest at: {way.peak.name}")
    text += [
        f"  {NAMES[part]:17} {format_bytes(round(getattr(way.peak, part))):>10}"
        for part in PARTS
        if getattr(way.peak, part)
    ]
    without, with_ = answer.activations
    text += [
        f"  saved activations {format_bytes(round(without))}, with checkpointing {format_bytes(round(with_))}",
        f"  on the link {format_bytes(round(way.sent))} a step, {way.time.link:.3g} s",
        f"  a step {way.time.seconds:.3g} s, of which {way.time.computing:.3g} s computing",
        "",
        "What would change the answer:",
        *(f"  {change}" for change in answer.changes),
        "",
        "Assumed:",
        *(f"  {words}" for words in answer.assumptions),
    ]
    if chosen:
        text += ["", *answer.lines.splitlines()]
    return "\n".join(text)


def headline(answer: Answer) -> str:
    """The finding in a line."""
    chosen = answer.chosen
    if chosen is None:
        return f"Nothing fits. Next: {answer.next}"
    return f"Start with {chosen.title} ({chosen.strategy}): {format_bytes(round(chosen.peak.total))} of {answer.question.memory:g} GB"


def _line(option: Option, taken: bool) -> str:
    mark = "->" if taken else "  "
    fits = "fits" if option.fits else "does not fit"
    return f"{mark} {option.title:27} {option.peak.total / 1e9:>10,.1f} GB  {fits:12}  computes {option.time.efficiency:.0%} of a step"


def brief(answer: Answer) -> str:
    """For a panel: what to start with, what it takes, what would change it, and the lines."""
    way = answer.chosen or answer.options[-1]
    parts = ", ".join(
        f"{NAMES[part]} {format_bytes(round(getattr(way.peak, part)))}" for part in PARTS if getattr(way.peak, part)
    )
    without, with_ = answer.activations
    text = [
        headline(answer),
        f"{way.title}, fullest at {way.peak.name}: {parts}",
        f"saved activations: {format_bytes(round(without))}, with checkpointing {format_bytes(round(with_))}",
        f"on the link: {format_bytes(round(way.sent))} from each rank in a step",
        "what would change the answer:",
        *(f"  {change}" for change in answer.changes),
    ]
    return "\n".join([*text, *(["", answer.lines.rstrip()] if answer.chosen else [])])
