"""The cockpit: every strategy behind knobs, trained again on real ranks at each released change.

    panel = Cockpit(strategy="fsdp2", bandwidth="20 MB/s")
    panel

Shown are memory beside its formula, bytes sent beside theirs, the timeline, the loss, and the lifecycle player; the
run before stays beside the run that is on. A lesson takes the knobs and pictures that it is about:

    Cockpit(knobs=["strategy", "bandwidth"], shows=["time"], strategy="zero3", bandwidth="80 MB/s")
 ``panel.result.run`` is an ordinary run: ``panel.save("train.py")`` keeps its
script, and the panel shows script and torchrun command.
"""

from __future__ import annotations

import html
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ipywidgets
from matplotlib.figure import Figure

from chapter19_9 import theory
from chapter19_9.checks import check_batch
from chapter19_9.cockpit_view import PICTURES, SHOWS, sheet
from chapter19_9.combining import PRECISIONS, check
from chapter19_9.lifecycle import frames
from chapter19_9.strategies import STRATEGIES
from chapter19_9.theory import STATES, States, fullest
from chapter19_9.train import train
from d2l_utils import launch
from d2l_utils.launching.launcher import Run
from d2l_utils.link import Link
from d2l_utils.transformer import TransformerConfig
from d2l_utils.widgets import LivePanel, ShardLifecycle

__all__ = ["Cockpit", "Flown"]

STEPS = 5
LENGTH = 32
BANDWIDTHS = {"none": None, "320 MB/s": 320e6, "80 MB/s": 80e6, "20 MB/s": 20e6, "5 MB/s": 5e6}
LATENCY = 5e-5  # seconds a hop, with any bandwidth
LARGE = "<style>.d2l-large { zoom: 1.6 }</style>"
KNOBS: dict[str, Any] = {
    "strategy": list(STRATEGIES),
    "batch": (8, 16, 24, 48),
    "accumulation": (1, 2, 3, 4, 6),
    "blocks": (1, 2, 4, 8),
    "width": (32, 64, 96, 128),
    "precision": list(PRECISIONS),
    "checkpointing": False,
    "bandwidth": list(BANDWIDTHS),
}
START = {"strategy": "ddp", "batch": 24, "blocks": 2, "width": 64}


@dataclass(frozen=True)
class Flown:
    """One run of the cockpit: what the knobs said, and the run with each rank's ``Result``."""

    values: Mapping[str, Any]
    run: Run

    def name(self, other: Flown | None = None) -> str:
        """Strategy and ranks, and what else is not as in another run."""
        apart = [knob for knob in self.values if other and self.values[knob] != other.values[knob]]
        more = [f"{knob} {self.values[knob]}" for knob in apart if knob not in ("strategy", "world_size")]
        if other and self.run.device != other.run.device:
            more.append(f"on the {'CPU' if self.run.device == 'cpu' else 'GPU'}")
        return "\n".join([f"{self.values['strategy']}, N = {self.run.world_size}", *more])

    @property
    def config(self) -> TransformerConfig:
        return config(self.values["blocks"], self.values["width"])

    @property
    def held(self) -> States:
        """Model states at rest on the fullest rank."""
        return fullest(result.held for result in self.run.results)

    @property
    def held_formula(self) -> States:
        shapes = theory.shapes(self.config)
        precision = self.values["precision"]
        return fullest(theory.exact_memory(self.values["strategy"], shapes, self.run.world_size, precision))

    @property
    def sent(self) -> float:
        """Logical bytes that a rank sent in the recorded step, mean over the ranks."""
        events = [event for result in self.run.results for event in result.recording.events]
        return sum(event.sent_bytes or 0 for event in events) / self.run.world_size

    @property
    def sent_formula(self) -> float:
        values, shapes = self.values, theory.shapes(self.config)
        return theory.exact_volume(
            values["strategy"], shapes, self.run.world_size, values["accumulation"], precision=values["precision"]
        )

    @property
    def wire(self) -> float | None:
        """What the kernel counted on a rank's connections in that step; None where it cannot be read."""
        counted = [result.recording.wire_bytes for result in self.run.results]
        return None if None in counted else sum(counted) / len(counted)

    @property
    def peak(self) -> int:
        return max(result.peak for result in self.run.results)

    @property
    def saved(self) -> int:
        """Bytes that forward saved for backward, without weights."""
        return max(result.saved for result in self.run.results)

    @property
    def seconds(self) -> float:
        """The step before the recorded ones, on the slowest rank."""
        return max(result.seconds[STEPS - 3] for result in self.run.results)


def config(blocks: int, width: int) -> TransformerConfig:
    return TransformerConfig(layers=blocks, width=width, length=LENGTH)


def fly(world_size: int, stop: threading.Event | None = None, *, film: bool = True, **values: Any) -> Flown:
    """One launch with what the knobs say; film: with a step recorded for the player. ValueError that begins with a
    knob's name, before any process starts, for what does not go together."""
    check(values["strategy"], precision=values["precision"], accumulation=values["accumulation"])
    check_batch(values["batch"], world_size, values["accumulation"])
    simple = values["precision"] == "fp32" and values["accumulation"] == 1 and not values["checkpointing"]
    bandwidth = BANDWIDTHS[values["bandwidth"]]
    link = None if bandwidth is None else Link(bandwidth, LATENCY)
    run = launch(
        train,
        world_size=world_size,
        device=None if link is None else "cpu",  # a link is pretended for CPU ranks
        output="quiet",
        stop=stop,
        strategy=values["strategy"],
        config=config(values["blocks"], values["width"]),
        steps=STEPS,
        batch=values["batch"],
        accumulation=values["accumulation"],
        precision=values["precision"],
        checkpointing=values["checkpointing"],
        link=link,
        record_step=STEPS - 2,
        allocations=True,
        lifecycle_step=STEPS - 1 if simple and film else None,
        agreement=False,
    )
    return Flown({**values, "world_size": world_size}, run)


