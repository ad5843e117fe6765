"""Launching beside an NVIDIA driver: a stand-in for its management library makes torch count devices in every process.

No device can be used with it, so ranks run on the CPU here. What is shown is who asks the driver, what each rank sees, and
that nothing which trains on the CPU reaches for a device. tests/gpu runs on real ones.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from d2l_utils import device, launch
from d2l_utils.device import Devices
from d2l_utils.launching import environment
from tests.ranks.driver_functions import driver

KERNEL = """
import json, os, sys, tempfile
from d2l_utils import device, launch
from tests.ranks.driver_functions import driver, trains_on_the_cpu
one = launch(driver, world_size=2, output="quiet")
with tempfile.TemporaryDirectory() as folder:
    two = launch(trains_on_the_cpu, world_size=2, folder=folder, output="quiet") if "train" in sys.argv else None
import torch
print(json.dumps({
    "counted": torch.cuda.device_count(), "usable": device.usable_devices().count, "default": device.default_world_size(),
    "choice": str(device.choose(2)), "way": one.way, "device": one.device, "ranks": one.results, "trained": two and two.results,
}))
"""


@pytest.fixture(scope="module")
def driver_folder(tmp_path_factory):
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        assert "D2L_CI" not in os.environ, "CI needs a C compiler for the stand-in driver"
        pytest.skip("no C compiler: the stand-in for the driver cannot be built")
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    return folder


def kernel(folder, devices, *arguments, **env):
    """What a fresh Python that launches says on a machine whose driver reports so many devices."""
    settings = {"LD_LIBRARY_PATH": str(folder), "FAKE_NVML": str(devices), **env}
    hidden = ("D2L_DEVICE", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")  # the suite hides devices: not here
    environ = {name: value for name, value in os.environ.items() if name not in hidden} | settings
    done = subprocess.run(
        [sys.executable, "-c", KERNEL, *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("devices", "way"), [(1, "warm"), (2, "warm"), (5, "cold"), (8, "warm")])
def test_ranks_on_the_cpu_see_no_device(driver_folder, devices, way):
    found = kernel(driver_folder, devices, "train", D2L_LAUNCH=way)
    assert found["counted"] == devices, "the stand-in was not asked"
    assert (found["usable"], found["way"], found["device"]) == (0, way, "cpu")
    assert found["choice"].startswith(
        f"2 ranks on CPU with gloo: torch cannot use cuda:0 of {devices}, Found no NVIDIA"
    )
    assert 24 % found["default"] == 0
    for rank in found["ranks"]:
        assert (rank["bad fork"], rank["available"], rank["count"]) == (False, False, 0)
    assert found["trained"] == [["cpu", False]] * 2


def test_D2L_DEVICE_cpu_asks_for_no_device(driver_folder):
    found = kernel(driver_folder, 2, D2L_DEVICE="cpu")
    assert found["choice"] == "2 ranks on CPU with gloo: D2L_DEVICE=cpu" and found["default"] == 4


@pytest.fixture
def two_devices(monkeypatch):
    """This process believes in two devices, so that it launches ranks for them."""
    monkeypatch.setattr(device, "usable_devices", lambda: Devices("cuda", 2, "nccl", "2 devices found"))
    monkeypatch.delenv("D2L_DEVICE", raising=False)


REPORT = """
import json, os
from tests.ranks.driver_functions import driver
print(json.dumps(driver()))
"""


@pytest.mark.parametrize("visible", [None, "1,0"])
def test_ranks_on_devices_have_the_readers_own_view_of_them(two_devices, monkeypatch, tmp_path, way, visible):
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    script = tmp_path / "report.py"
    script.write_text(REPORT)
    run = launch(script, world_size=2, output="quiet")
    assert (run.way, run.device, run.backend) == (way, "cuda", "nccl")
    for text in run.output:
        found = json.loads(text)
        assert found["bad fork"] is False  # each rank could initialise the driver, were there one
        assert found["environment"] == ({"CUDA_VISIBLE_DEVICES": visible} if visible else {})


def test_a_rank_in_a_bad_fork_is_started_the_cold_way(monkeypatch, capsys):
    """An agent that asks the driver makes its forks useless: the ranks find out, and the launch is made again."""
    monkeypatch.setenv("D2L_LAUNCH", "warm")
    monkeypatch.setattr(environment, "_NO_DEVICES", {})
    run = launch(driver, world_size=2)
    assert run.way == "cold" and [rank["bad fork"] for rank in run.results] == [False, False]
    assert "a process above the ranks has asked the accelerator's driver" in capsys.readouterr().out


def test_a_fall_back_to_the_cpu_is_said_once_also_in_a_quiet_launch(two_devices, monkeypatch, capsys):
    monkeypatch.setattr("d2l_utils.launching.launcher._said", set())
    launch(driver, world_size=4, output="quiet")
    launch(driver, world_size=4, output="quiet")
    assert capsys.readouterr().out == "4 ranks on CPU with gloo: 2 cuda devices found, 4 needed\n"
