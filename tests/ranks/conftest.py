"""Real launches. Every test here ends with a look for processes of its launches: none may be left."""

import os

import pytest

from d2l_utils.launching import folders, helper
from tests.ranks.leftovers import none_left


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    left = none_left(folders.base())
    assert not left, f"left behind: {left}"


@pytest.fixture(params=["warm", "cold"])
def way(request, monkeypatch):
    """Both ways of launching, which must behave alike."""
    monkeypatch.setenv("D2L_LAUNCH", request.param)
    return request.param


@pytest.fixture(scope="session", autouse=True)
def one_helper():
    yield
    if helper._helper is not None:
        helper.discard(helper._helper)


@pytest.fixture(autouse=True)
def own_threads(monkeypatch):
    """A number of threads that the tester's shell set would hide what launch sets."""
    for name in [n for n in os.environ if n in ("OMP_NUM_THREADS", "D2L_WORLD_SIZE")]:
        monkeypatch.delenv(name)
