"""Device type, backend and number of ranks: decided before anything starts, and said in one line."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from d2l_utils import device
from d2l_utils.device import Choice, Devices, check_world_size, choose, default_world_size, keep_one_device, rank_device
from d2l_utils.launching import launcher

SETTINGS = ("D2L_DEVICE", "D2L_DEVICE_STRICT", "D2L_WORLD_SIZE", "D2L_DEVICE_TYPE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device, "_largest", 0)


@pytest.fixture
def machine(monkeypatch):
    """machine(kind, count, mps=...) pretends that torch finds these accelerators."""

    def pretend(kind=None, count=0, mps=False):
        found = torch.device(kind) if kind else None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: found)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: True)
        # what the process that is asked would find; it makes no tensors here
        monkeypatch.setattr(device, "usable_devices", lambda: device.visible_devices())

    return pretend


def test_no_accelerator_means_cpu_and_gloo(machine):
    machine()
    assert choose(4) == Choice("cpu", "gloo", 4, "no GPU found")
    assert str(choose(4)) == "4 ranks on CPU with gloo: no GPU found"
    assert str(choose(1)).startswith("1 rank on CPU")


def test_accelerators_are_used_when_there_is_one_for_each_rank(machine):
    machine("cuda", 4)
    assert str(choose(4)) == "4 ranks on cuda with nccl: 4 devices found"
    assert choose(5) == Choice("cpu", "gloo", 5, "4 cuda devices found, 5 needed", falls_back=True)
    machine("xpu", 2)
    assert (choose(2).device_type, choose(2).backend) == ("xpu", "xccl")
    machine("cuda", 1)
    assert choose(2).reason == "1 cuda device found, 2 needed"


def test_simulated_nodes_do_not_share_a_device(machine):
    machine("cuda", 4)
    assert choose(4, nodes=2) == Choice("cpu", "gloo", 4, "2 simulated nodes would share cuda devices", True)


def test_a_backend_that_this_torch_lacks_means_cpu(machine, monkeypatch):
    machine("cuda", 4)
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: name != "nccl")
    assert choose(4) == Choice("cpu", "gloo", 4, "this torch has no nccl for cuda")


def test_V02_mps_means_cpu_and_gloo_with_one_reason(machine):
    machine("mps", 1)
    choice = choose(2)
    assert (choice.device_type, choice.backend) == ("cpu", "gloo")
    assert "MPS" in choice.reason
    assert "\n" not in str(choice)
    assert default_world_size() == 4


def test_D2L_DEVICE_forces(machine, monkeypatch):
    machine("cuda", 4)
    monkeypatch.setenv("D2L_DEVICE", "cpu")
    assert choose(2) == Choice("cpu", "gloo", 2, "D2L_DEVICE=cpu")
    assert default_world_size() == 4
    monkeypatch.setenv("D2L_DEVICE", " CUDA ")
    assert choose(2) == Choice("cuda", "nccl", 2, "D2L_DEVICE=cuda, 4 devices found")


@pytest.mark.parametrize("text", ["gpu", "cuda:1", "meta", "42", "中"])
def test_D2L_DEVICE_nonsense_is_refused(machine, monkeypatch, text):
    machine()
    monkeypatch.setenv("D2L_DEVICE", text)
    with pytest.raises(ValueError, match=f"D2L_DEVICE is '{text}'.*such as cpu or cuda"):
        choose(2)


UNSERVED = [
    (None, 0, "cuda", "no GPU found"),
    ("cuda", 1, "cuda", "1 cuda device found, 2 needed"),
    ("cuda", 8, "xpu", "this machine has cuda"),
    ("mps", 1, "mps", "Apple's MPS has no backend for several ranks"),
]


@pytest.mark.parametrize(("kind", "count", "wanted", "why"), UNSERVED)
def test_D2L_DEVICE_is_a_preference(machine, monkeypatch, kind, count, wanted, why):
    machine(kind, count)
    monkeypatch.setenv("D2L_DEVICE", wanted)
    assert choose(2) == Choice("cpu", "gloo", 2, f"D2L_DEVICE={wanted} cannot serve, {why}", falls_back=True)


@pytest.mark.parametrize(("kind", "count", "wanted", "why"), UNSERVED)
def test_a_demand_that_cannot_be_met_is_an_error(machine, monkeypatch, kind, count, wanted, why):
    machine(kind, count)
    words = f"is {wanted!r}, which cannot serve world_size=2: {why}; allowed is 'cpu', or a type that can"
    with pytest.raises(ValueError, match="device") as caught:
        choose(2, device=wanted)
    assert str(caught.value) == f"device {words}"
    monkeypatch.setenv("D2L_DEVICE", wanted)
    monkeypatch.setenv("D2L_DEVICE_STRICT", "1")
    with pytest.raises(ValueError, match="D2L_DEVICE") as caught:
        choose(2)
    assert str(caught.value) == f"D2L_DEVICE {words}"


def test_a_strictness_that_is_neither_is_refused(machine, monkeypatch):
    machine("cuda", 1)
    monkeypatch.setenv("D2L_DEVICE", "cuda")
    for text in ("0", ""):
        monkeypatch.setenv("D2L_DEVICE_STRICT", text)
        assert choose(2).device_type == "cpu"
    monkeypatch.setenv("D2L_DEVICE_STRICT", "maybe")
    with pytest.raises(ValueError, match="D2L_DEVICE_STRICT is 'maybe': allowed are 0 and 1"):
        choose(2)


def test_the_argument_device_goes_before_D2L_DEVICE(machine, monkeypatch):
    machine("cuda", 4)
    assert choose(2, device="cpu") == Choice("cpu", "gloo", 2, "device=cpu")
    monkeypatch.setenv("D2L_DEVICE", "cpu")
    assert choose(2, device="cuda") == Choice("cuda", "nccl", 2, "device=cuda, 4 devices found")
    for bad in ("gpu", "cuda:0", 3, torch.device("cpu")):
        with pytest.raises(ValueError, match=r"device is .*without a number"):
            choose(2, device=bad)


@pytest.mark.parametrize(
    ("count", "default"), [(1, 4), (2, 2), (3, 3), (4, 4), (5, 4), (7, 6), (8, 8), (10, 8), (16, 12), (72, 24)]
)
def test_the_default_world_size_divides_the_lessons_batch(machine, count, default):
    machine("cuda", count)
    assert default_world_size() == default and 24 % default == 0


def test_one_lesson_runs_on_one_kind_of_device(machine):
    machine("cuda", 2)
    assert [choose(n).device_type for n in (1, 2, 4)] == ["cuda", "cuda", "cpu"]
    keep_one_device(4)
    assert [choose(n).device_type for n in (1, 2, 4)] == ["cpu"] * 3 and default_world_size() == 4
    assert choose(2).reason == "2 cuda devices found, and this lesson launches up to 4 ranks"
    assert choose(2, device="cuda").device_type == "cuda"  # who names a device decides for one launch
    machine("cuda", 4)
    assert [choose(n).device_type for n in (1, 2, 4)] == ["cuda"] * 3
    with pytest.raises(ValueError, match="largest is 65"):
        keep_one_device(65)


def test_a_larger_default_world_size_is_a_lessons_largest_launch_too(machine, monkeypatch, capsys):
    monkeypatch.setattr(launcher.helper, "warm_helper", lambda: None)
    machine("cuda", 4)
    monkeypatch.setenv("D2L_WORLD_SIZE", "8")
    assert launcher.warm_up(largest=2).device_type == choose(2).device_type == "cpu"
    assert choose(2).reason == "4 cuda devices found, and this lesson launches up to 8 ranks"
    monkeypatch.delenv("D2L_WORLD_SIZE")
    assert launcher.warm_up(largest=2).device_type == choose(2).device_type == "cuda"


def test_a_device_that_makes_no_tensor_is_not_counted(machine, monkeypatch):
    machine("cuda", 3)

    def ones(size, device):
        if device == refuses:
            raise RuntimeError("CUDA error: no kernel image is available. Compile with more.\nLine two")
        return torch.zeros(size)

    monkeypatch.setattr(torch, "ones", ones)
    refuses = "cuda:0"
    why = "torch cannot use cuda:0 of 3, CUDA error: no kernel image is available"
    assert device.ask_torch() == Devices(None, 0, "", why)
    refuses = "cuda:2"
    why = "2 devices found; torch cannot use cuda:2 of 3, CUDA error: no kernel image is available"
    assert device.ask_torch() == Devices("cuda", 2, "nccl", why)
    refuses = None
    assert device.ask_torch() == Devices("cuda", 3, "nccl", "3 devices found")


def test_a_machine_without_a_driver_is_asked_nothing(monkeypatch):
    monkeypatch.setattr(device, "driver_found", lambda: False)
    monkeypatch.setattr(device.subprocess, "run", lambda *a, **k: pytest.fail("a process was started"))
    assert device.usable_devices() == Devices(None, 0, "", "no GPU found")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (subprocess.TimeoutExpired("python", 90), "torch has not said within 90 s which GPUs it can use"),
        (OSError("no memory"), "torch cannot be asked for GPUs (OSError)"),
        (subprocess.CompletedProcess([], -9, "", ""), "torch cannot be asked for GPUs (IndexError)"),
        (subprocess.CompletedProcess([], 0, "a banner\n{", ""), "torch cannot be asked for GPUs (JSONDecodeError)"),
    ],
)
def test_a_process_that_does_not_answer_means_the_cpu(monkeypatch, answer, reason):
    def run(*arguments, **options):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(device, "_answers", {})
    monkeypatch.setattr(device, "driver_found", lambda: True)
    monkeypatch.setattr(device.subprocess, "run", run)
    assert device.usable_devices() == Devices(None, 0, "", reason)
    answer = subprocess.CompletedProcess([], 0, '{"type": "cuda", "count": 2, "backend": "nccl", "reason": "2"}', "")
    assert device.usable_devices() == Devices("cuda", 2, "nccl", "2")  # it is asked again
    answer = OSError("asked a third time")
    assert device.usable_devices().count == 2


@pytest.mark.parametrize("bad", [0, -1, 1.5, 2.0, "2", True, False, 65, 10**30, b"2", [2]])
def test_L24_L23_a_bad_world_size_is_refused(bad):
    with pytest.raises(ValueError, match="world_size") as caught:
        check_world_size(bad)
    assert str(caught.value) == f"world_size is {bad!r}: it must be a whole number from 1 to 64"
    with pytest.raises(ValueError, match="world_size"):
        choose(bad)
    with pytest.raises(ValueError, match="nodes"):
        choose(2, nodes=bad)


@pytest.mark.parametrize("good", [1, 2, 64, np.int64(3)])
def test_a_good_world_size_is_an_int(good):
    assert check_world_size(good) == good
    assert type(check_world_size(good)) is int


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "two", "True", "65", "²", "1_0", "9" * 5000])
def test_D2L_WORLD_SIZE_is_held_to_the_same_range(monkeypatch, text):
    monkeypatch.setenv("D2L_WORLD_SIZE", text)
    for ask in (default_world_size, check_world_size, choose):
        with pytest.raises(ValueError, match=r"D2L_WORLD_SIZE is .*: it must be a whole number from 1 to 64"):
            ask()


def test_the_default_world_size(machine, monkeypatch):
    machine()
    assert default_world_size() == check_world_size() == choose().world_size == 4
    machine("cuda", 1)
    assert default_world_size() == 4
    machine("cuda", 8)
    assert default_world_size() == 8
    monkeypatch.setenv("D2L_WORLD_SIZE", " 3 ")
    assert default_world_size() == check_world_size() == 3
    assert check_world_size(2) == 2


def test_the_device_inside_a_rank(machine, monkeypatch):
    machine("cuda", 2)
    assert rank_device() == torch.device("cuda", 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert rank_device() == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert rank_device() == torch.device("cpu")
    monkeypatch.setenv("D2L_DEVICE_STRICT", "1")
    assert rank_device() == torch.device("cpu")  # nothing is demanded
    monkeypatch.setenv("D2L_DEVICE", "cuda")
    with pytest.raises(ValueError, match="D2L_DEVICE is 'cuda', which cannot serve the 3 ranks of this node: 2 cuda"):
        rank_device()
    monkeypatch.setenv("D2L_DEVICE_TYPE", "cuda")
    assert rank_device() == torch.device("cuda", 1)
    monkeypatch.setenv("D2L_DEVICE_TYPE", "cpu")
    assert rank_device() == torch.device("cpu")


def test_L19_memory_that_this_process_holds_is_said(machine, monkeypatch):
    machine("cuda", 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda i: 2**30 if i == 0 else 0)
    assert str(choose(2)) == (
        "2 ranks on cuda with nccl: 2 devices found (this process itself holds 1024 MiB of GPU memory)"
    )
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda i: 0)
    assert str(choose(2)) == "2 ranks on cuda with nccl: 2 devices found"


def test_choosing_imports_no_torch():
    code = (
        "import sys\n"
        "from d2l_utils.device import check_world_size, choose\n"
        "check_world_size()\n"
        "choose(2)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_limit_is_the_documented_one():
    assert device.MAX_WORLD_SIZE == 64