class Cockpit(LivePanel):
    """The panel. ``start``: first values of the knobs; knobs: names of those to show, in their order, the others
    keep their first value; shows: the pictures, in their order; world_sizes: choices of that knob.

    Raises ValueError for a knob, a picture or a value that there is not.
    """

    def __init__(
        self,
        *,
        knobs: Sequence[str] = tuple(KNOBS),
        shows: Sequence[str] = SHOWS,
        world_sizes: Sequence[int] = (1, 2, 3, 4),
        **start: Any,
    ) -> None:
        pictures = [name for name in shows if name != "player"]
        if not pictures or {*pictures} - {*PICTURES}:
            raise ValueError(f"shows is {list(shows)!r}: it must be some of {', '.join(PICTURES)}, and perhaps player")
        if unknown := {*knobs, *start} - {*KNOBS, "world_size"}:
            raise ValueError(f"{', '.join(sorted(unknown))}: the knobs are {', '.join(['world_size', *KNOBS])}")
        first = {name: _first(choices) for name, choices in KNOBS.items()} | START | start
        if first["bandwidth"] not in BANDWIDTHS:  # what the others may be, those say for whom they are
            raise ValueError(f"bandwidth is {first['bandwidth']!r}: it must be one of {', '.join(BANDWIDTHS)}")
        if not isinstance(first["checkpointing"], bool):
            raise ValueError(f"checkpointing is {first['checkpointing']!r}: it must be True or False")
        self._fixed = {name: value for name, value in first.items() if name not in (*knobs, "world_size")}
        self._pictures, self._films = pictures, "player" in shows
        self.before: Flown | None = None
        self._now: Flown | None = None
        self._film: Any = None
        self.player = ipywidgets.VBox()
        self.script = ipywidgets.HTML()
        self.large = ipywidgets.ToggleButton(description="Large type", tooltip="for a projector")
        shown = {name: KNOBS[name] for name in knobs if name in KNOBS}
        super().__init__(
            self._fly,
            self._drawn,
            shown,
            world_sizes=world_sizes,
            start={name: value for name, value in first.items() if name in (*shown, "world_size")},
            title="cockpit",
            describe=_told,
        )
        self.view.children = [ipywidgets.HTML(LARGE), self.large, *self.view.children, self.player, self.script]
        self.large.observe(self._enlarge, "value")

    def save(self, target: str | Path) -> Path:
        """Keep the script of the run that is shown; its docstring is the torchrun command."""
        return self.result.run.save(target)

    def close(self) -> None:
        super().close()
        for widget in (*self.player.children, self.player, self.script, self.large):
            widget.close()

    def _fly(self, world_size: int, stop: threading.Event, **values: Any) -> Flown:
        return fly(world_size, stop, film=self._films, **self._fixed, **values)

    def _drawn(self, flown: Flown) -> Figure:
        """The whole sheet; also changes player and script, and keeps the run before."""
        if flown is not self._now:
            self.before, self._now = self._now, flown
            if self._films:
                self._replay(flown)
            self.script.value = _as_script(flown.run)
        return self._sheet(flown, self.large.value)

    def _sheet(self, flown: Flown, large: bool) -> Figure:
        return sheet(flown, self.before, self._pictures, columns=1 if large or len(self._pictures) < 3 else 2)

    def _replay(self, flown: Flown) -> None:
        results, last = flown.run.results, self._film
        self._film = None if results[0].lifecycle is None else frames([result.lifecycle for result in results])
        old = self.player.children
        if self._film is None:
            why = "No lifecycle: it is drawn for fp32, one pass a step, without checkpointing."
            self.player.children = [ipywidgets.HTML(f"<p>{why}</p>")]
        else:
            self.player.children = [ShardLifecycle(*([last] if last is not None else []), self._film)]
        for widget in old:
            widget.close()

    def _enlarge(self, change: Any) -> None:
        (self.view.add_class if change["new"] else self.view.remove_class)("d2l-large")
        if self._now is not None:
            self.show(self._sheet(self._now, change["new"]))


def _as_script(run: Run) -> str:
    text = html.escape(run.script.read_text(encoding="utf-8"))
    return (
        "<details><summary>this run as a script, and its command</summary>"
        f'<pre style="white-space:pre-wrap">{html.escape(run.command)}</pre>'
        f'<pre style="max-height:20em;overflow:auto;line-height:1.35">{text}</pre></details>'
    )


def _told(flown: Flown) -> str:
    """What is the same on every machine."""
    held = all(getattr(flown.held, name) == getattr(flown.held_formula, name) for name in STATES)
    sent = abs(flown.sent - flown.sent_formula) <= 1e-9 * max(flown.sent_formula, 1.0)
    return f"{flown.values['strategy']}: states at rest equal the formula: {held}, bytes sent: {sent}"


def _first(choices: Any) -> Any:
    return (
        choices if isinstance(choices, bool) else next(iter(choices.values() if isinstance(choices, dict) else choices))
    )
