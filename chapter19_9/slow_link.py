"""Step times behind a slow link: predicted from one recorded step, and measured.

    runs = launch(trained, world_size=2, strategy="ddp", links=[FREE, Link(20e6)], steps=6, batch=4).results[0]
    plan(runs[0]).seconds(Link(20e6)), runs[1].step_seconds

A plan is what one rank computed, and when in its computing it asked for each collective and needed it. The link's part
is ``Link.seconds``, and one thing at a time. So a prediction knows nothing of the slow run: with a free link it is the
step that was recorded; with a slow one it says which collectives still hide and which are waited for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from chapter19_9.train import DEFAULT, Result, train
from d2l_utils.events import Recording, difference, union
from d2l_utils.link import Link
from d2l_utils.transformer import TransformerConfig

__all__ = ["FREE", "Asked", "Plan", "Slowed", "crossover", "plan", "trained"]

FREE = Link(math.inf)  # the same way through the throttle, at no charge


@dataclass(frozen=True)
class Asked:
    """A collective: asked for when ``at`` seconds had been computed, needed after ``by`` seconds of computing. real:
    seconds that it took by itself, from its start on the link to its end."""

    name: str
    bytes: int
    group_size: int
    at: float
    by: float
    real: float


@dataclass(frozen=True)
class Plan:
    """One rank's step without a link: seconds of computing, and its collectives in the order of their launch."""

    computing: float
    asked: tuple[Asked, ...]

    def seconds(self, link: Link) -> float:
        """The step's length behind a link: computing goes on until it needs what is not there yet."""
        moments = [(one.at, 0, one) for one in self.asked] + [(one.by, 1, one) for one in self.asked]
        waited, free_from, there = 0.0, 0.0, dict[int, float]()
        # at equal times what was asked first is needed first, and a wait comes after its own launch
        for moment, needed, one in sorted(moments, key=lambda m: (m[0], self._order(m[2]), m[1])):
            now = moment + waited
            if needed:
                waited += max(0.0, there[id(one)] - now)
            else:
                free_from = max(free_from, now) + link.seconds(one.name, one.bytes, one.group_size)
                there[id(one)] = free_from + one.real
        return self.computing + waited

    def charged(self, link: Link) -> float:
        """Seconds that the link is busy in a step."""
        return sum(link.seconds(one.name, one.bytes, one.group_size) for one in self.asked)

    def _order(self, one: Asked) -> int:
        return next(at for at, other in enumerate(self.asked) if other is one)


@dataclass(frozen=True)
class Slowed:
    """One training behind one link. step_seconds: median, slowest part of the warm-up and the recorded step left out.
    charged: seconds that the link was busy in the recorded step."""

    link: Link
    step_seconds: float
    charged: float
    recording: Recording
    losses: list[float]


def trained(
    strategy: str, links: Sequence[Link], config: TransformerConfig = DEFAULT, *, steps: int = 6, **settings: object
) -> list[Slowed]:
    """Train behind each link, on every rank of the process group; the last step is recorded. Settings: ``train``'s."""
    found = []
    for link in links:
        result: Result = train(strategy, config, steps=steps, link=link, record_step=steps - 1, **settings)  # type: ignore[arg-type]
        sent = [e for e in result.recording.events if e.kind == "collective"]
        charged = sum(link.seconds(e.name, e.bytes, e.group_size) for e in sent)
        found.append(Slowed(link, median(result.seconds[2:-1]), charged, result.recording, result.losses))
    return found


def plan(slowed: Slowed) -> Plan:
    """The plan of a training behind ``FREE``. A recorded step is a little longer than the others: all its times are
    shortened alike."""
    events, step = slowed.recording.events, slowed.recording.seconds or 0.0
    waits = union((e.start, e.end) for e in events if e.kind == "wait" and e.end is not None)
    backward = max((e.end or 0.0 for e in events if e.kind == "backward"), default=step)

    def computed(moment: float) -> float:
        return sum(end - start for start, end in difference([(0.0, moment)], waits))

    asked = []
    for e in events:
        if e.kind == "collective" and e.end is not None:
            # the wait that returned with it; where nobody waited, DDP would have at the end of backward
            waited = min((start for start, end in waits if end >= e.end - 1e-6), default=max(backward, e.start))
            by = computed(max(waited, e.start))
            asked.append(
                (e.name, e.bytes or 0, e.group_size or 1, computed(e.start), by, e.end - (e.backend_start or e.start))
            )
    scale = 1.0
    whole = computed(step)
    free = Plan(whole, tuple(Asked(*one) for one in asked)).seconds(FREE)
    scale = slowed.step_seconds / free if free else 1.0
    return Plan(whole * scale, tuple(Asked(n, b, g, at * scale, by * scale, r * scale) for n, b, g, at, by, r in asked))


def crossover(one: Plan, other: Plan, latency: float = 0.0, low: float = 1e5, high: float = 1e12) -> float | None:
    """The bandwidth, in bytes a second, below which ``one`` is the faster and above which ``other`` is; None when one
    of them is the faster at both ends."""

    def ahead(bandwidth: float) -> float:
        link = Link(bandwidth, latency)
        return other.seconds(link) - one.seconds(link)

    if ahead(low) <= 0 or ahead(high) >= 0:
        return None
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if ahead(middle) > 0 else (low, middle)
    return math.sqrt(low * high)
