"""macOS and Windows were not at hand: what would be run there is looked at (L33, L34, L35, L36)."""

import os
import sys
from types import SimpleNamespace

import psutil  # before a test patches the platform: psutil reads it once, when it is imported
import pytest

from d2l_utils.launching import commands, environment, folders, helper
from d2l_utils.launching.warm import IDLE_MARK


def ranks_env(monkeypatch, platform, **inherited):
    monkeypatch.setattr(sys, "platform", platform)
    return environment.for_ranks(inherited, 2, "FOLDER", "cpu", ["PATH1"])


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_L35_no_fork_where_it_is_unsafe(monkeypatch, platform):
    monkeypatch.setattr(sys, "platform", platform)
    assert platform in environment.why_not_warm({})


def test_linux_is_warm_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    assert environment.why_not_warm({}) is None and environment.why_not_warm({"D2L_LAUNCH": "warm"}) is None
    assert "D2L_LAUNCH=cold" in environment.why_not_warm({"D2L_LAUNCH": "cold"})
    with pytest.raises(ValueError, match="D2L_LAUNCH is 'fast'"):
        environment.why_not_warm({"D2L_LAUNCH": "fast"})


def test_L34_windows_has_no_libuv(monkeypatch):
    assert ranks_env(monkeypatch, "win32")["USE_LIBUV"] == "0"
    assert "USE_LIBUV" not in ranks_env(monkeypatch, "darwin")


@pytest.mark.parametrize(
    ("platform", "name"), [("darwin", "lo0"), ("win32", "Loopback Pseudo-Interface 1"), ("linux", "lo")]
)
def test_loopback_by_its_own_name(monkeypatch, platform, name):
    address = psutil._ntuples.snicaddr(2, "127.0.0.1", None, None, None)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"other": [], name: [address]})
    assert ranks_env(monkeypatch, platform)["GLOO_SOCKET_IFNAME"] == name


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
def test_L33_output_does_not_rely_on_torchruns_own_redirects(monkeypatch, platform):
    monkeypatch.setattr(sys, "platform", platform)
    for warm in (False, True):
        (line,) = commands.agent_arguments(["script.py"], "FOLDER", 2, 1, warm)
        assert not [part for part in line if part.startswith(("--redirects", "--tee", "--log-dir"))]
    (cold,) = commands.agent_arguments(["script.py"], "FOLDER", 2, 1, warm=False)
    assert cold[-3:] == ["--module", "d2l_utils.launching.worker", "script.py"] and "--start-method=fork" not in cold


def test_cold_supervisor_is_this_python(monkeypatch, tmp_path):
    seen = {}

    class Process:
        def __init__(self, command, **options):
            seen.update(command=command, options=options)
            self.stdin, self.stdout = open(tmp_path / "in", "wb"), open(tmp_path / "out", "wb+")

        def wait(self):
            return 0

    monkeypatch.setattr(helper.subprocess, "Popen", Process)
    monkeypatch.setattr(sys, "platform", "win32")
    line = helper.start_cold(tmp_path / "request.json", {"A": "1"})
    line.ended.wait(5)
    line.close()
    assert seen["command"][0] == sys.executable and seen["command"][2].endswith("supervisor.py")
    assert "start_new_session" not in seen["options"] and seen["options"]["env"] == {"A": "1"}


def test_inherited_torchrun_settings_are_not_passed_on(monkeypatch):
    inherited = {
        "RANK": "3", "MASTER_PORT": "29500", "MASTER_ADDR": "x", "TORCHELASTIC_RUN_ID": "x", "PET_NPROC_PER_NODE": "9",
        "D2L_RUN_FOLDER": "old", "KEPT": "yes", "RANKING": "kept too",
    }  # fmt: skip
    env = ranks_env(monkeypatch, "linux", **inherited)
    assert env["PET_LOG_DIR"] == "FOLDER"  # our own
    assert not {"RANK", "MASTER_PORT", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PET_NPROC_PER_NODE"} & env.keys()
    assert env["KEPT"] == "yes" and env["RANKING"] == "kept too" and env["D2L_RUN_FOLDER"] == "FOLDER"


@pytest.mark.parametrize(("wish", "threads"), [("", None), ("3", 3), ("4,2", 4), ("0", None), ("many", None)])
def test_threads_per_rank(wish, threads):
    expected = threads or max(1, environment.cores() // 2)
    assert environment.threads_per_rank(2, {"OMP_NUM_THREADS": wish}) == expected


def test_L36_no_port_is_probed_by_connecting():
    """Under WSL2's mirrored network a connect() to an unused port hangs: our code binds, and lets the system choose."""
    from pathlib import Path

    for file in Path(helper.__file__).parent.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        if file.name == "machines.py":  # a UDP socket's connect() sends nothing and waits for nobody
            assert text.count(".connect(") == 1 and "type=socket.SOCK_DGRAM" in text
            text = text.replace(".connect(", "")
        if file.name == "host_limits.py":  # it connects to the port on which it listens
            assert text.count("create_connection(server.getsockname(), timeout=") == 1
            text = text.replace("create_connection(server", "")
        assert ".connect(" not in text and "create_connection" not in text, file


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_bad_number_of_idle_seconds_is_named_before_a_helper_starts(monkeypatch, text):
    monkeypatch.setenv("D2L_HELPER_IDLE", text)
    monkeypatch.setattr(helper.subprocess, "Popen", lambda *a, **k: pytest.fail("a helper was started"))
    with pytest.raises(ValueError, match=f"D2L_HELPER_IDLE is '{text}': allowed is a number of seconds above 0"):
        helper.Helper()


def test_a_clock_that_was_set_makes_no_process_another_elsewhere_than_on_linux(monkeypatch):
    """psutil's time of a start moves with the clock there, and the folder of a process that runs was taken for an orphan."""
    monkeypatch.setattr(sys, "platform", "darwin")
    before = folders.identity(os.getpid())
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: 1.0)
    assert before is not None and folders.identity(os.getpid()) == before


def test_a_helper_that_replaces_a_sleeping_one_is_awake(monkeypatch, tmp_path):
    monkeypatch.setattr(folders, "base", lambda: tmp_path)
    monkeypatch.setattr(helper.subprocess, "Popen", lambda *a, **k: SimpleNamespace(pid=0))
    (tmp_path / IDLE_MARK).touch()
    made = helper.Helper()
    made.control.close()
    monkeypatch.setattr(helper, "_helper", made)
    assert not helper.asleep()
