"""What a rank leaves in the folder of its launch, written by worker.py and read by the kernel: one small file a fact.

Files are renamed into place, so that a reader never sees half of one.
"""

import contextlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from d2l_utils.launching import results
from d2l_utils.launching.collective_state import CollectiveState

_FRAME = re.compile(r'File "(.*)", line (\d+),? in (\S+)')
# Where a rank stands that waits for others: in a collective, or for the device on which a collective runs.
_WAITING = re.compile(r"torch/distributed/.*:|torch/(cuda|accelerator|xpu)/.*:synchronize$")


@dataclass
class RankError:
    """What ended a rank. echo: it is only a consequence of another rank's end. gone: ranks that it saw end without a word.

    time: in seconds since 1970. advice: what to do, where the operating system refused something.
    """

    summary: str
    traceback: str
    echo: bool
    time: float
    advice: str = ""
    gone: list[int] = field(default_factory=list)


@dataclass
class RankState:
    """One rank as seen from outside."""

    rank: int
    pid: int | None = None
    delivered: bool = False
    exited: bool = False
    error: RankError | None = None
    stack: str = ""
    collectives: CollectiveState = field(default_factory=CollectiveState)

    @property
    def ended(self) -> bool:
        """Whether the rank has said its last word."""
        return self.delivered or self.exited or self.error is not None

    @property
    def frames(self) -> list[tuple[str, int, str]]:
        """(file, line, function), innermost first, of the rank's own thread when it was asked or crashed."""
        current = self.stack.partition("Current thread")[2] or self.stack
        thread = current.split("\n\n")[0]
        return [(file, int(line), name) for file, line, name in _FRAME.findall(thread)]

    @property
    def in_collective(self) -> bool:
        """Whether the rank sat inside torch.distributed, or waited for its device, when it was asked."""
        file, _, name = self.frames[0] if self.frames else ("", 0, "")
        return _WAITING.search(f"{file}:{name}".replace("\\", "/")) is not None

    @property
    def called(self) -> str:
        """The library function that the reader's innermost line called."""
        return self.where.rpartition(", inside ")[2] if ", inside " in self.where else ""

    @property
    def where(self) -> str:
        """The innermost line that is not a library's, and the library call in it: `train.py:7 in step, inside all_reduce`."""
        own = [index for index, frame in enumerate(self.frames) if not is_library(frame[0])]
        if not own:
            return ""
        file, line, function = self.frames[own[0]]
        called = [name for file_, _, name in self.frames[: own[0]] if name not in ("wrapper", "inner")]
        inside = f", inside {called[-1]}" if called else ""
        return f"{os.path.basename(file)}:{line} in {function}{inside}"


def is_library(file: str) -> bool:
    """Whether a frame of this file is torch's, Python's or the launcher's, not the reader's."""
    here = os.path.dirname(os.path.abspath(__file__))
    launcher = os.path.dirname(os.path.abspath(file)) == here
    return (
        launcher or "site-packages" in file or "dist-packages" in file or file.startswith("<frozen") or _in_stdlib(file)
    )


def _in_stdlib(file: str) -> bool:
    return os.path.abspath(file).startswith(os.path.dirname(os.path.abspath(os.__file__)) + os.sep)


def path(folder: Path, rank: int, what: str) -> Path:
    """`what`: pid, ready (torch is there, the script begins), log, result, error, exit, stack, ask or collectives."""
    return folder / f"rank{rank}.{what}"


def write(target: Path, data: bytes) -> None:
    draft = target.with_name(target.name + ".draft")
    try:
        draft.write_bytes(data)
    except OSError:  # a full disk: half a result must not take the room of the error's report
        draft.unlink(missing_ok=True)
        raise
    draft.replace(target)


def write_json(target: Path, value: Any) -> None:
    write(target, json.dumps(value).encode())


def read(folder: Path, rank: int) -> RankState:
    """The rank's state now; whatever it has not written yet stays at its default."""
    state = RankState(rank, delivered=path(folder, rank, "result").exists(), exited=path(folder, rank, "exit").exists())
    try:
        state.pid = int(path(folder, rank, "pid").read_text())
    except (FileNotFoundError, ValueError):
        return state
    with contextlib.suppress(FileNotFoundError):
        state.error = RankError(**json.loads(path(folder, rank, "error").read_bytes()))
    with contextlib.suppress(FileNotFoundError):
        state.stack = path(folder, rank, "stack").read_text(encoding="utf-8", errors="replace")
    with contextlib.suppress(FileNotFoundError):
        state.collectives = CollectiveState.from_json(path(folder, rank, "collectives").read_bytes())
    return state


def new_life(folder: Path, rank: int) -> bool:
    """Forget what this rank left before torchrun restarted all; False when all had delivered, and one failed after that."""
    if all(path(folder, other, "result").exists() for other in range(int(os.environ["WORLD_SIZE"]))):
        return False
    for what in ("result", "error", "exit"):
        path(folder, rank, what).unlink(missing_ok=True)
    return True


def gone(folder: Path, rank: int) -> bool:
    """Whether the rank's process has ended without a last word."""
    import psutil

    state = read(folder, rank)
    if state.pid is None or state.ended:
        return False
    try:
        alive = psutil.Process(state.pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        alive = False
    return not alive and not read(folder, rank).ended  # it may have said its last word in between


def result(folder: Path, rank: int) -> Any:
    """What the rank's function returned; None when it delivered nothing."""
    try:
        return results.unpacked(path(folder, rank, "result").read_bytes())
    except FileNotFoundError:
        return None
