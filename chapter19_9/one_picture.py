"""All strategies in one table, from ``compare``'s rows: as text that is the same on every machine, and as a picture.

rows = compare(world_sizes=(4,))
print(text(rows))
figure(rows)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from chapter19_9.choosing.cost import Moment
from chapter19_9.compare import STATES, Row
from chapter19_9.theory import States
from d2l_utils.figure import short
from d2l_utils.grid import Cell, grid, judged

__all__ = ["figure", "text"]

_SHORT = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS", "broadcast": "B"}


def text(rows: Sequence[Row]) -> str:
    """What does not depend on the machine: bytes of states, bytes sent, collectives; in kB (1e3 bytes).

    Behind a number stands ``=`` where it is the formula's to the byte, else the formula's and how far off it is.
    """
    head = ("strategy", "P", "G", "O", "P between", "G between", "sends", "collectives")
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        pairs = [(getattr(row.held, name), getattr(row.held_formula, name)) for name in STATES]
        pairs += [_pair(row.between, row.between_formula, name) for name in STATES[:2]]
        pairs.append((row.sent, row.sent_formula))
        known = row.counts_formula
        counted = "" if known is None else "=" if row.counts == known else f"not {_counted(known)}"
        lines.append(
            (row.strategy, *(_written(*pair) for pair in pairs), f"{_counted(row.counts) or 'none'} {counted}")
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join(
            cell.ljust(width) if at in (0, len(head) - 1) else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join(aligned)


def figure(rows: Sequence[Row], peaks: Mapping[str, Moment] | None = None, *, title: str | None = None) -> Figure:
    """The whole table in kB per rank, with what depends on the machine: peak, the kernel's bytes, step time.

    peaks: the fullest moment by strategy, as ``choosing.cost`` has it, where it has one: gathered weights count as P,
    whole gradients as G.
    """
    columns = ["P", "G", "O", "P", "G", "all", "P", "G", "logical", "on the\nwire", "collectives", "ms"]
    groups = {"at rest": 3, "after forward": 2, "at the peak": 3, "sent in a step": 3, "step": 1}
    cells = {}
    for row in rows:
        line = [judged(getattr(row.held, name), getattr(row.held_formula, name), _kb) for name in STATES]
        line += [_cell(*_pair(row.between, row.between_formula, name)) for name in STATES[:2]]
        most, expected = (peaks or {}).get(row.strategy), None
        if most is not None:
            gradients = most.gradients + most.whole_gradients
            expected = States(most.parameters + most.gathered, gradients, most.optimizer)
        line += [judged(row.peak, None if most is None else most.total, _kb)]
        line += [_cell(*_pair(row.at_peak, expected, name)) for name in STATES[:2]]
        line += [judged(row.sent, row.sent_formula, _kb)]
        line += [Cell("-") if row.wire is None else judged(row.wire, row.on_gloo, _kb)]
        mark = "measured" if row.counts_formula is None else "exact" if row.counts == row.counts_formula else "off"
        line += [Cell(_counted(row.counts, 2) or "-", _counted(row.counts_formula or {}), mark)]
        line += [Cell("-" if row.seconds is None else f"{row.seconds * 1e3:.0f}")]
        cells[row.strategy if row.world_size > 1 else f"{row.strategy} (1 rank)"] = line
    note = (
        "kB (1e3 bytes) per rank; O is the same at all three moments. AR all-reduce, RS reduce-scatter, AG all-gather, "
    )
    note += "B broadcast"
    if any(row.wire is None for row in rows):
        note += ". No bytes on the wire: no socket carried them, or nothing counts them here"
    return grid(cells, columns, groups=groups, title=title, note=note)


def _pair(states: States | None, formula: States | None, name: str) -> tuple[float | None, float | None]:
    return getattr(states, name, None), getattr(formula, name, None)


def _cell(measured: float | None, formula: float | None) -> Cell:
    return Cell("-") if measured is None else judged(measured, formula, _kb)


def _kb(count: float) -> str:
    return short(count / 1e3)


def _counted(counts: Mapping[str, int], a_line: int = 9) -> str:
    parts = [f"{count} {_SHORT.get(name, name)}" for name, count in sorted(counts.items())]
    return "\n".join(" ".join(parts[at : at + a_line]) for at in range(0, len(parts), a_line))


def _written(measured: float | None, formula: float | None) -> str:
    if measured is None or formula is None:
        return "-"
    same = abs(measured - formula) <= 1e-9 * max(abs(formula), 1.0)
    off = f"not {formula / 1e3:,.1f}: {measured / formula - 1:+.1%}" if formula else "not 0"
    return f"{measured / 1e3:,.1f} {'=' if same else off}"
