"""X10: hosts, containers and processes that share the place of temporary files never remove each other's, and clear what is their own."""

import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest

from d2l_utils.launching import folders
from tests.ranks import hosts

KERNEL = """
import os, sys
from d2l_utils import launch
from d2l_utils.launching import folders
from tests.ranks.test_shared_scratch import both_wait
print(folders.base(), flush=True)
for line in sys.stdin:
    print(launch(both_wait, world_size=2, name=line.strip(), place=os.environ["TMPDIR"], output="quiet").results, flush=True)
"""


def both_wait(name, place):
    """Leave word that this launch runs, and wait for the other one's."""
    import os
    import time

    import torch
    import torch.distributed as dist

    open(os.path.join(place, f"{name}-runs"), "w").close()
    deadline = time.monotonic() + 60
    while not os.path.exists(os.path.join(place, "go on")) and time.monotonic() < deadline:
        time.sleep(0.05)
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


def kernel(tmp_path, *namespace):
    path = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [*namespace, sys.executable, "-c", KERNEL], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": path},
    )  # fmt: skip


def runs(tmp_path, name):
    deadline = time.monotonic() + 90
    while not (tmp_path / f"{name}-runs").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_kernels_of_two_containers_keep_their_launches(tmp_path):
    hosts.needed()
    container = ("unshare", "--pid", "--mount-proc", "--fork", "--kill-child")
    later = ("sh", "-c", 'for i in $(seq 60); do /bin/true; done; "$@"; true', "sh")  # numbers that others do not have
    started, mine, third = [], [], None
    try:
        for name, more in (("first", later), ("second", ())):
            process = kernel(tmp_path, *container, *more)
            started.append(process)
            mine.append(process.stdout.readline().strip())
            process.stdin.write(name + "\n")
            process.stdin.flush()
            runs(tmp_path, name)
        third = kernel(tmp_path)  # beside both containers, on the host
        third.stdout.readline()
        assert all(os.path.isdir(folder) for folder in mine)
        (tmp_path / "go on").touch()
        assert [process.stdout.readline().strip() for process in started] == ["[2.0, 2.0]"] * 2
    finally:
        for process in filter(None, (*started, third)):
            process.communicate(timeout=60)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first-runs", "go on", "second-runs"]


def gone_process():
    """The identity of a process of this host that has ended."""
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    found = folders.identity(child.pid)
    child.communicate()
    return found


@pytest.fixture
def swept(tmp_path):
    """swept(mark) tells whether a folder with this mark is removed."""

    def sweep(mark):
        other, mine = tmp_path / "d2l-other", tmp_path / "d2l-mine"
        other.mkdir(exist_ok=True)
        (other / "owner.json").write_text(mark if isinstance(mark, str) else json.dumps(dataclasses.asdict(mark)))
        folders._sweep(mine)
        return not other.exists()

    return sweep


def test_only_a_process_of_this_very_host_boot_and_namespace_is_known_to_be_gone(swept):
    dead = gone_process()
    assert swept(dead)
    for change in ({"host": "node-b"}, {"boot": "another"}, {"namespace": "pid:[1]"}):
        assert not swept(dataclasses.replace(dead, **change)), change


def test_the_folder_of_a_process_that_runs_stays(swept):
    assert not swept(folders.identity(os.getppid()))


def test_a_process_number_that_was_given_again_is_another_process(swept):
    me = folders.identity(os.getpid())
    assert swept(dataclasses.replace(me, start="1"))


@pytest.mark.parametrize("mark", ["", "1", "99999999", "{", '{"pid": 99999999}', "[]"])
def test_a_mark_that_cannot_be_read_is_left_alone(swept, mark):
    assert not swept(mark)


def test_processes_that_proc_does_not_show_are_not_taken_for_gone():
    hosts.needed()
    code = "from d2l_utils.launching import folders; import os\ntry: folders.identity(os.getpid())\nexcept OSError as e: print(e)"
    command = ["unshare", "--pid", "--fork", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "/proc shows the processes of another namespace\n"


def test_the_mark_of_an_older_release_is_left_alone(tmp_path):
    old = tmp_path / "d2l-old"
    old.mkdir()
    (old / "owner.pid").write_text("99999999")
    folders._sweep(tmp_path / "d2l-mine")
    assert old.exists()


def test_a_zombie_is_gone():
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert folders.identity(child.pid) is None
    child.wait()
