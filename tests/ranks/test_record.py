"""What the recorder says of real steps, held against what PyTorch, the kernel's byte counters and formulas say."""

import sys
from itertools import pairwise

import pytest

from d2l_utils import launch
from d2l_utils.events import by_rank, hidden_and_exposed, on_one_clock
from tests.ranks import record_functions as ranks

SMALL, WHOLE = 0.05, 25  # bucket size in MiB: many buckets, one bucket
LAYERS = ranks.CONFIG.layers
BLOCKS = ["tokens", "positions", *(f"blocks.{i}" for i in range(LAYERS)), "norm", "head"]


def run(function, world_size, **arguments):
    return launch(function, world_size=world_size, output="quiet", timeout=60, **arguments).results


def of(events, kind):
    return [event for event in events if event.kind == kind]


@pytest.fixture(scope="module")
def ddp():
    """Results of one recorded step for each (ranks, bucket size); each is run once."""
    made = {}

    def get(world_size, bucket_mb):
        if (world_size, bucket_mb) not in made:
            made[world_size, bucket_mb] = run(ranks.ddp, world_size, bucket_mb=bucket_mb)
        return made[world_size, bucket_mb]

    return get


@pytest.mark.parametrize("bucket_mb", [SMALL, WHOLE])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_all_reduces_are_the_buckets_of_ddp(ddp, n, bucket_mb):
    for rank, (recording, buckets, parameters) in enumerate(ddp(n, bucket_mb)):
        assert (recording.rank, recording.world_size) == (rank, n)
        sends = of(recording.events, "collective")
        assert [event.name for event in sends] == ["all_reduce"] * len(buckets)
        assert sorted(event.bytes for event in sends) == sorted(buckets)
        assert sum(event.bytes for event in sends) == parameters
        assert (len(buckets) == 1) == (bucket_mb == WHOLE)
        for event in sends:
            assert (event.rank, event.group_size, event.backend) == (rank, n, "gloo:all_reduce")
            assert event.sent_bytes == pytest.approx(2 * (n - 1) / n * event.bytes)
            assert 0 <= event.start <= event.backend_start < event.end <= recording.seconds


@pytest.mark.parametrize("n", [1, 2, 4])
def test_each_block_runs_forward_and_backward_and_then_the_optimizer_steps(ddp, n):
    for recording, _, _ in ddp(n, SMALL):
        events = recording.events
        assert [event.start for event in events] == sorted(event.start for event in events)
        forward, backward = of(events, "forward"), of(events, "backward")
        assert [event.name for event in forward] == BLOCKS
        assert [event.name for event in backward if event.name in BLOCKS[2:]] == BLOCKS[:1:-1]
        assert {event.name for event in backward} == {*BLOCKS, "rest"}
        (optimizer,) = of(events, "optimizer")
        assert optimizer.name == "AdamW"
        assert max(e.end for e in forward) <= min(e.start for e in backward)
        assert max(e.end for e in backward) <= optimizer.start < optimizer.end <= recording.seconds
        assert max(e.end for e in of(events, "collective")) <= optimizer.start
        for one, other in pairwise(forward):
            assert one.end <= other.start
        for one, other in pairwise(backward):
            assert one.end <= other.start


@pytest.mark.parametrize("n", [2, 4])
def test_small_buckets_are_sent_while_backward_runs_and_a_single_one_after_it(ddp, n):
    for recording, _, _ in ddp(n, SMALL):
        last = of(recording.events, "backward")[-1]
        sends = of(recording.events, "collective")
        assert sum(event.start < last.start for event in sends) >= LAYERS
        hidden, exposed, total = hidden_and_exposed(recording.events)
        assert hidden > 0
        assert hidden + exposed == pytest.approx(total)
    for recording, _, _ in ddp(n, WHOLE):
        last = of(recording.events, "backward")[-1]
        (send,) = of(recording.events, "collective")
        assert send.start >= last.start
        # Nothing is left to compute: a rank sits in DDP's own wait until the bucket is back, unless it finds it done.
        hidden, exposed, total = hidden_and_exposed(recording.events)
        assert hidden + exposed == pytest.approx(total)
        assert max((wait.end for wait in of(recording.events, "wait")), default=0.0) <= send.end


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a connection")
@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_wire_carries_what_the_algorithm_says(ddp, n):
    for recording, _, _ in ddp(n, WHOLE):
        said = sum(event.backend_bytes for event in of(recording.events, "collective"))
        assert said <= recording.wire_bytes <= 1.01 * said + 4096 * (n > 1)


def test_ranks_of_a_host_share_a_clock(ddp):
    recordings = [recording for recording, _, _ in ddp(4, SMALL)]
    assert by_rank(r.events for r in recordings).keys() == {0, 1, 2, 3}
    together = on_one_clock(recordings)
    # A collective cannot end anywhere before every rank has launched it.
    for events in zip(*(of(events, "collective") for events in together.values()), strict=True):
        assert max(event.start for event in events) <= min(event.end for event in events)


