"""One process above each launch: starts torchrun, ends everything that it started, and outlives a kernel that was killed.

Tree of a launch:  kernel -> (helper) -> supervisor -> one torchrun agent per node -> ranks -> whatever the ranks start.

The same code serves both ways of launching. Warm: forked from the helper, and each agent is a fork that calls torchrun's `main`.
Cold: `python -P supervisor.py REQUEST`, and each agent is `python -m torch.distributed.run`. The kernel holds the other end of the
channel: the word `stop` or its end (the kernel is gone) ends the launch.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def prctl(option: int, value: int) -> None:
    """Linux only; elsewhere the agents' process trees are walked instead."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, however that ends."""
    parent = os.getppid()
    prctl(_SET_PDEATHSIG, signal.SIGKILL if sys.platform != "win32" else 0)
    if sys.platform == "linux" and os.getppid() != parent:
        os._exit(1)  # the parent ended before the request took effect


class Channel:
    """The supervisor's end of its line to the kernel, over a socket or a pair of pipes."""

    def __init__(self, reader: BinaryIO, writer: BinaryIO) -> None:
        self.writer = writer
        self.stop, self.dump, self.kernel_gone = threading.Event(), threading.Event(), False
        threading.Thread(target=self._listen, args=(reader,), daemon=True).start()

    def _listen(self, reader: BinaryIO) -> None:
        try:
            for line in iter(reader.readline, b""):
                if line.strip() == b"dump":
                    self.dump.set()
                elif line.strip() == b"stop":
                    break
            else:
                self.kernel_gone = True
        except OSError:
            self.kernel_gone = True
        self.stop.set()

    def ended(self, record: dict[str, Any]) -> bool:
        """Tell the kernel. False when it is not there to hear."""
        try:
            self.writer.write(json.dumps(record).encode() + b"\n")
            self.writer.flush()
        except OSError:
            return False
        return True


def fork_agent(arguments: list[str], request: dict[str, Any], log: str) -> int:
    """Fork a child that is torchrun. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with_parent()
        quiet_streams(log)
        import tempfile

        tempfile.tempdir = request["folder"]  # torch leaves the error files of its processes behind
        import torch.distributed.run

        torch.distributed.run.main(arguments)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def quiet_streams(log: str) -> None:
    """Standard input from nowhere, output and errors to the log."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(target, 1)
    os.dup2(target, 2)
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", buffering=1, closefd=False)


def start_agent(arguments: list[str], request: dict[str, Any], log: str) -> int:
    """Start `python -m torch.distributed.run`. Returns its pid."""
    with open(log, "ab") as output:
        command = [sys.executable, "-m", "torch.distributed.run", *arguments]
        linux: dict[str, Any] = {"preexec_fn": die_with_parent} if sys.platform == "linux" else {}
        agent = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=request["env"], **linux
        )
    _started[agent.pid] = agent
    return agent.pid


_started: dict[int, subprocess.Popen[bytes]] = {}


def exit_status(pid: int) -> int | None:
    """The child's exit status (negative: the signal that killed it), None while it runs."""
    if pid in _started:
        return _started[pid].poll()
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def descendants() -> list[Any]:
    import psutil

    return psutil.Process().children(recursive=True)


def has_children() -> bool:
    """As a subreaper, this process inherits every orphan below it: no child means that nothing is left."""
    if sys.platform != "linux":
        return True
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
        return True
    except ChildProcessError:
        return False


def kill_all(seconds: float = 5.0) -> list[int]:
    """Kill every process below this one, again until none is left. Returns the pids that outlived `seconds`."""
    import psutil

    deadline, left = time.monotonic() + seconds, []
    while has_children() and time.monotonic() < deadline:
        left = [p for p in descendants() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        for process in left:
            try:
                process.kill()
            except psutil.Error:
                continue
        if not left and sys.platform != "linux":
            return []
        time.sleep(0.01)
    return [process.pid for process in left if process.is_running()] if has_children() else []


def host_stores(folder: str, lives: int) -> list[Any]:
    """The stores through which the agents and ranks of a warm launch meet; see rendezvous.py for why they live here."""
    from d2l_utils.launching.rendezvous import host

    return [host(Path(folder), life) for life in range(lives)]


def dump_stacks(folder: str) -> None:
    """Have each rank write where it stands and in which collectives (worker.py prepared both), to name those that never joined."""
    from d2l_utils.launching.collective_state import ask

    if not hasattr(signal, "SIGUSR1"):
        return
    mine = {process.pid for process in descendants()}
    for name in os.listdir(folder):
        if name.endswith(".pid"):
            with open(os.path.join(folder, name), encoding="ascii") as file:
                pid = int(file.read() or 0)
            if pid in mine:
                os.kill(pid, signal.SIGUSR1)
    begun = time.monotonic()
    ask(folder, seconds=2.0)
    time.sleep(max(0.0, 0.3 - (time.monotonic() - begun)))  # the stacks, of which nothing says that they are whole


def run(request: dict[str, Any], line: Any, warm: bool) -> int:
    """Run the launch that `request` describes to its end, report it on the channel, and leave nothing behind.

    request: folder, cwd, env, path (sys.path), agents (a list of torchrun argument lists, one a node), lives (of the ranks, at most).
    """
    folder = request["folder"]
    with open(os.path.join(folder, "supervisor.pid"), "w", encoding="ascii") as file:
        file.write(str(os.getpid()))
    prctl(_SET_CHILD_SUBREAPER, 1)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    start = fork_agent if warm else start_agent
    agents = [
        start(arguments, request, os.path.join(folder, f"agent{i}.log"))
        for i, arguments in enumerate(request["agents"])
    ]
    # Only after the forks: this process must have no thread when it forks.
    stores = host_stores(folder, request["lives"]) if warm else []
    channel = Channel(line.makefile("rb"), line.makefile("wb")) if warm else Channel(line[0], line[1])
    statuses: dict[int, int] = {}
    begun = time.monotonic()
    while len(statuses) < len(agents) and not channel.stop.is_set():
        for pid in agents:
            if pid not in statuses and (status := exit_status(pid)) is not None:
                statuses[pid] = status
        time.sleep(min(0.02, 0.002 + 0.01 * (time.monotonic() - begun)))  # a short run must not pay for a long look
    if channel.dump.is_set():
        dump_stacks(folder)
    left = kill_all()
    del stores
    gone = channel.kernel_gone  # asked before the last word: a kernel that has heard it hangs up too
    if gone or not channel.ended({"statuses": [statuses.get(pid) for pid in agents], "left": left}):
        from d2l_utils.launching import folders

        # A cold launch has no helper that removes the folder of a process that was killed.
        own = os.path.dirname(folder)
        shutil.rmtree(own if folders.owner_is_gone(Path(own)) else folder, ignore_errors=True)
    return 0


def main(request_path: str) -> None:
    """The cold way in: the channel is standard input and output."""
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    reader, writer = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    quiet_streams(os.path.join(request["folder"], "supervisor.log"))
    run(request, (reader, writer), warm=False)


if __name__ == "__main__":
    main(sys.argv[1])
