"""Temporary folders: one a process that launches, one a launch in it; nothing is left when they end, however they end.

A process that was killed cannot remove its folder; the next one that launches does. Several hosts and containers may share the place
of temporary files, and a process number says nothing about another of them. So each folder holds the identity of its process, and
is removed only by a process of the same host, boot and process namespace, once that very process is gone. All others are left alone:
of another host, of another container, of another boot (whose files the system itself clears), and those whose mark cannot be read.
"""

import atexit
import contextlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

_PREFIX = "d2l-"
_OWNER = "owner.json"
_lock = threading.Lock()
_numbers = itertools.count(1)
_base: tuple[int, Path] | None = (
    None  # with the pid: a fork of this process must not use, or remove, its parent's folder
)


@dataclass(frozen=True)
class ProcessIdentity:
    """One process among those of all hosts and containers. boot, namespace and start: empty where the system is not Linux.

    start: when it began, as Linux counts; a number that is given again has another.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    start: str


def identity(pid: int) -> ProcessIdentity | None:
    """The identity of a process of this host and namespace; None when it is gone. OSError where the system does not tell."""
    import platform

    if sys.platform == "linux" and os.readlink("/proc/self") != str(os.getpid()):
        raise OSError("/proc shows the processes of another namespace")
    start = _start(pid)
    if start is None:
        return None
    boot, namespace = "", ""
    if sys.platform == "linux":
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    return ProcessIdentity(platform.node(), boot, namespace, pid, start)


def _start(pid: int) -> str | None:
    """When the process began; None when it is gone or a zombie. Elsewhere than on Linux "" for one that runs: psutil's time of
    a start moves there when the clock is set, and would show a process that runs as another."""
    if sys.platform == "linux":
        try:
            # after the name, which may hold spaces and brackets: state is field 3, starttime field 22
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if fields[0] in "ZX" else fields[19]
    import psutil

    try:
        return None if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE else ""
    except psutil.NoSuchProcess:
        return None
    except psutil.Error as error:
        raise OSError(str(error)) from error


def owner_is_gone(folder: Path) -> bool:
    """Whether the process whose own folder this is has certainly ended. False for whatever cannot be known from here."""
    try:
        owner = ProcessIdentity(**json.loads((folder / _OWNER).read_text()))
        me, there = identity(os.getpid()), identity(owner.pid)
    except (OSError, ValueError, TypeError):
        return False
    if me is None or (owner.host, owner.boot, owner.namespace) != (me.host, me.boot, me.namespace):
        return False
    return there is None or there.start != owner.start


def base() -> Path:
    """This process's own folder, made on first use under a name of its own, so that no other user's can be in the way."""
    global _base
    with _lock:
        if _base is None or _base[0] != os.getpid() or not _base[1].exists():
            try:
                folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
                _mark(folder)
            except OSError as error:
                raise OSError(
                    f"no folder for temporary files can be written (TMPDIR is {os.environ.get('TMPDIR', 'not set')!r}; "
                    f"{error.strerror or error}): set TMPDIR to a folder that can, with room",
                ) from error
            _sweep(folder)
            _base = (os.getpid(), folder)
            atexit.register(_remove, *_base)
        return _base[1]


def _mark(folder: Path) -> None:
    """Leave in it whose it is. Where the system does not tell, nobody else will ever remove it."""
    try:
        me = identity(os.getpid())
    except OSError:
        return
    try:
        if me is not None:
            (folder / _OWNER).write_text(json.dumps(asdict(me)))
    except OSError:
        remove(folder)
        raise


def new() -> Path:
    """A fresh folder for one launch."""
    folder = base() / f"run-{next(_numbers)}"
    folder.mkdir(mode=0o700)
    return folder


def remove(folder: Path) -> None:
    """Remove it under another name first: what still runs would else put something into it meanwhile, and it would stay."""
    gone = folder.with_name(f"{folder.name}.gone")
    with contextlib.suppress(OSError):
        folder.rename(gone)
    for name in (gone, folder):
        shutil.rmtree(name, ignore_errors=True)


def _remove(pid: int, folder: Path) -> None:
    if os.getpid() == pid:
        remove(folder)


def _sweep(mine: Path) -> None:
    """Remove folders of ours whose process was killed before it could. Other users' folders cannot be read, and are left alone."""
    for folder in mine.parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            own = not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid()
            if folder != mine and own and owner_is_gone(folder):
                remove(folder)
