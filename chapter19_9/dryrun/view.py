"""A dry run in a picture: bytes on one rank, part upon part, through the step."""

from __future__ import annotations

from itertools import groupby

from matplotlib.figure import Figure

from chapter19_9.dryrun.outcome import NAMES, PARTS, DryRun
from d2l_utils import figure as style
from d2l_utils.layers import layers

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
