"""What a trace is turned into, from records made by hand: no machine with a GPU has run these tests."""

import gzip
import json

import pytest
from torch import nn

from d2l_utils import trace, wire
from d2l_utils.events import Event, hidden_and_exposed
from d2l_utils.holdings import Holdings
from tests.unit import traces


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


def golden(name, ranks=2):
    """The trace of a file of records, and its events."""
    found = trace.Trace(traces.load(traces.FOLDER / f"{name}.json"), on_device=True)
    return found, trace.read(found, 0, (0, ranks), ddp=name.startswith("ddp"))


def times(events, kind="collective"):
    """(name, start, end) in milliseconds."""
    return [(e.name, round(1e3 * e.start, 6), round(1e3 * e.end, 6)) for e in events if e.kind == kind]


def milliseconds(overlap):
    return [round(1e3 * part, 6) for part in overlap]


# Golden traces


@pytest.mark.parametrize("path", sorted(traces.FOLDER.glob("*.json*")), ids=lambda path: path.name)
def test_each_file_says_who_wrote_it_and_can_be_read(path):
    content = json.loads(path.read_text())
    if content["made_by_hand"]:
        assert content == traces.content(path.stem)  # else: python -m tests.unit.traces
    assert trace.Trace(traces.load(path), on_device=True).seconds > 0


def test_rows_as_a_gpu_machine_writes_them_are_read_too(tmp_path):
    rows = json.loads((traces.FOLDER / "ddp.json").read_text())["records"]
    for row in rows:
        row["activity"] = ""  # torch 2.11 does not tell it
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump(rows, file)
    found = trace.Trace(traces.load(tmp_path / "trace.json.gz"), on_device=True)
    assert times(trace.read(found, 0, (0, 2), ddp=True)) == [("all_reduce", 2, 5), ("all_reduce", 5, 8)]


@pytest.mark.parametrize("name", ["ddp", "ddp_id_clash"])
def test_an_all_reduce_on_nccl_takes_as_long_as_its_kernel(name):  # W1, W2
    _, events = golden(name)
    assert times(events) == [("all_reduce", 2, 5), ("all_reduce", 5, 8)]
    assert times(events, "backward") == [("rest", 2, 8)]
    assert milliseconds(hidden_and_exposed(events)) == [6, 0, 6]
    first = next(e for e in events if e.kind == "collective")
    assert (first.backend, first.backend_bytes, first.bytes, first.sent_bytes) == ("nccl:all_reduce", None, 32, 32)
    assert [round(1e3 * e.launch_time, 6) for e in events if e.kind == "collective"] == [1.0, 1.3]


def test_a_kernel_that_links_to_the_collectives_own_operator_is_its_too():
    rows = json.loads((traces.FOLDER / "ddp.json").read_text())["records"]
    for row in rows:
        if row["from"] in (21, 31):  # record_param_comms
            row["from"] -= 1
    found = trace.Trace([traces.Record(row) for row in rows], on_device=True)
    assert times(trace.read(found, 0, (0, 2), ddp=True)) == [("all_reduce", 2, 5), ("all_reduce", 5, 8)]


def test_collectives_of_fsdp2_are_on_the_device_when_all_marks_are_closed():
    _, events = golden("fsdp2", ranks=4)
    assert times(events) == [("all_gather", 1, 2), ("reduce_scatter", 5.5, 6.5)]
    assert [(e.bytes, e.sent_bytes, e.group_size) for e in events if e.kind == "collective"] == [(64, 48, 4)] * 2
    kinds = ("forward", "backward", "optimizer")
    assert [times(events, kind) for kind in kinds] == [
        [("blocks.0", 2, 3.5)], [("blocks.0", 3.5, 5.5)], [("AdamW", 6.6, 7.1)]
    ]  # fmt: skip
    assert milliseconds(hidden_and_exposed(events)) == [0, 2, 2]


