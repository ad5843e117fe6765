"""The kernel's side of starting a launch: over the warm helper, or cold. Both give the same `Line` to the launch's supervisor."""

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

from d2l_utils.launching import environment, folders, warm

_HERE = Path(__file__).resolve().parent
_READY_SECONDS = 90.0  # importing torch from a cold disk on a busy laptop


class Unavailable(RuntimeError):
    """The warm helper cannot serve; the text says why."""


class Line:
    """The kernel's end of its line to one launch's supervisor. Closing it, even by dying, ends the launch."""

    def __init__(self, reader: IO[bytes], writer: IO[bytes]) -> None:
        self._writer, self._lock = writer, threading.Lock()
        self.ended = threading.Event()
        self.record: dict[str, Any] | None = None
        threading.Thread(target=self._listen, args=(reader,), daemon=True, name="d2l-launch").start()

    def _listen(self, reader: IO[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError):
            text = reader.readline()
            self.record = json.loads(text) if text else None
        self.ended.set()
        with contextlib.suppress(OSError):
            reader.close()

    def send(self, word: str) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._writer.write(word.encode() + b"\n")
            self._writer.flush()

    def close(self) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._writer.close()


class Helper:
    """One warm helper process (warm.py), started without waiting."""

    def __init__(self) -> None:
        environment.check_idle_seconds(os.environ)
        self.owner = os.getpid()
        self.born_with = environment.read_at_start(os.environ)
        self.folder = folder = folders.base()
        (folder / warm.IDLE_MARK).unlink(missing_ok=True)  # of one that was ended in its sleep
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, (folder / "helper.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(_HERE / "warm.py"), str(theirs.fileno()), str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # the stop button signals the kernel's group: the helper must not die of it
                cwd=folder,
                env=self._env(folder),
            )
        (folder / "helper.pid").write_text(str(self.process.pid))
        self.lock, self.ready = threading.Lock(), False

    @staticmethod
    def _env(folder: Path) -> dict[str, str]:
        env = environment.for_ranks(os.environ, 1, "", "cpu", [])
        if "PYTHONPATH" in os.environ:
            env["PYTHONPATH"] = os.environ["PYTHONPATH"]
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "torchinductor"))  # importing torch._dynamo makes it
        # Thread pools that libraries start on import would make forking unsafe.
        return env | {
            "D2L_KERNEL_FOLDER": str(
                folder
            ),  # whose forks these are: /proc shows a fork the environment of the helper's start
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "NUMEXPR_NUM_THREADS": "1",
        }

    def alive(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def serves(self) -> bool:
        """Whether its forks are like a process that starts now: it lives, and what is read at a start has not changed."""
        return self.alive() and self.born_with == environment.read_at_start(os.environ)

    def wait_until_ready(self) -> None:
        """Wait for the imports. Unavailable when the helper died, took too long, or holds what makes a fork unsafe."""
        with self.lock:
            if self.ready:
                return
            try:  # not with select, which takes no descriptor above 1023
                self.control.settimeout(_READY_SECONDS)
                message = self.control.recv(1 << 16)
                self.control.settimeout(None)
            except TimeoutError as error:
                raise Unavailable(f"the warm helper was not ready within {_READY_SECONDS:.0f} s") from error
            except OSError as error:  # another thread has ended it, for one with other settings
                raise Unavailable(f"the warm helper ended ({error})") from error
            if not message:
                raise Unavailable("the warm helper ended while it imported torch")
            state = json.loads(message)
            if state["threads"] != 1 or state["accelerator"]:
                raise Unavailable(
                    f"the warm helper holds {state['threads']} threads or an accelerator: forking it is not safe"
                )
            self.ready = True

    def start(self, request: Path) -> Line:
        """Have the helper fork a supervisor for this request."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with mine, theirs:
            try:
                with self.lock:
                    socket.send_fds(self.control, [os.fsencode(request)], [theirs.fileno()])
            except OSError as error:
                raise Unavailable(f"the warm helper ended ({error})") from error
            return Line(mine.makefile("rb"), mine.makefile("wb"))

    def close(self) -> None:
        """End the helper. Launches under way are not touched: each has its own line."""
        self.control.close()
        if self.owner == os.getpid():
            self.process.kill()
            self.process.wait()


_helper: Helper | None = None
_lock = threading.Lock()


def warm_helper() -> Helper:
    """This process's helper, started when there is none that serves."""
    global _helper
    with _lock:
        if _helper is None or not _helper.serves():
            if _helper is None:
                atexit.register(_at_exit)
            else:
                _helper.close()
            _helper = Helper()
        return _helper


def asleep() -> bool:
    """Whether this process has a helper that has given back its memory, and needs seconds for the next launch."""
    return _helper is not None and (_helper.folder / warm.IDLE_MARK).exists()


def _at_exit() -> None:
    if _helper is not None and _helper.owner == os.getpid():
        discard(_helper)


def discard(helper: Helper) -> None:
    """Forget a helper that could not serve, so that the next launch starts another."""
    global _helper
    with _lock:
        if _helper is helper:
            _helper = None
    with contextlib.suppress(OSError):
        helper.close()


def start_warm(request: Path) -> Line:
    """Start the launch through the helper; a helper that died meanwhile is replaced once. Unavailable when that fails too."""
    for attempt in (1, 2):
        helper = warm_helper()
        try:
            helper.wait_until_ready()
            return helper.start(request)
        except Unavailable:
            discard(helper)
            if attempt == 2:
                raise
    raise AssertionError


def start_cold(request: Path, env: dict[str, str]) -> Line:
    """Start the launch with a fresh supervisor, whose agents are `python -m torch.distributed.run`."""
    options: dict[str, Any] = {"start_new_session": True} if sys.platform != "win32" else {"creationflags": 0x200}
    process = subprocess.Popen(
        [sys.executable, "-P", str(_HERE / "supervisor.py"), str(request)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=request.parent,
        env=env,
        **options,
    )
    assert process.stdin and process.stdout
    line = Line(process.stdout, process.stdin)
    threading.Thread(target=process.wait, daemon=True, name="d2l-reap").start()  # no zombie when it ends
    return line
