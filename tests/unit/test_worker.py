"""A rank under plain torchrun: its device, its process group, and when its result counts."""

import json

import pytest
import torch
import torch.distributed as dist

from d2l_utils import device
from d2l_utils.launching import environment, ranks, worker


@pytest.fixture
def rank(monkeypatch, tmp_path):
    """A rank of two on a machine with two GPUs; what it would do to them is written down in order."""
    done = []
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    for name in ("D2L_DEVICE", "D2L_DEVICE_TYPE", "D2L_RUN_FOLDER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: done.append(f"device {index}"))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda index: done.append(f"synchronize {index}"))
    monkeypatch.setattr(dist, "init_process_group", lambda backend: done.append(backend))
    return done


def test_plain_torchrun_gives_each_rank_its_device_and_a_group_for_both_kinds_of_tensors(rank, capsys):
    worker.run_rank(lambda: rank.append("function"))
    assert rank == ["device 1", "cpu:gloo,cuda:nccl", "function", "synchronize 1"]
    assert capsys.readouterr().out == "[rank 1] None\n"


def test_a_rank_asks_no_other_process_for_its_device(rank, monkeypatch):
    monkeypatch.setattr(device, "usable_devices", lambda: pytest.fail("a process was started"))
    assert device.rank_device() == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert device.rank_device() == torch.device("cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("D2L_DEVICE", "cpu")
    assert device.rank_device() == torch.device("cpu")


def test_a_rank_on_the_cpu_touches_no_device(rank, monkeypatch):
    monkeypatch.setenv("D2L_DEVICE", "cpu")
    worker.run_rank(lambda: rank.append("function"))
    assert rank == ["gloo", "function"]


def test_nothing_is_delivered_before_the_device_is_done(rank, monkeypatch, tmp_path):
    """NCCL's calls return at once; an error of the device comes when the host waits for it."""
    monkeypatch.setenv("D2L_RUN_FOLDER", str(tmp_path))
    monkeypatch.setenv("D2L_DEVICE_TYPE", "cuda")

    def fails(index):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.accelerator, "synchronize", fails)
    with pytest.raises(RuntimeError, match="device-side assert"):
        worker.run_rank(lambda: 7)
    assert not ranks.path(tmp_path, 1, "result").exists()


def test_what_the_agent_must_not_see_comes_back_in_the_rank():
    own = {"CUDA_VISIBLE_DEVICES": "1,0", "PYTHONSAFEPATH": "0"}
    env = environment.for_ranks(own, 2, "FOLDER", "cuda", ["PATH"])
    assert (env["CUDA_VISIBLE_DEVICES"], env["HIP_VISIBLE_DEVICES"], env["PYTHONSAFEPATH"]) == ("", "", "1")
    environment.restore(env)
    assert env["CUDA_VISIBLE_DEVICES"] == "1,0" and env["PYTHONSAFEPATH"] == "0"
    assert not {"HIP_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK", "D2L_RESTORE"} & env.keys()


def test_a_rank_on_the_cpu_keeps_the_devices_hidden():
    env = environment.for_ranks({"CUDA_VISIBLE_DEVICES": "1,0"}, 2, "FOLDER", "cpu", ["PATH"])
    environment.restore(env)
    assert (env["CUDA_VISIBLE_DEVICES"], env["HIP_VISIBLE_DEVICES"]) == ("", "")
    assert json.loads(env.get("D2L_RESTORE", "{}")) == {}
