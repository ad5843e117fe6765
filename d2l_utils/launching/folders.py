"""Temporary folders: one a process that launches, one a launch in it; nothing is left when they end, however they end."""

import atexit
import contextlib
import itertools
import os
import shutil
import tempfile
import threading
from pathlib import Path

_PREFIX = "d2l-"
_OWNER = "owner.pid"
_lock = threading.Lock()
_numbers = itertools.count(1)
_base: tuple[int, Path] | None = (
    None  # with the pid: a fork of this process must not use, or remove, its parent's folder
)


def base() -> Path:
    """This process's own folder, made on first use under a name of its own, so that no other user's can be in the way."""
    global _base
    with _lock:
        if _base is None or _base[0] != os.getpid() or not _base[1].exists():
            try:
                folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
            except OSError as error:
                raise OSError(
                    f"no folder for temporary files can be written (TMPDIR is {os.environ.get('TMPDIR', 'not set')!r}; "
                    f"{error.strerror or error}): set TMPDIR to a folder that can"
                ) from error
            (folder / _OWNER).write_text(str(os.getpid()))
            _sweep(folder)
            _base = (os.getpid(), folder)
            atexit.register(_remove, *_base)
        return _base[1]


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
    import psutil

    for folder in mine.parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            owner = int((folder / _OWNER).read_text())
            if (
                folder != mine
                and (not hasattr(os, "getuid") or folder.stat().st_uid == os.getuid())
                and not psutil.pid_exists(owner)
            ):
                remove(folder)
