"""Says at once what is wrong when pytest runs in another environment than the chapter's, and hides the GPUs.

What is tested here trains on the CPU, on machines with GPUs as well: its numbers are the CPU's. tests/gpu alone sees the
GPUs. They are hidden when this file is imported, which is before anything asks torch for a device.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

missing = [name for name in ("torch", "dnnlpy", "nbval", "d2l_utils") if importlib.util.find_spec(name) is None]
if missing:
    # Here and not in a hook: hooks come after pytest has stumbled over the options of missing plugins.
    pytest.exit(
        f"This Python lacks {', '.join(missing)}. Run `make test`, or use .venv/bin/python -m pytest.",
        returncode=4,
    )

HIDING = {"D2L_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
given = {name: os.environ.get(name) for name in HIDING if name != "D2L_DEVICE"}
os.environ.update(HIDING)


@contextmanager
def devices_in_sight() -> Iterator[None]:
    """The tester's own view of the GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("D2L_DEVICE", raising=False)
        for name, value in given.items():
            patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)
        yield


def pytest_configure(config: Any) -> None:
    config.devices_in_sight = devices_in_sight  # for tests/gpu/conftest.py, which cannot import this file
