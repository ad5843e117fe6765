"""The look for processes that a launch left finds them all: on orphans that are made on purpose."""

import contextlib
import os
import signal
import threading
import time

import psutil

from d2l_utils import LaunchError, launch
from d2l_utils.launching import folders, follow
from tests.ranks.leftovers import none_left, processes_of


def orphans(place):
    """Ranks that outlive their launch, a fork of each in a session of its own, and a program that the fork starts. Their numbers
    stand in `place`."""
    import ctypes
    import os
    import subprocess
    import time

    ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)  # no signal any more when the parent ends
    numbers = [os.getpid()]
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            program = subprocess.Popen(["sleep", "60"])
            os.write(writer, f"{os.getpid()} {program.pid}".encode())
            time.sleep(60)
        os._exit(0)
    numbers += os.read(reader, 100).decode().split()
    draft = os.path.join(place, f".{os.getpid()}")
    with open(draft, "w") as file:
        file.write(" ".join(map(str, numbers)))
    os.rename(draft, os.path.join(place, os.environ["RANK"]))
    time.sleep(60)


def test_orphans_are_found(way, tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "_ANSWER", 0.5)
    caught = []

    def target():
        try:
            launch(
                orphans, world_size=2, place=str(tmp_path), timeout=6
            )  # warm orphans keep the line to the kernel open
        except LaunchError as error:
            caught.append(error)

    before = set(folders.base().glob("run-*"))
    thread = threading.Thread(target=target)
    thread.start()
    deadline = time.monotonic() + 60
    while len(files := [f for f in tmp_path.iterdir() if f.name.isdigit()]) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    (folder,) = set(folders.base().glob("run-*")) - before
    os.kill(int((folder / "supervisor.pid").read_text()), signal.SIGKILL)
    thread.join(60)
    made = {int(number) for file in files for number in file.read_text().split()}
    try:
        assert caught and len(made) == 6
        assert made <= {process.pid for process in processes_of(folders.base())}
        assert made <= {process.pid for process in none_left(folders.base(), seconds=0.2)}
    finally:
        for pid in made:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(pid).kill()
    assert not none_left(folders.base())


def test_the_helper_itself_is_no_leftover(monkeypatch):
    monkeypatch.setenv("D2L_LAUNCH", "warm")
    launch(nothing, world_size=1)
    assert not none_left(folders.base())
    helper = psutil.Process(int((folders.base() / "helper.pid").read_text()))
    assert helper.is_running() and helper.environ()["D2L_KERNEL_FOLDER"] == str(folders.base())


def nothing():
    pass


def test_a_helper_that_outlived_its_folder_is_found(tmp_path):
    sleeper = psutil.Popen(["sleep", "60"], env={**os.environ, "D2L_KERNEL_FOLDER": str(tmp_path)})
    try:
        assert [process.pid for process in none_left(tmp_path, seconds=0.1)] == [sleeper.pid]
        (tmp_path / "helper.pid").write_text(str(sleeper.pid))
        assert none_left(tmp_path) == []
    finally:
        sleeper.kill()
        sleeper.wait()
