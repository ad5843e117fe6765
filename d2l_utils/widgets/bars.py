"""Stacked P, G, O bars behind sliders: a moved knob is drawn at once, in the browser, from values that are all there.

    MemorySlider({"ranks": [1, 2, 4]}, lambda ranks: {"copies": (4, 4, 8), "shards": (4 / ranks, 4 / ranks, 8 / ranks)})

It draws what it is given and knows nothing of where the formulas come from.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from d2l_utils import figure as style
from d2l_utils import plots
from d2l_utils.widgets.stored import stored

__all__ = ["MemorySlider"]

MOST = 20_000  # combinations of the knobs: all of them go to the browser
Bars = Mapping[str, Any]  # (parameters, gradients, optimizer) in bytes by bar; also objects with these attributes


class MemorySlider(anywidget.AnyWidget):
    """Bars for every combination of the knobs, and measured points on those that have some.

    Arguments:
        knobs: {name: values} or {name: {label: value}}; numbers in rising order make a slider, anything else a list
            to choose from. At most 20,000 combinations.
        formula: ``formula(**{name: value})`` gives {bar: (P, G, O)} in bytes; the same bars, whatever the values.
        points: the same for what was measured; may cover some bars, or none (then {} or None).
        start: first values by knob; where the reader moves them is the browser's own business.
        title: names the widget.
    Raises:
        ValueError: no knob, a knob without values, a start that is not among them, too many combinations, other bars
            for other values, or a point without a bar.
    """

    _esm = Path(__file__).with_name("bars.js")
    title: Any = traitlets.Unicode().tag(sync=True)
    knobs: Any = traitlets.List().tag(sync=True)
    bars: Any = traitlets.List().tag(sync=True)
    parts: Any = traitlets.List().tag(sync=True)
    mark: Any = traitlets.Unicode("measured").tag(sync=True)
    values: Any = traitlets.List().tag(sync=True)
    points: Any = traitlets.List().tag(sync=True)
    at: Any = traitlets.List().tag(sync=True)

    def __init__(
        self,
        knobs: Mapping[str, Any],
        formula: Callable[..., Bars],
        points: Callable[..., Bars | None] | None = None,
        *,
        start: Mapping[str, Any] | None = None,
        title: str = "memory",
    ) -> None:
        choices = {name: _choices(name, allowed) for name, allowed in knobs.items()}
        if not choices:
            raise ValueError("knobs is empty: it needs at least one")
        combinations = list(itertools.product(*(labels.values() for labels in choices.values())))
        if len(combinations) > MOST:
            raise ValueError(f"knobs have {len(combinations):,} combinations: at most {MOST:,}")
        self._choices = {name: list(labels.values()) for name, labels in choices.items()}
        named = [dict(zip(choices, values, strict=True)) for values in combinations]
        drawn = [_triples(formula(**values)) for values in named]
        marks = [_triples((points(**values) if points else None) or {}) for values in named]
        bars = list(drawn[0])
        for values, found, measured in zip(named, drawn, marks, strict=True):
            if list(found) != bars:
                raise ValueError(
                    f"formula gives the bars {list(found)!r} for {values!r}, but {bars!r} for {named[0]!r}"
                )
            if unknown := measured.keys() - found.keys():
                raise ValueError(f"points gives {sorted(unknown)!r} for {values!r}; the bars are {bars!r}")
        super().__init__(
            title=title,
            knobs=[
                {"name": name.replace("_", " "), "labels": list(labels), "slider": _rising(list(labels.values()))}
                for name, labels in choices.items()
            ],
            bars=bars,
            parts=[label.split("  ") for label, _, _ in plots.PARTS.values()],
            values=[list(found.values()) for found in drawn],
            points=[[measured.get(bar) for bar in bars] for measured in marks],
        )
        self.move(**(start or {}))

    def move(self, **values: Any) -> None:
        """Put knobs to these values; the others stay. ValueError for a knob or a value that there is not."""
        at = list(self.at) or [0] * len(self._choices)
        for name, value in values.items():
            if name not in self._choices:
                raise ValueError(f"{name} is no knob: they are {list(self._choices)!r}")
            if value not in self._choices[name]:
                raise ValueError(f"{name} is {value!r}; allowed: {self._choices[name]!r}")
            at[list(self._choices).index(name)] = self._choices[name].index(value)
        self.at = at

    @property
    def shown(self) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        """(formula, measured) by bar, where Python put the knobs."""
        row = 0
        for position, knob in zip(self.at, self.knobs, strict=True):
            row = row * len(knob["labels"]) + position
        bars, points = (zip(self.bars, table[row], strict=True) for table in (self.values, self.points))
        return dict(bars), {bar: point for bar, point in points if point}

    def picture(self) -> style.Picture:
        """The same as a figure."""
        bars, points = self.shown
        return plots.memory_bars(bars, points or None, mark=self.mark, title=f"{self.title}: {self._where()}")

    def text(self) -> str:
        """The formula in words; nothing that was measured."""
        sums = {bar: sum(triple) for bar, triple in self.shown[0].items()}
        scale, unit = style.unit_for(sums.values())
        told = ", ".join(f"{bar} {style.short(total / scale)} {unit}" for bar, total in sums.items())
        return f"[{self.title}; knobs: {', '.join(knob['name'] for knob in self.knobs)}]\n{self._where()}: {told}"

    def _where(self) -> str:
        pairs = zip(self.knobs, self.at, strict=True)
        return ", ".join(f"{knob['name']} {knob['labels'][position]}" for knob, position in pairs)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        made = super()._repr_mimebundle_(**options)
        data, metadata = made if isinstance(made, tuple) else (made or {}, {})
        names = ("title", "knobs", "bars", "parts", "mark", "values", "points", "at")
        alone = stored("bars.js", **{name: getattr(self, name) for name in names})
        picture, text = self.picture(), self.text()
        told = {"image/png": {"alt": style.described(picture, text)}}
        return {**data, **style.bundle(picture), "text/plain": text}, {**metadata, **alone, **told}


def _choices(name: str, allowed: Any) -> dict[str, Any]:
    labels = dict(allowed) if isinstance(allowed, Mapping) else {str(value): value for value in allowed}
    if not labels:
        raise ValueError(f"knobs[{name!r}] is {allowed!r}: it needs at least one value")
    return labels


def _rising(values: Sequence[Any]) -> bool:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
    return numbers and all(a < b for a, b in itertools.pairwise(values))


def _triples(bars: Bars) -> dict[str, list[float]]:
    """[P, G, O] by bar, as plain numbers; a state that is not there is 0."""
    return {bar: [float(value or 0) for value in plots.parts(held)] for bar, held in bars.items()}
