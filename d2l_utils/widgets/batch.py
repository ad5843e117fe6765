"""B_global = B_micro x N_dp x N_accum, live and backwards."""

import html
import threading
from typing import Any

import ipywidgets
from matplotlib.figure import Figure

from d2l_utils import plots
from d2l_utils.batch import Batch, combinations, global_batch, nearest
from d2l_utils.widgets import parts


class BatchPanel:
    """Three knobs give the global batch; a wanted one on so many ranks gives every way to it."""

    def __init__(
        self,
        micro: int = 4,
        ranks: int = 8,
        accumulation: int = 16,
        *,
        target: int = 512,
        target_ranks: int = 6,
    ) -> None:
        self.knobs = {
            name: parts.knob(name, range(1, 65537), value)
            for name, value in (("micro_batch", micro), ("ranks", ranks), ("accumulation", accumulation))
        }
        self.wanted = {
            "batch": parts.knob("I want", range(1, 65537), target),
            "ranks": parts.knob("on ranks", range(1, 65537), target_ranks),
        }
        self.picture = ipywidgets.HTML()
        self.answer = ipywidgets.HTML()
        row = {"flex_flow": "row wrap", "align_items": "center"}
        self.view = ipywidgets.VBox([
            ipywidgets.HBox(list(self.knobs.values()), layout=row),
            self.picture,
            ipywidgets.HBox(list(self.wanted.values()), layout=row),
            self.answer,
        ])  # fmt: skip
        self.figure: Figure | None = None
        self._lock = threading.Lock()
        for control in self.knobs.values():
            control.observe(lambda change: self._forwards(), "value")
        for control in self.wanted.values():
            control.observe(lambda change: self._backwards(), "value")
        self._forwards()
        self._backwards()

    @property
    def size(self) -> int:
        """The global batch that the knobs make."""
        return global_batch(*(control.value for control in self.knobs.values()))

    @property
    def ways(self) -> list[Batch]:
        """Every exact combination for the wanted batch; empty when there is none."""
        return combinations(self.wanted["batch"].value, self.wanted["ranks"].value)

    def text(self) -> str:
        """Both halves in words."""
        micro, ranks, accumulation = (control.value for control in self.knobs.values())
        return (
            f"[batch-size panel]\n{micro} samples × {ranks} ranks × {accumulation} passes = {self.size}\n"
            f"{self._sentence()}"
        )

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> parts.Bundle:
        return parts.bundle(self.view, self.figure, self.text())

    def _forwards(self) -> None:
        with self._lock:
            self.figure = plots.batch(*(control.value for control in self.knobs.values()))
            self.picture.value = parts.image(self.figure)

    def _backwards(self) -> None:
        with self._lock:
            rows = "".join(
                f"<tr><td>{way.micro}</td><td>{way.ranks}</td><td>{way.accumulation}</td><td>{way.size}</td></tr>"
                for way in self.ways
            )
            names = ("micro-batch", "ranks", "accumulation", "global batch")
            head = "".join(f"<th>{name}</th>" for name in names)
            table = f'<table style="line-height:1.5;text-align:right"><tr>{head}</tr>{rows}</table>' if rows else ""
            self.answer.value = f'<div role="status">{html.escape(self._sentence())}</div>{table}'

    def _sentence(self) -> str:
        target, ranks = (control.value for control in self.wanted.values())
        if ways := self.ways:
            return f"{target} on {ranks} ranks: {len(ways)} way{'s' * (len(ways) != 1)}"
        close = " and ".join(str(size) for size in nearest(target, ranks))
        return f"{target} on {ranks} ranks: none, {ranks} does not divide {target}; nearest: {close}"
