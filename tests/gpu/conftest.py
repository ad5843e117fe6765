"""Ranks on real GPUs. `make test-gpu` runs these tests, one at a time; everywhere else they are skipped with the reason.

D2L_GPU_TRACES=FOLDER keeps the profiler's rows of the recorded steps there, for tests/fixtures/traces.
"""

import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from d2l_utils import launch
from d2l_utils.device import Devices, driver_found, usable_devices
from d2l_utils.launching import folders, helper
from tests.gpu import raw_traces
from tests.ranks.leftovers import none_left


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.gpu)


@functools.cache
def why_not(config: Any) -> str:
    """Why the GPU tests are skipped; "" where they run."""
    if "PYTEST_XDIST_WORKER" in os.environ and driver_found():
        return "launches that share GPUs would disturb each other: `make test-gpu` runs one test at a time"
    with config.devices_in_sight():
        found = usable_devices()
    return "" if found.type else f"no GPU that torch can use: {found.reason}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if reason := why_not(item.config):
        pytest.skip(reason)  # here and not in a fixture, so that pytest says it in one line for all tests


@pytest.fixture(scope="module", autouse=True)
def gpus(pytestconfig: Any) -> Iterator[Devices]:
    """The GPUs of this machine, which no other tests see."""
    with pytestconfig.devices_in_sight():
        yield usable_devices()


@pytest.fixture(scope="module", autouse=True)
def no_helper_of_other_tests(gpus: Devices) -> Iterator[None]:
    """A helper process that started while the GPUs were hidden is not used here, nor one of here elsewhere."""

    def discard() -> None:
        if helper._helper is not None:
            helper.discard(helper._helper)

    discard()
    yield
    discard()


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("nccl-*")}


@pytest.fixture(autouse=True)
def nothing_left(gpus: Devices) -> Iterator[None]:
    before = _shared_memory()
    yield
    left = none_left(folders.base(), seconds=15.0)
    assert not left, f"left behind: {left}"
    assert _shared_memory() <= before


@pytest.fixture
def run(gpus: Devices) -> Callable[..., list[Any]]:
    """run(function, ranks, **arguments) -> each rank's result; on the GPUs unless it is told device="cpu"."""

    def results(
        function: Callable[..., Any], world_size: int, device: str | None = gpus.type, **settings: Any
    ) -> list[Any]:
        settings = {"timeout": 120} | settings
        made = launch(function, world_size=world_size, device=device, output="quiet", **settings)
        assert made.device == device
        return made.results

    return results


@pytest.fixture
def keep() -> Callable[[str, list[dict[str, Any]]], None]:
    """keep(name, what each rank traced): writes the rows of each rank where D2L_GPU_TRACES says."""

    def write(name: str, ranks: list[dict[str, Any]]) -> None:
        if folder := os.environ.get("D2L_GPU_TRACES"):
            for rank, traced in enumerate(ranks):
                about = f"{name}, rank {rank} of {len(ranks)}, {traced['title']}"
                raw_traces.write(folder, f"{name}_rank_{rank}_of_{len(ranks)}", about, traced["rows"])

    return write
