"""Profiler records in files: how to read them, and the ones that were made by hand until a GPU has written them.

    python -m tests.unit.traces    # writes tests/fixtures/traces/*.json again

A file holds rows, one a record of Kineto; a list of rows alone is read too, and either with gzip. Each row has the values of
the record's methods: see ``_METHODS``. ``made_by_hand`` is true in a file that no profiler has written.
"""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

FOLDER = Path(__file__).parents[1] / "fixtures" / "traces"
NO_THREAD = 2**64 - 1  # the thread of records that the device's library made
BEGAN = 1_700_000_000_000_000_000
_METHODS = {
    "name": "name", "start_ns": "start", "duration_ns": "length", "correlation_id": "id", "linked_correlation_id": "from",
    "start_thread_id": "thread", "sequence_nr": "sequence", "scope": "scope", "is_user_annotation": "annotation",
    "activity_type": "activity", "shapes": "shapes", "dtypes": "types", "nbytes": "bytes", "device_index": "index",
    "device_resource_id": "stream",
}  # fmt: skip


class Record:
    """A row with the methods of the profiler's own records."""

    def __init__(self, row):
        self.row = row
        for method, key in _METHODS.items():
            setattr(self, method, lambda key=key: self.row[key])
        if row.get("structured") is not None:
            self.structured_input_shapes = lambda: self.row["structured"]

    def device_type(self):
        return SimpleNamespace(name=self.row["device"])


def load(path):
    """The records of a file, as the profiler would give them."""
    text = gzip.open(path, "rt").read() if str(path).endswith(".gz") else Path(path).read_text()
    content = json.loads(text)
    return [Record(row) for row in (content["records"] if isinstance(content, dict) else content)]


def host(name, start, length, number=0, *, thread=1, annotation=False, activity=None, **fields):
    """A row of the host. Times in milliseconds from the start of the step; number: torch's correlation id."""
    activity = activity or ("user_annotation" if annotation else "cpu_op")
    return _row(
        name, start, length, "CPU", id=number, thread=thread, annotation=annotation, activity=activity, **fields
    )


def kernel(name, start, length, number, operator, *, called=None, stream=7):
    """A row of the device, and that of the runtime call with the same number (CUPTI's), at ``called``."""
    found = [_row(name, start, length, "CUDA", id=number, stream=stream, activity="kernel", **{"from": operator})]
    if called is not None:
        call = _row(
            "cudaLaunchKernelExC", called, 0.005, "CPU", id=number, activity="cuda_runtime", **{"from": operator}
        )
        found.append(call)
    return found


def twin(name, start, length, operator):
    """The device's copy of an annotation of the host."""
    row = _row(name, start, length, "CUDA", annotation=True, activity="gpu_user_annotation", stream=20)
    return row | {"from": operator}


def collective(operator, title, work, at, device, number, call, *, shapes, thread=1, late=0.12):
    """The rows of a collective on NCCL: the host's operators and annotation, the runtime call, the kernel, and its twin.

    at: when the host launched it; device: (start, length) of the kernel; call: CUPTI's number. late: from the launch to the
    runtime call.
    """
    types = ["float" if shape else "" for shape in shapes]
    return [
        host(operator, at, 0.2, number, thread=thread, structured=shapes, types=types),
        host("record_param_comms", at + 0.02, 0.16, number + 1, thread=thread),
        host(title, at + 0.05, 0.1, number + 2, thread=thread, annotation=True, shapes=[], types=["float"]),
        *kernel(work, *device, call, number + 1, called=at + late, stream=20),
        twin(title, *device, number + 2),
    ]


def ddp(clash=False):
    """Backward on one rank with two buckets: launched at 1.0 and 1.3 ms, on the device from 2 to 5 and from 5 to 8 ms."""
    rows = [
        host("d2l.step:", 0, 20, 1, annotation=True),
        host("autograd::engine::evaluate_function: MmBackward0", 0.5, 1.0, 6, thread=2, sequence=5),
        host("aten::mm", 0.6, 0.1, 7, thread=2),
        *kernel("sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n", 2.0, 6.0, 901, 7, called=0.65),
    ]
    if clash:  # CUPTI's numbers are torch's too: one is the operator's, another an operator's of the second bucket
        rows.append(_row("cudaLaunchKernel", 9.0, 0.01, "CPU", id=7, activity="cuda_runtime", **{"from": 40}))
        rows.append(_row("cudaLaunchKernel", 9.2, 0.01, "CPU", id=31, activity="cuda_runtime", **{"from": 40}))
    for i, (at, start) in enumerate([(1.0, 2.0), (1.3, 5.0)]):
        work = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        rows += collective(
            "c10d::allreduce_",
            "nccl:all_reduce",
            work,
            at,
            (start, 3.0),
            20 + 10 * i,
            902 + i,
            shapes=[[[8]]],
            thread=2,
        )
    return rows


