"""What a trace is turned into, from records made by hand: no machine with a GPU has run these tests."""

from d2l_utils import trace
from d2l_utils.events import hidden_and_exposed


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
