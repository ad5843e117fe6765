"""The ranks' output as it comes: whole lines, labelled by rank, reprinted through the caller's own standard output."""

import codecs
import sys
import time
from collections import deque
from pathlib import Path
from typing import BinaryIO

from d2l_utils.launching import ranks

HEAD = TAIL = (
    1000  # lines shown of a launch that prints more than both together; JupyterLab drops what comes much faster
)


class _Lines:
    """Cuts one rank's growing log into whole lines. A line that a progress bar rewrote with \\r is its last state."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.file: BinaryIO | None = None
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.rest = ""

    def new(self, final: bool) -> list[str]:
        if self.file is None:
            try:
                self.file = self.log.open("rb")
            except FileNotFoundError:
                return []
        # Read in pieces: one rank that prints without end must not keep the others, or the deadline, waiting.
        text = self.rest + self.decoder.decode(self.file.read(-1 if final else 1 << 20), final)
        *lines, self.rest = text.split("\n")
        if final and self.rest:
            lines, self.rest = [*lines, self.rest], ""
        return [_last_state(line) for line in lines]

    @property
    def bar(self) -> str:
        """The state of a progress bar that is being drawn now, or nothing."""
        return _last_state(self.rest) if "\r" in self.rest else ""

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def _last_state(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


class Reprinter:
    """Follows the logs of all ranks of a launch.

    mode: "live" prints lines as they come; "ordered" prints at the end, rank by rank, so that two runs print the same; "quiet"
    prints nothing. `pump` is called often while the ranks run, `finish` once.
    """

    def __init__(self, folder: Path, world_size: int, mode: str) -> None:
        self.logs = [ranks.path(folder, rank, "log") for rank in range(world_size)]
        self.sources = [_Lines(log) for log in self.logs]
        self.mode, self.shown = mode, 0
        self.tail: deque[str] = deque(maxlen=TAIL)
        self.left_out = 0
        self.bar, self.bar_time = "", 0.0

    def pump(self, final: bool = False) -> None:
        if self.mode == "quiet" or (self.mode == "ordered" and not final):
            return
        fresh = [f"[rank {rank}] {line}" for rank, source in enumerate(self.sources) for line in source.new(final)]
        self._clear_bar(bool(fresh) or final)
        head = fresh[: max(0, HEAD - self.shown)]
        self.shown += len(head)
        if head:
            _say("\n".join(head))
        for line in fresh[len(head) :]:
            self.left_out += len(self.tail) == TAIL
            self.tail.append(line)
        self._draw_bar(final)

    def finish(self) -> None:
        """Print what is still to be printed."""
        self.pump(final=True)
        if self.left_out:
            print(f"... {self.left_out} lines left out; every line is in {self.logs[0].with_name('rank*.log')} ...")
        if self.tail:
            _say("\n".join(self.tail))
        for source in self.sources:
            source.close()

    def _draw_bar(self, final: bool) -> None:
        states = [f"[rank {rank}] {source.bar}" for rank, source in enumerate(self.sources) if source.bar]
        if states and not final and states[0] != self.bar and time.monotonic() - self.bar_time > 0.2:
            self._clear_bar(True)
            self.bar, self.bar_time = states[0], time.monotonic()
            sys.stdout.write(self.bar)
            sys.stdout.flush()

    def _clear_bar(self, now: bool) -> None:
        if now and self.bar:
            sys.stdout.write("\r" + " " * len(self.bar) + "\r")
            self.bar = ""


def _say(text: str) -> None:
    """Print; what the stream's encoding lacks becomes a question mark, and does not cost a good launch its results."""
    try:
        print(text, flush=True)
    except UnicodeEncodeError:
        encoding = getattr(sys.stdout, "encoding", None) or "ascii"
        print(text.encode(encoding, "replace").decode(encoding), flush=True)


def texts(folder: Path, world_size: int) -> list[str]:
    """What each rank printed, whole, in rank order."""
    found = []
    for rank in range(world_size):
        log = ranks.path(folder, rank, "log")
        found.append(log.read_text(encoding="utf-8", errors="replace") if log.exists() else "")
    return found
