"""What the GPU tests work out from raw traces, on rows whose answers are known."""

import gzip
import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.gpu import raw_traces
from tests.gpu.raw_traces import closed, covered, overlap


@pytest.mark.parametrize(
    ("spans", "gap", "length"),
    [
        ([], 0, 0),
        ([(0, 2), (1, 3)], 0, 3),
        ([(5, 6), (0, 10), (2, 3)], 0, 10),
        ([(0, 1), (2, 3)], 0, 2),
        ([(0, 1), (2, 3), (5, 6)], 1, 4),
        ([(3, 3)], 0, 0),
    ],
)
def test_the_union_of_intervals(spans, gap, length):
    assert covered(spans, gap) == length
    assert covered(closed(spans, gap)) == length


def test_what_two_sets_of_intervals_share():
    assert overlap([(0, 4), (6, 8)], [(3, 7)]) == 2
    assert overlap([(0, 4)], [(4, 9)]) == 0
    assert overlap([(0, 4), (2, 6)], [(0, 9)]) == 6, "two at once count once"


def row(name, start, length, device="CUDA", **fields):
    return {
        "name": name,
        "start": start,
        "length": length,
        "device": device,
        "annotation": False,
        "activity": "kernel",
    } | fields


STEP = [
    row("c10d::allreduce_", 0, 1, "CPU", activity="cpu_op"),
    row("gemm", 1, 4),
    row("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 3, 4),
    row("nccl:all_reduce", 3, 4, annotation=True),
    row("d2l.forward:head", 1, 4, activity="gpu_user_annotation"),
    row("[memory]", 2, 0, activity=""),
]


def test_only_what_ran_on_the_device_is_a_kernel():
    kernels = raw_traces.kernels(STEP)
    assert [one["name"].split("_")[0] for one in kernels] == ["gemm", "ncclDevKernel"]
    communication = [one for one in kernels if raw_traces.is_communication(one)]
    assert len(communication) == raw_traces.launches(STEP) == 1
    computing = [one for one in kernels if not raw_traces.is_communication(one)]
    assert overlap(raw_traces.spans(communication), raw_traces.spans(computing)) == 2


def test_rows_hold_what_the_profiler_says_and_come_back_from_their_file(tmp_path):
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        torch.ones(2, 3) @ torch.ones(3, 4)
    rows = raw_traces.rows(prof.profiler.kineto_results.events())
    (product,) = [one for one in rows if one["name"] == "aten::mm"]
    assert (product["device"], product["shapes"][:2]) == ("CPU", [[2, 3], [3, 4]]) and product["length"] > 0
    path = raw_traces.write(tmp_path / "new", "step", "a product", rows)
    with gzip.open(path, "rt") as file:
        stored = json.load(file)
    assert stored == {"made_by_hand": False, "about": "a product", "records": json.loads(json.dumps(rows))}
