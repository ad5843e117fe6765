"""One GPU: ranks can be forked beside it, what is recorded there, and the CPU's numbers."""

import pytest

from d2l_utils import launch
from d2l_utils.transformer import TransformerConfig
from tests.gpu import rank_functions as ranks
from tests.gpu import raw_traces

CONFIG = TransformerConfig(layers=4, width=64, length=64)
RECORDED = {"config": CONFIG, "batch": 24, "steps": 4, "record_step": 3, "allocations": True}
STRATEGIES = ["single", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "zero_redundancy"]


@pytest.mark.parametrize("way", ["warm", "cold"])
def test_a_rank_can_use_the_gpu(gpus, monkeypatch, way):
    monkeypatch.setenv("D2L_LAUNCH", way)
    made = launch(ranks.device_of_this_rank, world_size=1, device=gpus.type, output="quiet")
    assert (made.way, made.device) == (way, gpus.type)
    (found,) = made.results
    assert (found["bad fork"], found["sum"]) == (False, 2.0)
    assert found["device"].split(":")[0] == gpus.type


@pytest.mark.parametrize("what", ["AdamW", "fully_shard", "dcp.save"])
def test_cpu_ranks_beside_a_gpu_touch_none(run, what):
    untouched = {"tensors on": "cpu", "available": False, "initialized": False, "backend": "gloo"}
    assert run(ranks.on_the_cpu, 2, device="cpu", what=what) == [untouched] * 2


def test_the_default_group_takes_cpu_tensors_too(run):
    assert run(ranks.cpu_tensors, 1) == [{"CPU": 1.0, "DDP": True, "objects": [0], "device": 1.0}]


@pytest.mark.parametrize("strategy", ["single", "ddp", "zero3", "fsdp1", "fsdp2"])
def test_a_recorded_step_has_its_phases_and_kernels(gpus, run, keep, strategy):
    (found,) = traced = run(ranks.traced, 1, strategy=strategy, **RECORDED)
    keep(strategy, traced)
    kinds = {event.kind for event in found["result"].recording.events}
    assert {"forward", "backward", "optimizer"} <= kinds
    assert raw_traces.kernels(found["rows"]) or gpus.type == "cpu"
    assert found["result"].peak > 0


def test_a_recording_sees_kernels_after_one_that_used_no_device(run):
    assert run(ranks.recorded_after_a_model_without_weights, 1)[0] > 0


def both(run, strategy, **settings):
    """A strategy's result on the GPU, and on the CPU."""
    settings = RECORDED | settings
    return [
        run(ranks.traced, 1, strategy=strategy, **where, **settings)[0]["result"] for where in ({}, {"device": "cpu"})
    ]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_and_held_bytes_are_the_cpus(run, strategy):
    on_gpu, on_cpu = both(run, strategy)
    assert on_gpu.losses == pytest.approx(on_cpu.losses, rel=1e-5)
    assert on_gpu.held == on_cpu.held


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "fsdp2"])
def test_losses_in_two_bytes_are_close_to_the_cpus(run, strategy, precision):
    on_gpu, on_cpu = both(run, strategy, precision=precision)
    assert on_gpu.losses == pytest.approx(on_cpu.losses, rel=3e-3)
    assert on_gpu.held == on_cpu.held


def test_checkpointing_and_two_passes_give_the_cpus_losses(run):
    on_gpu, on_cpu = both(run, "fsdp2", checkpointing=True, accumulation=2)
    assert on_gpu.losses == pytest.approx(on_cpu.losses, rel=1e-5)


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "fsdp2"])
def test_the_lifecycle_of_a_step_breaks_no_rule(run, strategy):
    from chapter19_9.lifecycle import frames

    assert frames(run(ranks.frames_of, 1, strategy=strategy, config=CONFIG, batch=24)).frames


def test_what_was_saved_on_the_gpu_resumes_on_the_cpu(run, tmp_path):
    from chapter19_9.resuming.checkpoint import Checkpoints
    from chapter19_9.train import train

    settings = {"config": TransformerConfig(layers=2, width=64, length=32), "batch": 24, "lr": 1e-2}
    whole = run(train, 1, strategy="fsdp2", steps=6, **settings)[0]
    run(train, 1, strategy="fsdp2", steps=3, checkpoints=Checkpoints(str(tmp_path), every=3), **settings)
    again = run(train, 2, device="cpu", strategy="zero3", steps=6, checkpoints=Checkpoints(str(tmp_path)), **settings)[
        0
    ]
    assert again.losses == pytest.approx(whole.losses[3:], abs=1e-4)
