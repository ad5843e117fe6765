"""What a launch takes from the machine and what it leaves on it: environment, sockets, threads, folders, commands."""

import os
import shlex
import socket
import subprocess
import sys
import threading

import psutil
import pytest

from d2l_utils import launch
from d2l_utils.launching.environment import cores
from tests.ranks import hosts

CORES = cores()


def identity(seconds=0.0):
    import os
    import time

    import torch
    import torch.distributed as dist

    time.sleep(seconds)
    keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    found = {key: int(os.environ[key]) for key in keys}
    total = torch.ones(1)
    dist.all_reduce(total)
    return found | {"threads": torch.get_num_threads(), "cwd": os.getcwd(), "sum": total.item()}


def test_two_nodes_on_this_host(way):
    results = launch(identity, world_size=4, nodes=2).results
    assert [r["RANK"] for r in results] == [0, 1, 2, 3]
    assert [r["LOCAL_RANK"] for r in results] == [0, 1, 0, 1]
    assert [r["GROUP_RANK"] for r in results] == [0, 0, 1, 1]
    assert all(r["LOCAL_WORLD_SIZE"] == 2 and r["WORLD_SIZE"] == 4 and r["sum"] == 4 for r in results)


@pytest.mark.parametrize("ranks", [1, 2, CORES + 1])
def test_L17_threads_per_rank(ranks):
    assert {r["threads"] for r in launch(identity, world_size=ranks).results} == {max(1, CORES // ranks)}


def test_L17_a_users_own_number_is_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert {r["threads"] for r in launch(identity, world_size=2).results} == {3}


def test_L13_a_wrong_interface_name_does_no_harm(monkeypatch, capfd):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "^lo")
    assert launch(identity, world_size=2).results[0]["sum"] == 2
    assert capfd.readouterr().err == ""


def listening_beyond_loopback(pids):
    found = set()
    for connection in psutil.net_connections(kind="inet"):
        if (
            connection.status == psutil.CONN_LISTEN
            and connection.pid in pids
            and connection.laddr.ip not in ("127.0.0.1", "::1")
        ):
            found.add(connection.laddr)
    return found


def test_single_host_launch_listens_on_loopback_only(way):
    seen, own, done = set(), 0, threading.Event()
    earlier = {
        p.pid for p in psutil.Process().children(recursive=True)
    }  # a browser test's JupyterLab may be among them

    def watch():
        nonlocal own
        while not done.is_set():
            pids = {p.pid for p in psutil.Process().children(recursive=True)} - earlier
            seen.update(listening_beyond_loopback(pids))
            own = max(
                own,
                sum(c.pid in pids and c.status == psutil.CONN_LISTEN for c in psutil.net_connections(kind="inet")),
            )

    watcher = threading.Thread(target=watch)
    watcher.start()
    launch(identity, world_size=2, seconds=1.0)
    done.set()
    watcher.join()
    assert own >= 3, "the watcher saw no socket of the launch: it looked in the wrong place"
    assert not seen


def test_no_working_host_name_is_needed(monkeypatch):
    """In a network namespace of its own there is no network at all; the host name there resolves to nothing."""
    hosts.needed()
    code = "from d2l_utils import launch; from tests.ranks.test_machine import identity; "
    code += "print(launch(identity, world_size=2).results[1]['sum'])"
    python = shlex.join([sys.executable, "-c", code])
    shell = f"ip link set lo up; hostname nowhere-at-all; {python}"
    done = subprocess.run(["unshare", "-n", "-u", "sh", "-c", shell], capture_output=True, text=True, check=False)
    assert done.stdout.strip().endswith("2.0"), done.stdout + done.stderr


def test_L01_two_threads_at_once(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        results = {}

        def one(number):
            results[number] = launch(add, world_size=2, number=number).results

        threads = [threading.Thread(target=one, args=(n,)) for n in (1, 100)]
        [t.start() for t in threads]
        [t.join() for t in threads]
    assert results == {1: [2.0, 2.0], 100: [200.0, 200.0]}


def add(number):
    import time

    import torch
    import torch.distributed as dist

    time.sleep(0.5)
    x = torch.tensor([float(number)])
    dist.all_reduce(x)
    return x.item()


def test_L28_twenty_launches_leave_no_litter(tmp_path):
    """In a temporary folder of its own: a launch's files go with its run, the rest with the process."""
    code = """
import os
from d2l_utils import launch
from d2l_utils.launching import folders
from tests.ranks.test_machine import add
for n in range(20):
    run = launch(add, world_size=1, number=1, output="quiet")
print(len(os.listdir(os.environ["TMPDIR"])), len(list(folders.base().glob("run-*"))))
"""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "1"] and done.stderr == ""
    assert os.listdir(tmp_path) == []


def test_L28_tmpdir_that_cannot_be_written(tmp_path):
    code = (
        "import tempfile, os; tempfile._candidate_tempdir_list = lambda: [os.environ['TMPDIR']]\n"
        "from d2l_utils.launching import folders\ntry:\n    folders.base()\nexcept OSError as e:\n    print(e)"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path / "missing")}
    text = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert "TMPDIR" in text and "missing" in text


def test_L28_a_killed_process_is_tidied_up_by_the_next(tmp_path):
    code = (
        "from d2l_utils.launching import folders; import os; print(folders.base(), flush=True); os.kill(os.getpid(), 9)"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    dead = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    ).stdout.strip()
    assert os.path.isdir(dead)
    subprocess.run(
        [sys.executable, "-c", "from d2l_utils.launching import folders; folders.base()"], env=env, check=True
    )
    assert not os.path.isdir(dead)


@pytest.mark.parametrize("nodes", [1, 2])
def test_command_works_when_pasted_elsewhere(tmp_path, nodes):
    run = launch(identity, world_size=2, nodes=nodes)
    env = {k: v for k, v in os.environ.items() if not k.startswith("D2L")}
    done = subprocess.run(
        ["sh", "-c", run.command],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "[rank 0] {'RANK': 0" in done.stdout and "[rank 1] {'RANK': 1" in done.stdout, done.stdout + done.stderr
    assert "d2l_loopback" not in run.command and sys.executable in run.command


def test_save_keeps_the_script(tmp_path):
    kept = launch(identity, world_size=1).save(tmp_path)
    assert kept == tmp_path / "identity.py" and "torch.distributed.run" in kept.read_text(encoding="utf-8")


def test_L30_cwd_is_the_kernels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch(identity, world_size=2).results[1]["cwd"] == str(tmp_path)