def fsdp2():
    """A block of FSDP2: gathered before forward, its gradient scattered in backward. The host is ahead of the device: every
    mark and label is closed when the kernels begin."""
    gather, scatter = "ncclDevKernel_AllGather_RING_LL", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"
    return [
        host("d2l.step:", 0, 20, 1, annotation=True),
        host("FSDP::all_gather (blocks.0)", 0.1, 0.5, 2, annotation=True),
        *collective("c10d::_allgather_base_", "nccl:_all_gather_base", gather, 0.2, (1.0, 1.0), 10, 901,
                    shapes=[[16], [4], []]),
        twin("FSDP::all_gather (blocks.0)", 1.0, 1.0, 2),
        host("d2l.forward:blocks.0", 0.7, 0.3, 20, annotation=True),
        host("aten::mm", 0.8, 0.1, 21, sequence=3),
        *kernel("gemm", 2.0, 1.5, 902, 21, called=0.85),
        twin("d2l.forward:blocks.0", 2.0, 1.5, 20),
        host("autograd::engine::evaluate_function: MmBackward0", 1.2, 0.3, 30, thread=2, sequence=3),
        host("aten::mm", 1.3, 0.1, 31, thread=2),
        *kernel("gemm", 3.5, 2.0, 903, 31, called=1.35),
        host("FSDP::post_backward_reduce (blocks.0)", 1.6, 0.6, 40, thread=2, annotation=True),
        *collective("c10d::_reduce_scatter_base_", "nccl:_reduce_scatter_base", scatter, 1.8, (5.5, 1.0), 41, 904,
                    shapes=[[4], [16], []], thread=2),
        twin("FSDP::post_backward_reduce (blocks.0)", 5.5, 1.0, 40),
        host("Optimizer.step#AdamW.step", 2.5, 0.5, 50, annotation=True),
        host("aten::_fused_adamw_", 2.6, 0.3, 51),
        *kernel("multi_tensor_apply_kernel", 6.6, 0.5, 905, 51, called=2.7),
    ]  # fmt: skip


def p2p():
    """Two batches of a send and a receive, each one kernel. It is launched when the batch is closed: outside of any
    operator of torch in the first, inside the last launch in the second."""
    work = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    rows = [host("d2l.step:", 0, 20, 1, annotation=True)]
    for i, (at, start) in enumerate([(1.0, 3.0), (2.0, 5.0)]):
        number = 20 * (i + 1)
        for j, (operator, title) in enumerate([("c10d::send", "nccl:send 0->1"), ("c10d::recv_", "nccl:recv 0<-1")]):
            begun, own = at + 0.3 * j, number + 3 * j
            rows += [
                host(operator, begun, 0.2, own, structured=[[[6]]], types=["float"]),
                host("record_param_comms", begun + 0.02, 0.1, own + 1),
                host(title, begun + 0.05, 0.05, own + 2, annotation=True, types=["float"]),
            ]
        link, called = (number + 4, at + 0.45) if i else (0, at + 0.6)
        rows += [
            *kernel(work, start, 1.5, 901 + i, link, called=called, stream=20),
            twin("nccl:coalesced", start, 1.5, 0),
        ]
    return rows


def barrier():
    """A barrier, which NCCL runs as an all-reduce of one number. The device's clock is a microsecond ahead: the kernel seems
    to start before its launch."""
    work = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    return [
        host("d2l.step:", 0, 20, 1, annotation=True),
        *collective(
            "c10d::barrier", "nccl:all_reduce_barrier", work, 1.0, (0.999, 0.5), 10, 901, shapes=[[]], late=0.03
        ),
    ]


HAND_MADE = {
    "ddp": ddp, "ddp_id_clash": lambda: ddp(clash=True), "fsdp2": fsdp2, "p2p": p2p, "barrier": barrier,
}  # fmt: skip


def _row(name, start, length, device, **fields):
    row = {
        "name": name, "start": BEGAN + round(start * 1e6), "length": round(length * 1e6), "device": device, "id": 0,
        "from": 0, "thread": NO_THREAD, "sequence": -1, "scope": 0, "annotation": False, "activity": "", "shapes": [],
        "types": [], "structured": None, "bytes": 0, "index": 0 if device == "CUDA" else -1, "stream": 0,
    }  # fmt: skip
    return row | fields


def content(name):
    make = HAND_MADE[name]
    about = " ".join((make.__doc__ or ddp.__doc__).split())
    rows = sorted(make(), key=lambda row: row["start"])
    return {"made_by_hand": True, "about": about, "records": rows}


if __name__ == "__main__":
    for one in HAND_MADE:
        rows = ",\n".join(json.dumps(row) for row in content(one)["records"])
        head = json.dumps({key: value for key, value in content(one).items() if key != "records"})
        (FOLDER / f"{one}.json").write_text(f'{head[:-1]}, "records": [\n{rows}\n]}}\n')
