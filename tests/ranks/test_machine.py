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
    if (
        sys.platform != "linux"
        or os.geteuid() != 0
        or subprocess.run(["unshare", "-n", "true"], check=False).returncode
    ):
        pytest.skip("needs the right to make a network namespace")
    code = "from d2l_utils import launch; from tests.ranks.test_machine import identity; "
    code += "print(launch(identity, world_size=2).results[1]['sum'])"
    python = shlex.join([sys.executable, "-c", code])
    shell = f"ip link set lo up 2>/dev/null || ifconfig lo up; hostname nowhere-at-all; {python}"
    done = subprocess.run(["unshare", "-n", "-u", "sh", "-c", shell], capture_output=True, text=True, check=False)
    if "does not exist" in done.stderr or "not found" in done.stderr:
        pytest.skip("needs ip or ifconfig to switch the loopback interface on")
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


def test_a_script_of_the_readers_own(tmp_path, capsys):
    script = tmp_path / "mine.py"
    script.write_text(
        "import argparse, torch, torch.distributed as dist\np = argparse.ArgumentParser()\np.add_argument('--learning-rate', type=float)\n"
        "a = p.parse_args()\ndist.init_process_group('gloo')\nprint(dist.get_rank(), a.learning_rate)\ndist.barrier()\ndist.destroy_process_group()\n"
    )
    run = launch(script, world_size=2, learning_rate=0.5, output="ordered")
    assert run.output == ["0 0.5\n", "1 0.5\n"] and run.results == [None, None] and run.script == script


def test_L30_cwd_is_the_kernels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch(identity, world_size=2).results[1]["cwd"] == str(tmp_path)


def own_group():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # gloo: who leaves at once disturbs those that still connect
    dist.destroy_process_group()
    return rank


def test_a_function_that_makes_its_own_group_is_left_alone(way):
    assert launch(own_group, world_size=2).results == [0, 1]


def values():
    import numpy
    import torch

    return {
        "t": torch.arange(6).reshape(2, 3)[:, 1],
        "n": numpy.ones(2),
        "l": [1, 2.5, None, "x", (True,)],
        3: b"b",
    }


def test_results_travel():
    import torch

    (value,) = launch(values, world_size=1).results
    assert torch.equal(value["t"], torch.tensor([1, 4])) and value["t"].untyped_storage().nbytes() == 16
    assert value["n"].tolist() == [1.0, 1.0] and value["l"] == [1, 2.5, None, "x", (True,)] and value[3] == b"b"


def test_a_script_that_ends_in_sys_exit_0_is_done_and_finds_what_lies_beside_it(tmp_path, way):
    (tmp_path / "beside.py").write_text("answer = 42\n")
    script = tmp_path / "main.py"
    script.write_text("import sys\nfrom beside import answer\nprint(answer)\nsys.exit()\n")
    run = launch(script, world_size=2, output="quiet")
    assert run.results == [None, None] and run.output == ["42\n"] * 2


def random():
    """Named like a module of Python's own."""
    import random

    import torch.distributed as dist

    return dist.get_rank() + random.choice([0])


def test_a_function_named_like_a_module(tmp_path):
    run = launch(random, world_size=2)
    assert run.results == [0, 1] and run.script.name == "run_random.py"


def run(value):
    """Named like the launcher's own."""
    return value


def test_a_function_named_run():
    assert launch(run, world_size=1, value=7).results == [7]


def own_environment():
    import os

    rank = os.environ["RANK"]
    for name in ("RANK", "WORLD_SIZE", "D2L_RUN_FOLDER"):
        os.environ.pop(name)
    return rank


def test_a_function_may_change_the_environment():
    assert launch(own_environment, world_size=2).results == ["0", "1"]


def odd_tensors():
    import torch

    return [
        torch.zeros(2, dtype=torch.uint16),
        torch.ones(1, dtype=torch.bfloat16),
        torch.zeros(1, dtype=torch.float8_e4m3fn),
    ]


def test_tensors_of_any_type_travel():
    import torch

    (found,) = launch(odd_tensors, world_size=1).results
    assert [t.dtype for t in found] == [torch.uint16, torch.bfloat16, torch.float8_e4m3fn]


def leaves_a_daemon():
    import os
    import time

    if os.fork() == 0:
        os.setsid()
        time.sleep(300)
        os._exit(0)
    return 1


def test_a_forked_child_that_stays_does_not_hold_the_launch():
    assert launch(leaves_a_daemon, world_size=2, timeout=100).seconds < 60
