"""The recorder on steps of one process: blocks, computing, memory, the optimizer, and what it refuses."""

import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from d2l_utils import memory, profiler
from d2l_utils.memory import PeakMemory, held
from d2l_utils.record import default_blocks, record
from d2l_utils.saved import SavedBytes
from d2l_utils.transformer import Transformer, TransformerConfig

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


def test_two_recorded_steps_in_a_row_have_the_same_curve_and_peak():
    model = nn.Linear(1000, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters())

    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 1000)).sum().backward()
        optimizer.step()

    step()
    with record(model, optimizer, allocations=True) as apart:
        step()
    step()  # outside of any recording
    again, kept = [], []
    for _ in range(3):
        with record(model, optimizer, allocations=True) as recording:
            kept[:] = [
                torch.zeros(250_000)
            ]  # the last one goes here: an earlier recording saw it come, and this one not
            step()
        again.append(recording)
    for one in again:
        assert one.peak - 1_000_000 == apart.peak
        assert [p.bytes - 1_000_000 for p in one.memory][2:] == [p.bytes for p in apart.memory][1:]
        assert one.memory[-1].bytes == 1_000_000


def test_a_gradient_that_an_earlier_recording_saw_come_goes_once():
    model = nn.Linear(1000, 1, bias=False)
    for _ in range(2):
        with record(model, allocations=True) as recording:
            model.zero_grad()
            model(torch.ones(1, 1000)).sum().backward()
    assert min(point.bytes for point in recording.memory) == -4000
    assert recording.memory[-1].bytes == 0


def test_garbage_goes_before_the_step_is_measured():
    class Ring:
        def __init__(self):
            self.own, self.memory = self, torch.zeros(250_000)

    model = nn.Linear(1, 1, bias=False)
    with record(model, allocations=True):
        Ring()
    with record(model, allocations=True) as recording:
        gc.collect()
        torch.zeros(10)
    assert [point.bytes for point in recording.memory] == [0, 40, 0]


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


@pytest.mark.filterwarnings("ignore:Lazy")
def test_models_of_every_kind_can_be_recorded():
    sparse = nn.Embedding(10, 4, sparse=True)
    complex_ = nn.Linear(3, 5, dtype=torch.complex64)
    lazy = nn.LazyLinear(5)
    for model, x in ((sparse, torch.tensor([3, 7])), (complex_, torch.ones(1, 3) + 0j), (lazy, torch.ones(1, 3))):
        for _ in range(2):
            with record(model, allocations=True, holdings=True) as recording, SavedBytes(model) as saved:
                model(x).abs().sum().backward()
        assert names(recording, "forward") == ["model"]
        assert saved.bytes is not None
        last = [holding for holding in recording.holdings if holding.block == "model"][-1]
        assert last.parameters == held(model).parameters
        assert last.gradients == held(model).needed.gradients > 0


# A rank on a device, which this machine need not have


class Device:
    """What a device's profiler and allocator are asked for in its place."""

    def __init__(self, monkeypatch):
        self.profiled, self.allocated, self.peak = [], lambda: 0, 0
        monkeypatch.setenv("D2L_DEVICE_TYPE", "cuda")
        monkeypatch.setenv("LOCAL_RANK", "0")
        profile = profiler._profile

        def on_the_cpu(device, shapes, memory):
            self.profiled.append(device)
            return profile(torch.device("cpu"), shapes, memory)

        monkeypatch.setattr(profiler, "_profile", on_the_cpu)
        monkeypatch.setattr(profiler, "_warm", {"cuda"})
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: None)
        monkeypatch.setattr(memory, "allocator", lambda device: self)

    def reset_peak_memory_stats(self, device):
        self.peak = 0

    def memory_allocated(self, device):
        return self.allocated()

    def max_memory_allocated(self, device):
        return self.allocated() + 500


@pytest.fixture
def device(monkeypatch):
    return Device(monkeypatch)


def test_a_rank_on_a_device_always_records_the_device(device):  # W10
    cuda = torch.device("cuda", 0)
    with record(nn.Identity()) as nothing:
        pass
    assert (device.profiled, nothing.peak) == ([cuda], 500)
    model = nn.Linear(8, 8)
    with record(model, allocations=True) as on_cpu:
        model(torch.ones(1, 8)).sum().backward()
    assert device.profiled == [cuda] * 2
    assert names(on_cpu, "forward") == ["model"]
    assert on_cpu.peak == max(point.bytes for point in on_cpu.memory) > 0


def test_garbage_on_a_device_goes_before_the_allocator_is_read(device):
    class Ring:
        def __init__(self):
            self.own = self

    garbage = weakref.ref(Ring())
    device.allocated = lambda: 100 if garbage() is not None else 0
    with record(nn.Identity()) as recording:
        gc.collect()
    assert recording.peak == 500


def test_the_peak_of_a_device_is_its_allocators(device):
    with PeakMemory() as peak:
        pass
    assert (peak.bytes, peak.device.type, peak.counter) == (500, "cuda", "torch.cuda.max_memory_allocated")
    assert device.profiled == []
    with PeakMemory(), pytest.raises(RuntimeError, match="already measuring"), PeakMemory():
        pass


def test_a_devices_profiler_is_warmed_up_once_a_process(device, monkeypatch):
    monkeypatch.setattr(profiler, "_warm", set())
    meta = torch.device("meta")  # a device that needs no driver
    for _ in range(2):
        with profiler.profiling(meta):
            pass
    assert device.profiled == [meta] * 3
    with profiler.profiling(torch.device("cpu")):
        pass
    assert len(device.profiled) == 4


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


def starts_of_profilers():
    """What starts a profiler in one way or another."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    return {
        "torch.profiler": lambda: torch.profiler.profile(activities=activities),
        "in steps": lambda: torch.profiler.profile(activities=activities, schedule=lambda step: ACTIVE),
        "autograd": lambda: torch.autograd.profiler.profile(use_cpu=True),
        "legacy": lambda: torch.autograd.profiler_legacy.profile(),
        "emit_itt": lambda: torch.autograd.profiler.emit_itt(),
        "all threads": lambda: torch.profiler.profile(
            activities=activities,
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        ),
    }


ACTIVE = torch.profiler.ProfilerAction.RECORD


@pytest.mark.parametrize("measure", [PeakMemory, lambda: record(nn.Linear(1, 1))], ids=["peak", "record"])
@pytest.mark.parametrize("way", list(starts_of_profilers()))
def test_a_second_profiler_is_refused_inside_and_around(measure, way):  # X23
    start = starts_of_profilers()[way]
    with measure(), pytest.raises(RuntimeError, match="a profiler is already running here"), start():
        pass
    with start(), pytest.raises(RuntimeError, match="a profiler is already running here"), measure():
        pass
    with start():  # it is as it was before
        torch.ones(1).add_(1)
    with measure():
        pass


def test_measures_inside_one_another_are_refused():
    with PeakMemory(), pytest.raises(RuntimeError, match="already"), record(nn.Linear(1, 1)):
        pass
    with record(nn.Linear(1, 1)), pytest.raises(RuntimeError, match="already running"), PeakMemory():
        pass
    with PeakMemory() as outer:
        torch.empty(1000, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="already measuring"), PeakMemory():
            pass
    assert outer.bytes == 1000


def test_nothing_is_printed():
    code = "import torch; from d2l_utils.record import record\nwith record(torch.nn.Linear(1, 1)): pass\nprint('done')"
    environment = {key: value for key, value in os.environ.items() if key != "KINETO_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert (done.stdout, done.stderr) == ("done\n", "")
