"""Events by themselves: intervals, what is hidden and exposed, clocks, and the bytes that a collective sends."""

import json
import pickle
import sys
from dataclasses import asdict

import pytest

from d2l_utils import wire
from d2l_utils.events import (
    Event,
    MemoryPoint,
    Recording,
    by_rank,
    difference,
    hidden_and_exposed,
    intersection,
    on_one_clock,
    union,
)
from d2l_utils.traffic import sent_by_gloo, sent_on_ring


def event(kind, start, end, rank=0, name="x"):
    return Event(kind, name, rank, start, end)


# Intervals


def test_union_merges_what_touches_and_drops_what_is_empty():
    assert union([(5, 6), (0, 2), (1, 3), (3, 4), (7, 7), (5.5, 5.7)]) == [(0, 4), (5, 6)]
    assert union([]) == []


def test_intersection_and_difference_split_a_union():
    one, other = [(0, 4), (6, 10)], [(1, 2), (3, 7), (9, 12)]
    assert intersection(one, other) == [(1, 2), (3, 4), (6, 7), (9, 10)]
    assert difference(one, other) == [(0, 1), (2, 3), (7, 9)]
    assert difference(one, []) == one
    assert difference([], other) == intersection([], other) == []


# Hidden and exposed


def test_two_collectives_at_once_count_once():
    events = [event("backward", 0, 10), event("collective", 2, 6), event("collective", 4, 8)]
    assert hidden_and_exposed(events) == (6, 0, 6)


def test_after_backward_a_collective_is_exposed():
    events = [event("backward", 0, 10), event("collective", 8, 13), event("optimizer", 15, 20)]
    assert hidden_and_exposed(events) == (2, 3, 5)


def test_waiting_inside_a_block_is_not_computing():
    events = [event("forward", 0, 10), event("collective", 2, 6), event("wait", 3, 7)]
    assert hidden_and_exposed(events) == (1, 3, 4)


def test_overlaps_of_many_intervals():
    events = [
        event("forward", 0, 2),
        event("backward", 3, 5),
        event("backward", 5, 9),
        event("wait", 9, 12),
        event("optimizer", 12, 14),
        event("collective", 1, 4),  # 1-2 and 3-4 hidden, 2-3 exposed
        event("collective", 4, 6),  # hidden
        event("collective", 5, 11),  # 6-9 hidden, 9-11 exposed
        event("collective", 13, 15),  # 13-14 hidden, 14-15 exposed
        event("collective", 20, None),  # never seen to end
    ]
    assert hidden_and_exposed(events) == (1 + 1 + 2 + 3 + 1, 1 + 2 + 1, 12)
    assert hidden_and_exposed(events, during=("backward",)) == (1 + 2 + 3, 1 + 1 + 2 + 2, 12)


def test_no_communication_is_neither_hidden_nor_exposed():
    assert hidden_and_exposed([event("backward", 0, 1)]) == (0, 0, 0)
    assert hidden_and_exposed([]) == (0, 0, 0)


def test_overlap_is_of_one_rank_and_of_known_kinds():
    with pytest.raises(ValueError, match=r"ranks \[0, 1\]"):
        hidden_and_exposed([event("backward", 0, 1), event("backward", 0, 1, rank=1)])
    with pytest.raises(ValueError, match="during"):
        hidden_and_exposed([], during=("sleep",))


# Lists of events


def test_by_rank_takes_events_lists_and_recordings_in_any_order():
    late, early, other = event("forward", 2, 3, 1), event("forward", 0, 1, 1), event("forward", 0, 1, 0)
    expected = {0: [other], 1: [early, late]}
    assert by_rank([late, other, early]) == expected
    assert by_rank([[late, early], [other]]) == expected
    assert by_rank([Recording(rank=1, events=[late, early]), Recording(events=[other])]) == expected
    assert list(by_rank([late, other])) == [0, 1]


def test_one_clock_shifts_every_rank_to_the_earliest_start():
    first = Recording(rank=0, began=1_000_000_000, events=[event("forward", 0.5, 1)])
    second = Recording(
        rank=1, began=3_000_000_000, events=[Event("collective", "x", 1, 0.5, None, backend_start=1, launch_time=0.25)]
    )
    together = on_one_clock([second, first])
    assert together[0] == first.events
    assert together[1] == [Event("collective", "x", 1, 2.5, None, backend_start=3, launch_time=2.25)]
    with pytest.raises(ValueError, match=r"ranks \[7\]"):
        on_one_clock([first, Recording(rank=7)])


def test_events_survive_pickle_and_json():
    one = Event("collective", "all_reduce", 1, 0.1, 0.2, 8, 8.0, "gloo:all_reduce", 8.0, 0.15, 2)
    whole = Recording(1, 2, 0.5, 7, [one], [MemoryPoint(0.0, 0)], 4, 12)
    assert pickle.loads(pickle.dumps(whole)) == whole
    assert Event(**json.loads(json.dumps(asdict(one)))) == one


# Formulas


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    for n in (1, 2, 3, 4, 64):
        halves = sent_on_ring("reduce_scatter", 100, n) + sent_on_ring("all_gather", 100, n)
        assert sent_on_ring("all_reduce", 100, n) == pytest.approx(halves) == pytest.approx(200 * (n - 1) / n)


def test_gloo_sends_a_broadcast_down_a_tree():
    for n, root in ((2, 0), (3, 1), (4, 0), (4, 3), (7, 2), (8, 5)):
        sent = [sent_by_gloo("broadcast", 10, n, rank, root) for rank in range(n)]
        assert sum(sent) == 10 * (n - 1)  # each rank but the root gets it once
        assert max(sent) == sent[root] == 10 * (n - 1).bit_length()


def test_what_is_not_known_is_none_and_not_zero():
    assert sent_on_ring("all_reduce", None, 2) is None
    assert sent_on_ring("all_reduce", 8, None) is None
    assert sent_on_ring("something new", 8, 2) is None
    assert sent_by_gloo("broadcast", 8, 2) is None
    assert sent_by_gloo("something new", 8, 2, 0, 0) is None
    assert sent_on_ring("recv", 8, 2) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a connection")
def test_the_kernel_counts_bytes_that_wait_too():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as sender, server.accept()[0] as receiver:
            before = wire.bytes_sent()
            sender.setblocking(False)
            sent = 0
            while True:  # until the receiver's buffer and ours are full
                try:
                    sent += sender.send(b"x" * 100_000)
                except BlockingIOError:
                    break
            assert wire.since(before) == sent
            receiver.setblocking(False)
    assert wire.since(None) is None
