"""Bytes in words. Needs no torch."""

from __future__ import annotations


def format_bytes(count: int | None, binary: bool = False) -> str:
    """``count`` bytes for a reader, with the unit said: powers of 1000 (kB, MB, GB), or of 1024 (KiB, MiB,
    GiB) when ``binary``. None is "not yet allocated".
    """
    if count is None:
        return "not yet allocated"
    base, units = (1024, ("KiB", "MiB", "GiB", "TiB")) if binary else (1000, ("kB", "MB", "GB", "TB"))
    if abs(count) < base:
        return f"{count} B"
    size = float(count)
    for unit in units:
        size /= base
        if abs(size) < base or unit == units[-1]:
            break
    return f"{size:.2f} {unit}"
