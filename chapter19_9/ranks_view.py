"""One rank's recorded step, asked for what it held at a moment; and the rules that it must keep."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise

from chapter19_9.moments import SENDS, SENT, Change, Flight, condensed, joins
from d2l_utils.events import Event, Holding, Recording

Interval = tuple[float, float]


class Broken(ValueError):
    """A recording in which something is used that is not complete, freed twice, or whole without a cause."""


class RankView:
    """One rank's recording on the common clock; seconds since ``began`` (nanoseconds), which is the first rank's start.

    whole: by block, bytes of unsharded parameters, gradients, optimizer states. start: bytes held at the start.
    """

    def __init__(self, recording: Recording, whole: Mapping[str, tuple[int, int, int]], began: int, start: int) -> None:
        self.rank, self.whole = recording.rank, whole
        shift = ((recording.began or began) - began) * 1e-9
        self.end = shift + (recording.seconds or 0.0)
        self.curve = [(shift + point.time, start + point.bytes) for point in recording.memory]
        events = [_moved(event, shift) for event in recording.events]
        samples = [replace(holding, time=holding.time + shift) for holding in recording.holdings]
        self._held: dict[str, list[Holding]] = {block: [] for block in whole}
        for holding in samples:
            self._held[holding.block].append(holding)
        self._times = {block: [holding.time for holding in many] for block, many in self._held.items()}
        if empty := [block for block, many in self._held.items() if not many]:
            raise ValueError(f"rank {self.rank} has no holdings of blocks {empty}")
        self._uses = [holding for holding in samples if holding.at in ("forward", "backward")]
        self.updates = [(e.start, e.end or self.end) for e in events if e.kind == "optimizer"]
        self._computing = {
            (kind, block): [
                (e.start, e.end or self.end) for e in events if e.kind == kind and self._column(e.name) == block
            ]
            for kind in ("forward", "backward")
            for block in whole
        }
        self._sent = [e for e in events if e.kind == "collective"]
        self.flights = self._collapsed()
        self._filling = {block: self._fill(block) for block in whole}
        self._reducing = {block: self._reduce(block) for block in whole}
        self.changes = self._changes(shift)

    # What is held

    def held(self, block: str, time: float) -> tuple[int, int, int]:
        """Bytes of parameters, gradients and optimizer states at a moment."""
        holding = self._held[block][max(0, bisect_right(self._times[block], time) - 1)]
        return holding.parameters, holding.gradients, holding.optimizer

    def bytes_at(self, time: float) -> int | None:
        at = bisect_right(self.curve, (time, float("inf"))) - 1
        return self.curve[max(0, at)][1] if self.curve else None

    def parameters(self, block: str, time: float) -> str:
        if _inside(self._filling[block], time):
            return "gathering"
        if self._is_whole(block, time):
            return "full"
        earlier = self._times[block][: bisect_right(self._times[block], time)]
        return "freed" if any(self._is_whole(block, moment) for moment in earlier) else "shard"

    def gradients(self, block: str, time: float) -> str:
        size, whole = self.held(block, time)[1], self.whole[block][1]
        reductions = self._reducing[block]
        if _inside([span for span, _ in reductions], time):
            return "reducing"
        done = [how for (_, end), how in reductions if end <= time]
        if done and len(done) == len(reductions):
            # a reduce-scatter into memory for the whole leaves the other ranks' parts there, as they were
            return "mean" if "all_reduce" in done else "shard" if size < whole else "shard_kept"
        uses = [use.time for use in self._uses if use.at == "backward" and use.block == block]
        if not uses or time < uses[0]:
            return "kept" if size else "none"
        grown = time >= uses[-1] and self.busy(block, time) != "backward"
        return "none" if not whole else "full" if size >= whole and grown else "computing"

    def optimizer(self, block: str, time: float) -> str:
        size, whole = self.held(block, time)[2], self.whole[block][2]
        return "none" if not size else "full" if size >= whole else "shard"

    def busy(self, block: str, time: float) -> str:
        for kind in ("forward", "backward"):
            for use in self._uses:
                if use.at == kind and use.block == block and use.time <= time < self._until(use):
                    return kind
        return "optimizer" if _inside(self.updates, time) and self.whole[block][1] else ""

    def in_flight(self, time: float) -> list[Flight]:
        return [flight for flight in self.flights if flight.start <= time < flight.end]

    # The rules

    def check(self) -> None:
        """Raises Broken unless, on this rank,

        - a block's parameters are whole, and no collective is still filling them, when its forward or backward begins;
        - they become whole through a collective only;
        - they are freed only down to what was there at rest, never below: nothing is freed twice;
        - no optimizer step begins while gradients are still being reduced;
        - what the step leaves of a sharded gradient came out of a reduction.
        """
        for use in self._uses:
            state = self.parameters(use.block, use.time)
            if state != "full":
                raise self._broken(f"{use.at} uses parameters that are {state}", use.block, use.time)
        for block in self.whole:
            rest = self._held[block][0].parameters
            for before, after in pairwise(self._held[block]):
                if after.parameters < rest:
                    raise self._broken("parameters are freed twice: less than at rest is left", block, after.time)
                if before.parameters < self.whole[block][0] <= after.parameters and not any(
                    start <= after.time <= end for start, end in self._filling[block]
                ):
                    raise self._broken("parameters become whole, but no collective filled them", block, after.time)
            for start, _ in self.updates:
                if _inside([span for span, _ in self._reducing[block] if span[0] < start], start):
                    raise self._broken("the optimizer steps while gradients are being reduced", block, start)
            size, whole = self.held(block, self.end)[1], self.whole[block][1]
            if 0 < size < whole and not self._reducing[block]:
                raise self._broken("a part of the gradient is held that no collective reduced", block, self.end)

    def _broken(self, what: str, block: str, time: float) -> Broken:
        return Broken(f"rank {self.rank}, {time * 1e3:.2f} ms: {what} ({block or 'what is in no block'})")

    # From events

    def _column(self, name: str) -> str:
        return name if name in self.whole else "" if name != "rest" else "rest"

    def _is_whole(self, block: str, time: float) -> bool:
        return self.held(block, time)[0] >= self.whole[block][0]

    def _stays_whole(self, block: str, start: float, end: float) -> bool:
        whole = self.whole[block][0]
        return all(h.parameters >= whole for h in self._held[block] if start <= h.time <= end)

    def _until(self, use: Holding) -> float:
        """The end of the computation that a use begins."""
        later = [other.time for other in self._uses if other.time > use.time] + [start for start, _ in self.updates]
        limit = min((time for time in later if time > use.time), default=self.end)
        spans = self._computing[use.at, use.block]
        # the profiler may have no name for it; then all that is known is when the next one begins
        return min([limit, *(end for start, end in spans if end > use.time and start < limit)])

    def _collapsed(self) -> list[Flight]:
        """Collectives of more than one rank, rows of sends or broadcasts as one."""
        flights: list[Flight] = []
        uses = [use.time for use in self._uses]
        for event in sorted(self._sent, key=lambda e: e.start):
            if event.group_size == 1:
                continue
            known = {block if block in self.whole else "" for block in event.blocks or ()}
            one = Flight(
                SENDS if event.name in SENT else event.name, event.of or "", tuple(b for b in self.whole if b in known),
                event.start, self.end if event.end is None else event.end, 1, event.bytes or 0,
            )  # fmt: skip
            if flights and joins(flights[-1], one, uses):
                last = flights.pop()
                both = {*last.blocks, *one.blocks}
                one = replace(
                    one, of=last.of or one.of, blocks=tuple(b for b in self.whole if b in both), start=last.start,
                    end=max(last.end, one.end), count=last.count + 1, bytes=last.bytes + one.bytes,
                )  # fmt: skip
            flights.append(one)
        return flights

    def _for(self, block: str, of: str) -> list[Flight]:
        """The block's flights; of a row of broadcasts, from the first to the last that is its own."""
        found = []
        for flight in self.flights:
            if flight.of == of and block in flight.blocks:
                own = [e for e in self._sent if flight.start <= e.start < flight.end and block in (e.blocks or ())]
                if flight.name == "broadcast" and own:
                    start, end = min(e.start for e in own), max(e.end or self.end for e in own)
                    flight = replace(flight, start=start, end=end)
                found.append(flight)
        return found

    def _fill(self, block: str) -> list[Interval]:
        """When a block's parameters are being filled: from room made for them or launch, to end or the last copy."""
        spans: list[Interval] = []
        flights = self._for(block, "parameters")
        for number, flight in enumerate(flights):
            start, end = flight.start, flight.end
            nothing_since = spans[-1][1] if spans else float("-inf")
            limit = flights[number + 1].start if number + 1 < len(flights) else float("inf")
            for before, after in pairwise(self._held[block]):
                if before.parameters < self.whole[block][0] <= after.parameters:
                    if nothing_since < after.time < flight.start and self._stays_whole(block, after.time, flight.start):
                        start = after.time  # room was made before the launch
                    elif end < after.time < limit and not self._is_whole(block, end):
                        end = after.time  # copied out of a buffer after the end
                        break
            spans.append((start, end))
        return spans

    def _reduce(self, block: str) -> list[tuple[Interval, str]]:
        """When a block's gradients are being reduced, and by what; to the moment at which the result is held."""
        spans = []
        for flight in self._for(block, "gradients"):
            end = flight.end
            # until a sample has seen the result; a part may be any part
            wanted = self.whole[block][1] if flight.name == "all_reduce" else 1
            if self.held(block, end)[1] < wanted:
                end = next((h.time for h in self._held[block] if h.time > end and h.gradients >= wanted), end)
            spans.append(((flight.start, end), flight.name))
        return spans

    def _changes(self, start: float) -> list[Change]:
        found = [Change(start, "step"), Change(self.end, "step", ends=True)]
        for begin, end in self.updates:
            found += [Change(begin, "update"), Change(end, "update", ends=True)]
        for use in self._uses:
            found.append(Change(use.time, use.at, (use.block,)))
        for flight in self.flights:
            alike = flight.alike()
            end = max(
                (e for b in flight.blocks for s, e in self._spans(b, flight.of) if s <= flight.end <= e),
                default=flight.end,
            )
            # of a row: when all of its blocks are in it
            begins = max((f.start for b in flight.blocks for f in self._for(b, flight.of) if f.name == flight.name
                         and flight.start <= f.start < flight.end), default=flight.start)  # fmt: skip
            found += [Change(begins, "begins", flight.blocks, alike), Change(end, "done", flight.blocks, alike)]
        for block, many in self._held.items():
            for before, after in pairwise(many):
                if before.parameters >= self.whole[block][0] > after.parameters:
                    found.append(Change(after.time, "freed", (block,)))
        return condensed(sorted(found))

    def _spans(self, block: str, of: str) -> list[Interval]:
        return self._filling[block] if of == "parameters" else [span for span, _ in self._reducing[block]]


def _moved(event: Event, shift: float) -> Event:
    return replace(event, start=event.start + shift, end=None if event.end is None else event.end + shift)


def _inside(spans: Iterable[Interval], time: float) -> bool:
    return any(start <= time < end for start, end in spans)
