"""While ranks run: reprint what they print, see a rank that failed or is gone, and end the launch at its limit."""

import contextlib
import os
import threading
import time
from pathlib import Path

from d2l_utils.launching import diagnosis, helper, host_limits, output, ranks

_GRACE = 3.0  # seconds that the others have to end by themselves once a rank has failed
_NEW_LIFE = 15.0  # seconds that torchrun has, where it may, to end the others and start all ranks anew
_ANSWER = 10.0  # seconds that the supervisor has to end everything once it is told to


def follow(
    line: helper.Line,
    folder: Path,
    size: int,
    timeout: float,
    mode: str,
    stop: threading.Event | None,
    restarts: int = 0,
) -> diagnosis.Ending:
    """Reprint output until the launch ends; end it at the deadline, on `stop`, and some time after a rank failed."""
    ending = diagnosis.Ending(states=[], agent_logs=[])
    printer = output.Reprinter(folder, size, mode)
    started: float | None = None
    failed: float | None = None
    delivered: float | None = None
    told: float | None = None
    looked, patience = 0.0, _NEW_LIFE if restarts else _GRACE
    begun = time.monotonic()
    try:
        while not line.ended.wait(0.02):
            printer.pump()
            now = time.monotonic()
            if told is None:
                if stop is not None and stop.is_set():
                    ending.stopped, told = True, now
                elif now - (started or begun + 60) > timeout:  # a minute for starting Python, where that is slow
                    ending.timed_out, told = timeout, now
                    line.send("dump")
                elif any(
                    since is not None and now - since > grace
                    for since, grace in ((failed, patience), (delivered, _GRACE))
                ):
                    told = (
                        now  # a rank failed, or all have delivered and something that they left keeps torchrun waiting
                    )
                if told is not None:
                    line.send("stop")
            elif now - told > _ANSWER:
                kill_supervisor(folder)
                break
            if told is None and now - looked > 0.1:
                looked = now
                started = started or (now if any(folder.glob("rank*.ready")) else None)
                if failed is None or restarts:  # after a restart no rank has failed
                    failed = (failed or now) if any_failed(folder, size, ending) else None
                if delivered is None and all(ranks.path(folder, rank, "result").exists() for rank in range(size)):
                    delivered = now
    except BaseException:  # the stop button: the ranks end before the cell does
        line.send("stop")
        if not line.ended.wait(_ANSWER):
            kill_supervisor(folder)
        raise
    finally:
        line.close()
        printer.finish()
    ending.states = [ranks.read(folder, rank) for rank in range(size)]
    ending.agent_logs = [_end_of(log) for log in sorted(folder.glob("agent*.log"))]
    ending.supervisor_log = _end_of(folder / "supervisor.log")
    if not (folder / "supervisor.pid").exists():  # the helper, which was to fork it, may have written why not
        ending.supervisor_log += _end_of(folder.parent / "helper.log")
    ending.rank_logs = [_end_of(ranks.path(folder, rank, "log"), 2000) for rank in range(size)]
    ending.supervisor_died = line.record is None and ending.timed_out is None
    ending.statuses = [] if told is not None or line.record is None else line.record["statuses"]
    ending.folder_gone = not folder.exists()
    if not ending.folder_gone and not all(state.delivered for state in ending.states) and host_limits.is_full(folder):
        ending.full_disk = str(folder.parent)
    return ending


def _end_of(log: Path, most: int = 100_000) -> str:
    """The last bytes of a log as text, nothing where there is none. The rest is not read: a rank may print gigabytes."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - most))
            return file.read(most).decode("utf-8", errors="replace").strip()
    except FileNotFoundError:
        return ""


def kill_supervisor(folder: Path) -> None:
    """The last resort for one that does not answer, since somebody stopped it: on Linux the ranks are killed with it."""
    import psutil

    with contextlib.suppress(OSError, ValueError, psutil.Error):
        process = psutil.Process(int((folder / "supervisor.pid").read_text()))
        if any(str(folder.parent) in part for part in process.cmdline()):  # not another that has its number by now
            process.kill()


def any_failed(folder: Path, size: int, ending: diagnosis.Ending) -> bool:
    """Whether a rank has failed, exited, or is gone without a word (which torchrun itself would wait for without end)."""
    ending.early = {rank for rank in range(size) if ranks.gone(folder, rank)}
    states = [ranks.read(folder, rank) for rank in range(size)]
    return bool(ending.early) or any(state.error or state.exited for state in states)
