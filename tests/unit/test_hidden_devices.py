"""No test but those of tests/gpu sees a GPU, whatever the tester's shell says; and those say why they are skipped."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NAMES = ("D2L_DEVICE", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def pytest_run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    # Beside a driver, GPU tests say in a worker of xdist that they are run one at a time.
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.run(command, cwd=ROOT, env=own | environ, capture_output=True, text=True, timeout=120)


def test_the_gpus_are_hidden() -> None:
    assert [os.environ.get(name) for name in NAMES] == ["cpu", "", ""]


@pytest.mark.skipif("D2L_TEST_SHELL" not in os.environ, reason="run by the test below, in a shell that says otherwise")
def test_the_testers_own_view_is_kept_for_the_gpu_tests(pytestconfig: Any) -> None:
    test_the_gpus_are_hidden()
    with pytestconfig.devices_in_sight():
        assert [os.environ.get(name) for name in NAMES] == [None, "3,1", ""]
    test_the_gpus_are_hidden()


def test_the_gpus_are_hidden_whatever_the_shell_says() -> None:
    settings = {"D2L_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": "3,1", "D2L_TEST_SHELL": "1"}
    done = pytest_run(f"{__file__}::{test_the_testers_own_view_is_kept_for_the_gpu_tests.__name__}", **settings)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_where_there_is_no_gpu_its_tests_are_skipped_with_the_reason() -> None:
    done = pytest_run("-m", "gpu", "tests/gpu")  # the shell of this run hides all of them
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" not in done.stdout and "failed" not in done.stdout
    reasons = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert len(reasons) == 1 and "no GPU that torch can use: " in reasons[0]