def test_what_a_collective_works_for_is_found_by_its_launch():  # W3
    found, events = golden("fsdp2", ranks=4)
    watch = Holdings(nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(1, 1)])}), None, {}, None)
    watch._sharded = {"blocks.0": {"blocks.0"}}
    served = [(e.name, e.of, e.blocks) for e in watch.assign(found, events) if e.kind == "collective"]
    assert served == [
        ("all_gather", "parameters", ("blocks.0",)),
        ("reduce_scatter", "gradients", ("blocks.0",)),
    ]


def test_a_batch_of_sends_and_receives_is_one_kernel():
    _, events = golden("p2p")
    assert times(events) == [("send", 3, 4.5), ("recv", 3, 4.5), ("send", 5, 6.5), ("recv", 5, 6.5)]
    assert {(e.bytes, e.backend) for e in events if e.kind == "collective"} == {(24, "nccl:send_recv")}
    assert milliseconds(hidden_and_exposed(events)) == [0, 3, 3]


def test_a_barrier_is_an_all_reduce_of_nccl_whatever_the_clocks_say():
    _, events = golden("barrier")
    (event,) = [e for e in events if e.kind == "collective"]
    assert times(events) == [("barrier", 0.999, 1.499)]
    assert (event.bytes, event.backend, round(1e3 * event.launched, 6)) == (0, "nccl:all_reduce", 1.0)


# Waiting on a device


def on_device(*kernels, flight=(1, 9), span=(0.01, 0.9)):
    """Events of a backward with kernels of (start, length, when the host launched it), beside one all-reduce."""
    node = "autograd::engine::evaluate_function: MmBackward0"
    rows = [traces.host("d2l.step:", 0, 20, 1, annotation=True), traces.host(node, span[0], span[1], 5, sequence=5)]
    rows += traces.collective("c10d::allreduce_", "nccl:all_reduce", "ncclDevKernel_AllReduce", 0.1,
                              (flight[0], flight[1] - flight[0]), 90, 900, shapes=[[[8]]], thread=2)  # fmt: skip
    for number, (start, length, launched) in enumerate(kernels, 10):
        rows += [traces.host("aten::mm", 0.02, 0.01, number)]
        rows += traces.kernel("gemm", start, length, 500 + number, number, called=launched)
    found = trace.Trace([traces.Record(row) for row in sorted(rows, key=lambda row: row["start"])], on_device=True)
    return trace.read(found, 0, (0, 2))


def test_launch_gaps_are_not_waits():  # W6
    short = [(1 + 0.02 * i, 0.005, 0.03) for i in range(400)]
    assert times(on_device(*short), "wait") == [("device", 8.985, 9)]


def test_a_kernel_that_was_launched_and_did_not_run_waited():
    events = on_device((1, 1, 0.5), (6, 3, 0.6))
    assert times(events, "wait") == [("device", 2, 6)]
    assert milliseconds(hidden_and_exposed(events)) == [4, 4, 8]


def test_a_device_without_work_is_idle_and_waits_for_nothing():
    events = on_device((1, 1, 0.5), (6, 3, 5.9))
    assert times(events, "wait") == [("device", 5.9, 6)]
    assert milliseconds(hidden_and_exposed(events)) == [7.9, 0.1, 8]


# What went over sockets


def test_bytes_on_the_wire_are_counted_only_where_all_collectives_used_sockets():  # W5
    gloo = Event("collective", "all_reduce", 0, 0, 1, backend="gloo:all_reduce")
    nccl = Event("collective", "all_reduce", 0, 0, 1, backend="nccl:all_reduce")
    unseen = Event("collective", "all_reduce", 0, 0, None)
    cpu, gpu = nn.Linear(1, 1).weight.device, nn.Linear(1, 1, device="meta").weight.device  # any but the CPU
    assert wire.carried([gloo, Event("forward", "x", 0, 0, 1)], cpu)
    assert wire.carried([gloo, unseen], cpu)
    assert wire.carried([gloo], gpu)
    assert not wire.carried([gloo, nccl], gpu)
    assert not wire.carried([gloo, unseen], gpu)
