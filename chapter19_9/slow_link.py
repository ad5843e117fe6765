"""Step times behind a slow link: predicted from one recorded step, and measured.

    ways = {"DDP": {"strategy": "ddp"}}
    free, slow = launch(trained, world_size=2, ways=ways, links=[FREE, Link(20e6)], batch=4).results[0]["DDP"]
    plan(free).seconds(slow.link), slow.step_seconds

A plan is what one rank computed, when in its computing it asked for each collective and needed it, and what the
backend itself took. The link's part is ``Link.seconds``. Link and backend each do one thing at a time. So a prediction
knows nothing of the slow run: with a free link it is the step that was measured; with a slow one it says which
collectives still hide and which are waited for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chapter19_9.train import DEFAULT, train
from d2l_utils.events import Recording, difference, union
from d2l_utils.link import Carrier, Link
from d2l_utils.transformer import TransformerConfig

__all__ = ["FREE", "Asked", "Plan", "Slowed", "crossover", "plan", "trained"]

FREE = Link(math.inf)  # the same way through the throttle, at no charge
RECORDED = 3  # steps behind the first link, of which a plan is made: recording disturbs some more than others


@dataclass(frozen=True)
class Asked:
    """A collective: asked for when ``at`` seconds had been computed, needed after ``by`` seconds of computing. real:
    seconds that the backend took, after the link was done with it and the backend with what came before."""

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

    def seconds(self, link: Carrier) -> float:
        """The step's length behind a link: computing goes on until it needs what is not there yet."""
        # at equal times what was asked first is needed first, and a wait comes after its own launch
        moments = [(one.at, order, False) for order, one in enumerate(self.asked)]
        moments += [(one.by, order, True) for order, one in enumerate(self.asked)]
        waited, free_from, done, there = 0.0, 0.0, 0.0, dict[int, float]()
        for moment, order, needed in sorted(moments):
            one, now = self.asked[order], moment + waited
            if needed:
                waited += max(0.0, there[order] - now)
            else:
                free_from = max(free_from, now) + link.seconds(one.name, one.bytes, one.group_size)
                there[order] = done = max(free_from, done) + one.real
        return self.computing + waited

    def charged(self, link: Carrier) -> float:
        """Seconds that the link is busy in a step."""
        return sum(link.seconds(one.name, one.bytes, one.group_size) for one in self.asked)


@dataclass(frozen=True)
class Slowed:
    """What was seen of one way behind one link.

    step_seconds : the fastest step that was not recorded: what the machine does besides only adds to it.
    charged      : seconds that the link was busy in the recorded step.
    recording    : of a step; of the first link, the shortest of ``RECORDED``.
    """

    link: Link
    step_seconds: float
    charged: float
    recording: Recording


def trained(
    ways: Mapping[str, Mapping[str, Any]],
    links: Sequence[Link],
    config: TransformerConfig = DEFAULT,
    *,
    rounds: int = 2,
    sessions: int = 2,
    **settings: Any,
) -> dict[str, list[Slowed]]:
    """Train in each way on every rank of the process group; by label, what was seen behind each link.

    All meet the same machine: within a training the steps are by turns behind each link, ``rounds`` times, and the
    trainings of all ways are by turns too, ``sessions`` times.
    ways: by label, arguments of ``train`` that differ, the strategy among them; settings: those that are shared.
    """
    found: dict[str, list[list[Slowed]]] = {label: [] for label in ways}
    for _ in range(sessions):
        for label, way in ways.items():
            found[label].append(_session(links, rounds, {"config": config, **settings, **way}))
    return {label: [_least(of_link) for of_link in zip(*seen, strict=True)] for label, seen in found.items()}


def _session(links: Sequence[Link], rounds: int, settings: Mapping[str, Any]) -> list[Slowed]:
    """One training: two steps behind the first link to warm up, ``rounds`` by turns, then those to be recorded."""
    turns = [links[0]] * 2 + [*links] * rounds + [links[0]] * (RECORDED - 1) + [*links]
    last = range(2 + len(links) * rounds, len(turns))
    result = train(steps=len(turns), link=turns, record_step=last, **settings)
    first = min(result.recordings[:RECORDED], key=_seconds)
    found = []
    for place, (link, recording) in enumerate(zip(links, [first, *result.recordings[RECORDED:]], strict=True)):
        sent = [e for e in recording.events if e.kind == "collective"]
        charged = sum(link.seconds(e.name, e.bytes, e.group_size) for e in sent)
        seconds = result.seconds[2 + place : last.start : len(links)]
        found.append(Slowed(link, min(seconds), charged, recording))
    return found


def _least(seen: Sequence[Slowed]) -> Slowed:
    """Of the same link in several trainings: the fastest step, and the recording that disturbed least."""
    quiet = min(seen, key=lambda slowed: _seconds(slowed.recording))
    return replace(quiet, step_seconds=min(slowed.step_seconds for slowed in seen))


def _seconds(recording: Recording) -> float:
    return recording.seconds or math.inf


def plan(slowed: Slowed) -> Plan:
    """The plan of a training behind ``FREE``. A recorded step is a little longer than the others: all its times are
    shortened alike."""
    events, step = slowed.recording.events, slowed.recording.seconds or 0.0
    waits = union((e.start, e.end) for e in events if e.kind == "wait" and e.end is not None)
    backward = max((e.end or 0.0 for e in events if e.kind == "backward"), default=step)

    def computed(moment: float) -> float:
        return sum(end - start for start, end in difference([(0.0, moment)], waits))

    asked, done = [], 0.0
    for e in events:
        if e.kind == "collective" and e.end is not None:
            # the wait that returned with it; where nobody waited, DDP would have at the end of backward
            waited = min((start for start, end in waits if end >= e.end - 1e-6), default=max(backward, e.start))
            by = computed(max(waited, e.start))
            real = max(0.0, e.end - max(e.backend_start or e.start, done))
            done = max(done, e.end)
            asked.append((e.name, e.bytes or 0, e.group_size or 1, computed(e.start), by, real))
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
