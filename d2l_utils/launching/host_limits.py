"""What a host can lack, found before a launch where that costs nothing, and told in plain words: what it is and what to do.

A full disk, loopback, /dev/shm, the limits on processes, open files and memory.
"""

import errno
import os
import socket
import sys
from pathlib import Path

FULL_DISK = "the disk is full: remove files, or set TMPDIR to a folder on another disk"
_WHAT_TO_DO = {
    errno.ENOSPC: FULL_DISK,
    errno.EDQUOT: "your quota on this disk is used up: remove files, or set TMPDIR to another disk",
    errno.EAGAIN: "the limit on processes and threads is reached: end other processes, use a smaller world_size, "
    "or raise the limit (`ulimit -u` shows it; a container may have its own)",
    errno.EMFILE: "the limit on open files is reached: close files, or raise the limit (`ulimit -n` shows it)",
    errno.ENFILE: "this machine's limit on open files is reached: end other processes",
    errno.ENOMEM: "there is not enough memory to start another process: end other notebooks, use a smaller world_size, "
    "or raise the limit (`ulimit -v` shows it)",
}
# `fork` and threads answer EAGAIN at a limit; elsewhere it means that a socket or pipe has no data yet.
_STARTS_PROCESSES = (
    "subprocess.py",
    "popen_fork.py",
    "popen_spawn_posix.py",
    "popen_forkserver.py",
    "forkserver.py",
    "threading.py",
)
_NO_THREAD = "can't start new thread"
_NO_LIBRARY = "failed to map segment"  # the C library, of a shared library for which there is no memory


def advice(error: BaseException) -> str:
    """What to do about an error by which the operating system refused something; empty for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    try:
        words = str(error)
    except Exception:  # an exception may break whoever looks at it
        return ""
    if isinstance(error, MemoryError) or (isinstance(error, ImportError) and _NO_LIBRARY in words):
        number = errno.ENOMEM
    elif isinstance(error, RuntimeError):
        number = _number_in(words)
    elif number == errno.EAGAIN and _raised_in(error) not in _STARTS_PROCESSES:
        number = None
    return _WHAT_TO_DO.get(number or 0, "")


def _number_in(words: str) -> int | None:
    """The errno of a RuntimeError of Python's threads, or of C++, which says the system's words alone."""
    if words.startswith(_NO_THREAD):
        return errno.EAGAIN
    return next((number for number in _WHAT_TO_DO if words == os.strerror(number)), None)


def _raised_in(error: BaseException) -> str:
    """The name of the file in which the error was raised."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    return os.path.basename(step.tb_frame.f_code.co_filename) if step else ""


def advice_for_log(log: str) -> str:
    """What to do about the first refusal of the operating system in the log of a process that starts others; empty if none."""
    found = {log.find(os.strerror(number)): text for number, text in _WHAT_TO_DO.items() if os.strerror(number) in log}
    for words, number in ((_NO_THREAD, errno.EAGAIN), (_NO_LIBRARY, errno.ENOMEM)):
        if words in log:
            found[log.find(words)] = _WHAT_TO_DO[number]
    return found[min(found)] if found else ""


def is_full(folder: Path) -> bool:
    """Whether nothing more can be written there. By writing: quotas and reserved blocks show in no count of free bytes."""
    trial = folder / "trial"
    try:
        trial.write_bytes(bytes(1 << 16))
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    finally:
        trial.unlink(missing_ok=True)
    return False


def require_loopback(seconds: float = 2.0) -> None:
    """OSError says what to do where this machine cannot reach itself at 127.0.0.1, where ranks meet."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=seconds).close()
    except OSError as error:
        if advice(error):
            raise  # a limit on open files, say
        up = ": `ip link set lo up` as root does that" if sys.platform == "linux" else ""
        raise OSError(
            f"this machine cannot reach itself over loopback (127.0.0.1: {error.strerror or error}), where the ranks meet: "
            f"bring the loopback interface up{up}"
        ) from error


def why_no_semaphores() -> str | None:
    """Why torchrun's agent could not fork ranks, which takes a semaphore (in /dev/shm on Linux); None where it can."""
    import multiprocessing

    try:
        multiprocessing.get_context("fork").Lock()
    except OSError as error:
        return f"no semaphore can be made in /dev/shm, which forking ranks needs ({error.strerror or error})"
    return None