def test_memory_curve_ends_with_what_the_step_left_behind():
    for recording, gradients, optimizer in run(ranks.first_step_memory, 2):
        assert gradients > 0
        assert optimizer > 2 * gradients
        assert recording.memory[0].time == recording.memory[0].bytes == 0
        assert recording.memory[-1].bytes == gradients + optimizer
        assert recording.peak == max(point.bytes for point in recording.memory) >= gradients + optimizer
        times = [point.time for point in recording.memory]
        assert times == sorted(times)
        assert times[-1] <= recording.seconds


def test_memory_of_a_later_step_ends_where_it_began():
    for recording, gradients in run(ranks.later_step_memory, 2):
        assert min(point.bytes for point in recording.memory) <= -gradients
        assert recording.memory[-1].bytes == 0
        assert recording.peak > 0


@pytest.mark.parametrize("way", ["warm", "cold"])
def test_nothing_is_printed(way, monkeypatch):
    monkeypatch.setenv("D2L_LAUNCH", way)
    done = launch(ranks.later_step_memory, world_size=2, output="quiet", timeout=60)
    assert (done.way, list(done.output)) == (way, ["", ""])


def test_without_allocations_there_is_no_curve_rather_than_a_flat_one(ddp):
    recording = ddp(1, SMALL)[0][0]
    assert (recording.memory, recording.peak) == ([], None)


def test_recording_changes_no_bit_and_leaves_no_hook():
    assert run(ranks.same_numbers, 2) == [(0.0, 0)] * 2


def test_a_step_that_fails_is_not_recorded_and_leaves_nothing_behind():
    for raised, restored, hooks, events, good in run(ranks.broken_step, 1):
        assert (raised, restored, hooks, events) == ("on purpose", True, 0, [])
        assert [event.name for event in of(good, "forward")] == BLOCKS


@pytest.mark.parametrize("n", [2, 3])
def test_every_collective_has_its_bytes(n):
    part, whole = 4 * ranks.ELEMENTS, 4 * ranks.ELEMENTS * n
    ring = {  # name -> payload, payloads that one rank sends on a ring
        "all_reduce": (part, 2 * (n - 1) / n),
        "all_gather": (whole, (n - 1) / n),
        "reduce_scatter": (whole, (n - 1) / n),
        "broadcast": (part, (n - 1) / n),
        "reduce": (part, (n - 1) / n),
        "gather": (whole, (n - 1) / n),
        "all_to_all": (whole, (n - 1) / n),
        "barrier": (0, 0),
        "send": (part, 1),
        "recv": (part, 0),
    }
    for rank, seen in enumerate(run(ranks.collectives, n)):
        for what, (events, wire) in seen.items():
            expected = ["send", "recv"] if what == "send recv" else [what.partition(" ")[0]]
            assert [event.name for event in events] == expected
            for event in events:
                payload, factor = ring[event.name]
                assert (event.rank, event.bytes, event.group_size) == (rank, payload, n), what
                assert event.sent_bytes == pytest.approx(factor * payload), what
                assert event.start < event.end, what
            if wire is not None:
                said = sum(event.backend_bytes for event in events)
                assert said <= wire <= 1.005 * said + 8192, (what, rank)
        # gloo has no reduce-scatter of its own: PyTorch runs an all-reduce and sends twice the ideal.
        for what in ("reduce_scatter", "reduce_scatter list"):
            (event,), _ = seen[what]
            assert (event.backend, event.backend_bytes) == ("gloo:all_reduce", pytest.approx(2 * event.sent_bytes))


def test_a_subgroup_has_its_own_size():
    results = run(ranks.in_a_subgroup, 4)
    assert results[:2] == [[("all_reduce", 40, 4)]] * 2
    assert results[2:] == [[("all_reduce", 40, 4), ("all_reduce", 40, 2)]] * 2


@pytest.mark.parametrize("n", [2, 3])
def test_fsdp2_gathers_each_block_twice_and_scatters_each_gradient_once(n):
    for recording, blocks, rest in run(ranks.fsdp2, n):
        sends = of(recording.events, "collective")
        gathers = [event.bytes for event in sends if event.name == "all_gather"]
        scatters = [event.bytes for event in sends if event.name == "reduce_scatter"]
        assert len(gathers) == 2 * LAYERS + 1
        assert len(scatters) == LAYERS + 1
        # Shards are padded to equal rows on every rank, so a payload is never less than the parameters.
        assert 2 * sum(blocks) + rest <= sum(gathers) <= 1.1 * (2 * sum(blocks) + rest)
        assert sum(blocks) + rest <= sum(scatters) <= 1.1 * (sum(blocks) + rest)
        assert [event.name for event in of(recording.events, "forward")] == BLOCKS
        waits = of(recording.events, "wait")
        assert len(waits) >= len(gathers)  # FSDP waits for each gather before it computes
