"""Who is said to have kept the others waiting, from the collectives in which the ranks were."""

from d2l_utils.launching.collective_state import CollectiveCall, CollectiveState
from d2l_utils.launching.ranks import RankState
from d2l_utils.launching.stuck import explain


def rank(number, *calls, waits_in="", group="0 gloo", members=(), **more):
    """A rank that launched these collectives, numbered from 1; the names of those that are pending end in "...".

    A name of another group stands behind that group's name and a colon.
    """
    launched, counts = [], {}
    for name in calls:
        place, _, short = name.rpartition(":")
        place = place or group
        counts[place] = counts.get(place, 0) + 1
        launched.append(CollectiveCall(place, counts[place], short.removesuffix("..."), short.endswith("..."), members))
    return RankState(number, pid=1, collectives=CollectiveState(launched, waits_in), **more)


def test_a_rank_that_never_joined_is_named_with_the_collective():
    found = explain(
        [rank(0, "broadcast", "all_reduce..."), rank(1, "broadcast"), rank(2, "broadcast", "all_reduce...")]
    )
    assert found.text == "rank 1 never joined the all_reduce (collective 2) in which ranks 0 and 2 waited"
    assert found.rank == 1


def test_a_rank_in_another_collective_is_named_and_not_the_others():
    found = explain([rank(0, "all_reduce..."), rank(1, "barrier..."), rank(2, "all_reduce...")])
    assert found.text == (
        "rank 1 waited in barrier while ranks 0 and 2 waited in all_reduce: "
        "every rank must call the same collectives in the same order"
    )
    assert found.rank == 1


def test_of_two_ranks_that_disagree_both_collectives_are_told_and_none_is_blamed():
    found = explain([rank(0, "all_reduce..."), rank(1, "barrier...")])
    assert "rank 0 waited in all_reduce while rank 1 waited in barrier" in found.text and found.rank is None


def test_the_first_difference_is_told_also_when_one_rank_has_gone_on_since():
    found = explain([rank(0, "all_reduce..."), rank(1, "broadcast", "all_reduce..."), rank(2, "all_reduce...")])
    assert found.text.startswith("rank 1 called broadcast while ranks 0 and 2 called all_reduce") and found.rank == 1


def test_a_rank_that_joined_and_left_is_not_blamed():
    """The source of a broadcast goes on once it has sent, and sleeps then."""
    states = [rank(0, "broadcast"), rank(1), rank(2, "broadcast...")]
    found = explain(states)
    assert found.text == "rank 1 never joined the broadcast (collective 1) in which rank 2 waited" and found.rank == 1


def test_only_members_of_a_group_are_missed():
    found = explain([rank(0, "1:all_reduce...", members=(0, 1)), rank(1), rank(2)])
    assert found.text == "rank 1 never joined the all_reduce (collective 1) in which rank 0 waited"


def test_numbers_tell_calls_of_one_name_apart():
    found = explain([rank(0, "1:all_reduce..."), rank(1, "2:barrier", "2:all_reduce...")])
    assert "rank 0 waited in all_reduce (collective 1) while rank 1 waited in all_reduce (collective 2)" in found.text


def test_a_wait_that_the_recorder_does_not_see_counts():
    found = explain([rank(0, waits_in="send or recv"), rank(1)])
    assert found.text == "rank 1 never joined the send or recv in which rank 0 waited"
    assert explain([rank(0, waits_in="recv"), rank(1, waits_in="recv")]).text == "all of them waited in recv"


def test_a_rank_that_waits_for_its_device_counts_as_waiting():
    stack = 'Current thread 0x1 (most recent call first):\n  File "/x/torch/cuda/__init__.py", line 1, in synchronize\n'
    assert explain([rank(0, stack=stack), rank(1)]).rank == 1


def test_ranks_of_which_nothing_is_known_are_not_blamed():
    assert explain([RankState(0), RankState(1)]).text == ""
    assert explain([rank(0), rank(1)]).text == ""


def test_both_kinds_of_fault_are_told():
    found = explain([rank(0, "all_reduce..."), rank(1, "barrier..."), rank(2)])
    assert "rank 2 never joined" in found.text and "waited in barrier" in found.text and found.rank == 2
