"""What a failed launch says, from what its ranks left behind."""

import os

import pytest

from d2l_utils import launch
from d2l_utils.launching.diagnosis import Ending, diagnose
from d2l_utils.launching.ranks import RankError, RankState


def failed(summary, traceback):
    error = RankError(summary, traceback, echo=False, time=1.0)
    return diagnose(Ending(states=[RankState(rank=0, error=error)], agent_logs=[]))


def test_an_exception_that_carries_a_tensor_is_shown_by_its_ends():
    long = "first " + "0" * 100_000 + " last"
    message = failed(f"ValueError: {long}", f"Traceback\n{long}").message
    assert message.startswith("rank 0 failed: ValueError: first 000") and message.endswith("000 last")
    assert "characters ..." in message.splitlines()[0] and len(message) < 23_000


def test_a_usual_exception_is_shown_whole():
    assert failed("ValueError: boom", "Traceback\nboom").message == "rank 0 failed: ValueError: boom\n\nTraceback\nboom"


def test_a_removed_working_directory_is_named(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    os.rmdir(gone)
    with pytest.raises(FileNotFoundError, match="working directory was removed"):
        launch("anything.py", world_size=1)
