"""Who kept whom waiting, when ranks did not finish in time: by the collective in which each rank is."""

from collections.abc import Iterable
from dataclasses import dataclass

from d2l_utils.launching.collective_state import CollectiveCall
from d2l_utils.launching.ranks import RankState


@dataclass
class Stuck:
    """What to say about ranks that wait for each other (empty: nothing is known), and the rank at fault where it is one."""

    text: str = ""
    rank: int | None = None


def explain(states: list[RankState]) -> Stuck:
    """Name the ranks that never joined the collective in which others waited, and the ranks that are in different ones."""
    waits = {state.rank: call for state in states if (call := _waits_in(state)) is not None}
    absent: dict[CollectiveCall, list[int]] = {}
    for call in sorted(set(waits.values()), key=lambda call: (call.group, call.number)):
        missing = [s.rank for s in states if s.rank not in waits and _misses(s, call)]
        if missing and missing not in absent.values():
            absent[call] = missing
    found = [
        f"{rank_names(missing)} never joined the {_label(call)} in which "
        f"{rank_names(rank for rank, other in waits.items() if other == call)} waited"
        for call, missing in absent.items()
    ]
    blamed = next(iter(absent.values()))[0] if absent else None
    differing = _differing(states, waits)
    if len(differing) > 1:
        verb = (
            "waited in" if all(waits.get(r) == call for call, where in differing.items() for r in where) else "called"
        )
        found.append(_disagreement(differing, verb))
        few, more = list(differing.values())[:2]
        if blamed is None and len(few) < len(more):
            blamed = few[0]
    elif not absent and len(waits) == len(states) > 0:
        found.append(f"all of them waited in {_label(next(iter(waits.values())))}")
    return Stuck("; ".join(found), blamed)


def _waits_in(state: RankState) -> CollectiveCall | None:
    """The oldest call of the rank that has not completed; what the recorder does not see has number 0."""
    if state.delivered:
        return None
    pending = [call for call in state.collectives.calls if call.pending]
    if pending:
        return pending[0]
    name = state.called if state.in_collective else state.collectives.waits_in
    return CollectiveCall("", 0, name or "collective", True) if name or state.in_collective else None


def _misses(state: RankState, call: CollectiveCall) -> bool:
    """Whether the rank, which waits in nothing, was expected in this call and did not come."""
    if call.members and state.rank not in call.members:
        return False
    return not call.number or all(c.number < call.number for c in state.collectives.calls if c.group == call.group)


def _differing(states: list[RankState], waits: dict[int, CollectiveCall]) -> dict[CollectiveCall, list[int]]:
    """Ranks by call, fewest first: the first number of a group under which ranks called different things, else where they wait."""
    by_number: dict[tuple[str, int], dict[CollectiveCall, list[int]]] = {}
    for state in states:
        for call in state.collectives.calls:
            by_number.setdefault((call.group, call.number), {}).setdefault(call, []).append(state.rank)
    for _, calls in sorted(by_number.items()):
        if len(calls) > 1:
            return _fewest_first(calls)
    calls = {}
    if len(waits) == len(states):  # one that waits in nothing explains why the others are not equally far
        for rank, call in waits.items():
            calls.setdefault(call, []).append(rank)
    return _fewest_first(calls)


def _fewest_first(calls: dict[CollectiveCall, list[int]]) -> dict[CollectiveCall, list[int]]:
    return dict(sorted(calls.items(), key=lambda item: len(item[1])))


def _disagreement(differing: dict[CollectiveCall, list[int]], verb: str) -> str:
    names = [call.name for call in differing]
    told = [
        f"{rank_names(where)} {verb} {call.name if names.count(call.name) == 1 else _label(call)}"
        for call, where in differing.items()
    ]
    text = f"{told[0]} while {', '.join(told[1:])}"
    return f"{text}: every rank must call the same collectives in the same order"


def _label(call: CollectiveCall) -> str:
    return f"{call.name} (collective {call.number})" if call.number else call.name


def rank_names(numbers: Iterable[int]) -> str:
    """`rank 1`, or `ranks 0, 1 and 2`."""
    names = [str(number) for number in sorted(numbers)]
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names[:-1])} and {names[-1]}"
