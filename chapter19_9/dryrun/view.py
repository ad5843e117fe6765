"""A dry run in a picture: bytes on one rank, part upon part, through the step."""

from __future__ import annotations

from itertools import groupby

from matplotlib.figure import Figure

from chapter19_9.choosing import cost
from chapter19_9.dryrun.outcome import NAMES, PARTS, DryRun
from d2l_utils import figure as style
from d2l_utils.layers import layers
from d2l_utils.stacks import stacks

LOOKS = {
    "parameters": (NAMES["parameters"], style.BLUE, ""),
    "optimizer": (NAMES["optimizer"], style.GREEN, "..."),
    "gradients": (NAMES["gradients"], style.ORANGE, "///"),
    "gathered": (NAMES["gathered"], style.SKY, "\\\\\\"),
    "activations": (NAMES["activations"], style.PURPLE, "--"),
    "buffers": (NAMES["buffers"], style.GREY, "||"),
}


def curve_of(found: DryRun, unit: str | None = None) -> Figure:
    """Each stretch of the step at its fullest and as it ends; the peak is marked and named."""
    phases = [(phase, len(list(some))) for phase, some in groupby(found.curve, key=lambda moment: moment.phase)]
    columns = {part: [getattr(moment, part) for moment in found.curve] for part in PARTS}
    plan = found.plan
    scale, unit = style.unit_for([found.peak.total], unit)
    title = f"{plan.sizes.name}, {plan.strategy}, rank {plan.rank} of {plan.world_size:,}: "
    return layers(
        columns, LOOKS, phases=phases, marked=(found.curve.index(found.peak), found.peak.name),
        title=f"{title}{style.short(found.peak.total / scale)} {unit} at the peak", unit=unit,
    )  # fmt: skip


def beside_advisor(found: DryRun, told: cost.Moment, title: str | None = None) -> Figure:
    """The fullest moment, as the advisor adds it up and as the code had it; in the dry run's parts."""
    added = {
        "parameters": told.parameters,
        "optimizer": told.optimizer,
        "gradients": told.gradients + told.whole_gradients,
        "gathered": told.gathered,
        "activations": told.activations + told.loss,
        "buffers": told.buffers,
    }
    ran = {part: float(getattr(found.peak, part)) for part in PARTS}
    return stacks({"advisor": added, "dry run": ran}, LOOKS, title=title)
