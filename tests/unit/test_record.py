"""The recorder without processes: intervals, formulas, what a trace is turned into, and steps of one process."""

import json
import os
import pickle
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from d2l_utils import trace, wire
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
from d2l_utils.record import default_blocks, record
from d2l_utils.traffic import sent_by_gloo, sent_on_ring
from d2l_utils.transformer import Transformer, TransformerConfig


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
    second = Recording(rank=1, began=3_000_000_000, events=[Event("collective", "x", 1, 0.5, None, backend_start=1)])
    together = on_one_clock([second, first])
    assert together[0] == first.events
    assert together[1] == [Event("collective", "x", 1, 2.5, None, backend_start=3)]
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


# Blocks


def test_blocks_are_list_members_and_what_stands_beside_them():
    model = Transformer(TransformerConfig(layers=2, width=16, heads=2, length=8))
    assert list(default_blocks(model)) == ["tokens", "positions", "blocks.0", "blocks.1", "norm", "head"]
    nested = nn.ModuleDict({"body": nn.ModuleDict({"h": nn.ModuleList([nn.Linear(1, 1)]), "ln": nn.Linear(1, 1)})})
    assert list(default_blocks(nested)) == ["body.h.0", "body.ln"]
    assert list(default_blocks(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))) == ["0", "1"]
    alone = nn.Linear(1, 1)
    assert default_blocks(alone) == {"model": alone}


# Steps of one process


class Two(nn.Module):
    """Two layers of known sizes; the second can be recomputed in backward."""

    def __init__(self, recompute=False):
        super().__init__()
        self.one, self.two, self.recompute = nn.Linear(8, 1024), nn.Linear(1024, 8), recompute

    def forward(self, x):
        x = self.one(x)
        x = checkpoint(self.two, x, use_reentrant=False) if self.recompute else self.two(x)
        return x.square().mean()


def names(recording, kind):
    return [e.name for e in recording.events if e.kind == kind]


def test_a_step_of_one_process_has_no_collective():
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, optimizer) as recording:
        model(torch.ones(4, 8)).backward()
        optimizer.step()
    assert names(recording, "forward") == ["one", "two"]
    assert names(recording, "backward") == ["rest", "two", "one"]
    assert names(recording, "optimizer") == ["SGD"]
    assert names(recording, "collective") == names(recording, "wait") == []
    assert (recording.rank, recording.world_size, recording.peak, recording.memory) == (0, 1, None, [])
    assert 0 < max(e.end for e in recording.events) <= recording.seconds


def test_a_recomputed_block_runs_forward_again_inside_backward():
    model = Two(recompute=True)
    with record(model) as recording:
        model(torch.ones(4, 8)).backward()
    assert names(recording, "forward") == ["one", "two", "two"]
    again = [e for e in recording.events if e.kind == "forward"][-1]
    assert again.start > min(e.start for e in recording.events if e.kind == "backward")


def test_each_micro_batch_has_its_own_forward_and_backward():
    model = Two()
    with record(model) as recording:
        for _ in range(3):
            model(torch.ones(4, 8)).backward()
    assert names(recording, "forward") == ["one", "two"] * 3
    assert names(recording, "backward") == ["rest", "two", "one"] * 3


def test_memory_is_counted_from_the_start_of_the_step():
    model = nn.Linear(1000, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1000)).sum().backward()
    optimizer.step()
    gradient = 4000
    with record(model, optimizer, allocations=True) as recording:
        big = torch.zeros(250_000)
        optimizer.zero_grad()  # releases memory that is older than the step
        del big
        small = torch.zeros(500)
    assert [point.bytes for point in recording.memory] == [
        0,
        1_000_000,
        1_000_000 - gradient,
        -gradient,
        2000 - gradient,
    ]
    assert recording.peak == 1_000_000
    del small


def test_an_old_storage_that_lives_on_is_not_released():
    model = nn.Linear(1000, 1, bias=False)
    with record(model, allocations=True) as recording:
        view = model.weight.detach()
        model.weight = None
    assert recording.memory[-1].bytes == 0
    assert view.sum() is not None


def test_a_hand_written_optimizer_is_marked_and_gets_its_step_back():
    class Mine:
        def step(self):
            return "stepped"

    mine, model = Mine(), nn.Linear(1, 1)
    with record(model, mine) as recording:
        assert mine.step() == "stepped"
    assert names(recording, "optimizer") == ["Mine"]
    assert "step" not in vars(mine)


def test_an_optimizer_inside_another_counts_once():
    class Outer(torch.optim.SGD):
        def __init__(self, parameters):
            super().__init__(parameters, lr=0.1)
            self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1)

        def step(self):
            self.inner.step()

    model = Two()
    optimizer = Outer(model.parameters())
    with record(model, optimizer) as recording:
        optimizer.step()
    assert names(recording, "optimizer") == ["Outer"]


