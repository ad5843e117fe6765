"""What a frame is made for: collectives in flight, and changes on a rank, with their words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

Name = Callable[[str], str]

SENT = ("send", "recv")
SENDS = "sends"  # sends and receives that follow one another
_SPOKEN = {"all_reduce": "all-reduce", "all_gather": "all-gather", "reduce_scatter": "reduce-scatter", SENDS: "sends"}


@dataclass(frozen=True)
class Flight:
    """A collective between its launch and its end. Sends and receives in a row, and broadcasts in a row, are one.

    of: "parameters", "gradients", or "" where that is not known; blocks: whose.
    """

    name: str
    of: str
    blocks: tuple[str, ...]
    start: float = 0.0
    end: float = 0.0
    count: int = 1
    bytes: int = 0

    def alike(self) -> Flight:
        """The same on any rank: without its times and its number of sends."""
        return Flight(self.name, self.of, self.blocks)

    def words(self, name: Name) -> str:
        what = _SPOKEN.get(self.name, self.name)
        if not self.of:
            return what
        if len(self.blocks) == 1:
            return f"{what} of {name(self.blocks[0])}'s {self.of}"
        return f"{what} of the {self.of} of {listed([name(block) for block in self.blocks])}"

    @property
    def short(self) -> str:
        return f"{_SPOKEN.get(self.name, self.name)} {self.of[:1].upper()}".strip()


@dataclass(frozen=True)
class Change:
    """Something that a frame is made for. kind: "step", "forward", "backward", "begins", "done", "freed", "update"."""

    time: float
    kind: str
    blocks: tuple[str, ...] = ()
    flight: Flight | None = None
    ends: bool = False

    @property
    def phase(self) -> str:
        return {"forward": "forward", "backward": "backward", "update": "optimizer"}.get(self.kind, "")

    def same(self, other: Change) -> bool:
        return replace(self, time=0.0) == replace(other, time=0.0)

    def words(self, name: Name) -> str:
        blocks = listed([name(block) for block in self.blocks])
        if self.kind in ("begins", "done") and self.flight is not None:
            return f"{self.flight.words(name)} {self.kind if self.kind == 'begins' else 'is done'}"
        return {
            "step": "the step ends" if self.ends else "the step begins",
            "forward": f"forward of {blocks}",
            "backward": f"backward of {blocks}",
            "freed": f"{blocks}'s gathered parameters are freed",
            "update": "the optimizer step is done" if self.ends else "the optimizer step begins",
        }[self.kind]

    def __lt__(self, other: Change) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[float, int]:
        # what a sample has seen done was done before what it was taken for
        return self.time, 0 if self.kind in ("done", "freed") else 1


def condensed(changes: Sequence[Change]) -> list[Change]:
    """Without what shows nothing of its own: a gather's end right before the use, more parts of the same block."""
    kept: list[Change] = []
    for change in changes:
        if change.kind in ("forward", "backward"):
            if kept and (kept[-1].kind, kept[-1].blocks) == (change.kind, change.blocks):
                continue
            at = len(kept) - 1
            while at >= 0 and kept[at].kind == "done":
                flight = kept[at].flight
                if flight is not None and flight.of == "parameters" and kept[at].blocks == change.blocks:
                    del kept[at]
                at -= 1
        kept.append(change)
    return kept


def joins(last: Flight, one: Flight, uses: Sequence[float]) -> bool:
    if (
        last.name != one.name
        or one.name not in (SENDS, "broadcast")
        or any(last.start < use <= one.start for use in uses)
    ):
        return False
    return one.name == "broadcast" or not one.blocks or not last.blocks or one.blocks == last.blocks


def listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def thinned(curve: Sequence[tuple[float, int]], points: int) -> list[tuple[float, int]]:
    """At most so many points of a memory curve; the first, and of each stretch its highest."""
    if len(curve) <= points:
        return list(curve)
    size = -(-len(curve) // (points // 2))
    kept: list[tuple[float, int]] = [curve[0]]
    for first in range(0, len(curve), size):
        stretch = curve[first : first + size]
        kept += sorted({max(stretch, key=lambda point: point[1]), stretch[-1]} - {curve[0]})
    return kept