def test_steps_not_chosen_are_not_recorded():
    model = Two()
    with record(model, enabled=False) as recording:
        assert not model.one._forward_hooks
        assert not torch.autograd._profiler_enabled()
    assert (recording.events, recording.seconds) == ([], None)


def test_what_record_refuses():
    model = nn.Linear(1, 1)
    with pytest.raises(TypeError, match="model=3"), record(3):
        pass
    with pytest.raises(TypeError, match=r"blocks\['a'\]=3"), record(model, blocks={"a": 3}):
        pass
    with pytest.raises(TypeError, match="optimizer='adam'"), record(model, "adam"):
        pass
    with record(model), pytest.raises(RuntimeError, match="already running"), record(model):
        pass


def test_nothing_is_printed():
    code = "import torch; from d2l_utils.record import record\nwith record(torch.nn.Linear(1, 1)): pass\nprint('done')"
    environment = {key: value for key, value in os.environ.items() if key != "KINETO_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert (done.stdout, done.stderr) == ("done\n", "")


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


# Traces made by hand: no machine with a GPU has run these tests


class Fake:
    """One record as the profiler would give it, times in milliseconds."""

    def __init__(self, name, start, length, **fields):
        self.name_, self.start, self.length = name, start, length
        self.fields = {"device": "CPU", "thread": 1, "sequence": -1, "shapes": [], "types": [], "id": 0, "from": 0}
        self.fields.update(fields)

    def name(self):
        return self.name_

    def start_ns(self):
        return int(self.start * 1e6)

    def duration_ns(self):
        return int(self.length * 1e6)

    def start_thread_id(self):
        return self.fields["thread"]

    def sequence_nr(self):
        return self.fields["sequence"]

    def scope(self):
        return 0

    def device_type(self):
        return type("Device", (), {"name": self.fields["device"]})

    def correlation_id(self):
        return self.fields["id"]

    def linked_correlation_id(self):
        return self.fields["from"]

    def is_user_annotation(self):
        return False

    def structured_input_shapes(self):
        return self.fields["shapes"]

    def shapes(self):
        return self.fields["shapes"]

    def dtypes(self):
        return self.fields["types"]


def test_on_a_device_times_are_those_of_the_kernels():
    records = [
        Fake("d2l.step:", 100, 60),
        Fake("d2l.forward:head", 101, 2),
        Fake("aten::mm", 102, 0.5, id=1, sequence=5),
        Fake("gemm", 110, 4, device="CUDA", **{"from": 1}),
        Fake("autograd::engine::evaluate_function: MmBackward0", 105, 2, sequence=5, thread=2),
        Fake("aten::mm", 105.5, 0.5, id=2, thread=2),
        Fake("gemm", 114, 6, device="CUDA", **{"from": 2}),
        Fake("c10d::_allgather_base_", 106, 0.2, shapes=[[8], [2], []], types=["float", "float", ""], thread=2),
        Fake("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 118, 5, device="CUDA"),
    ]
    events = trace.read(trace.Trace(records, on_device=True), 3, (3, 4))
    times = {(e.kind, e.name): (round(1e3 * e.start, 6), round(1e3 * e.end, 6)) for e in events}
    assert times == {
        ("forward", "head"): (10, 14),
        ("backward", "head"): (14, 20),
        ("collective", "all_gather"): (18, 23),
        ("wait", "device"): (20, 23),
    }
    (send,) = [e for e in events if e.kind == "collective"]
    assert (send.bytes, send.sent_bytes, send.group_size, send.backend) == (32, 24, 4, "nccl:all_gather")
    assert send.backend_bytes is None  # NCCL picks its algorithm as it runs
    hidden, exposed, total = hidden_and_exposed(events)
    assert [round(1e3 * x, 6) for x in (hidden, exposed, total)] == [2, 3, 5]


def test_a_bucket_is_done_when_ddp_leaves_backward_however_late_the_thread_says_so():
    records = [
        Fake("d2l.step:", 0, 60),
        Fake("c10d::allreduce_", 10, 1, shapes=[[[8]]]),
        Fake("gloo:all_reduce", 12, 20, shapes=[[8]], types=["float"], thread=2),
        Fake("d2l.closing:", 15, 10),
    ]
    for ddp, end in ((True, 25), (False, 32)):
        (send,) = [e for e in trace.read(trace.Trace(records), 0, (0, 2), ddp) if e.kind == "collective"]
        assert (round(1e3 * send.end, 6), send.bytes) == (end, 32)
