"""Bytes that this process's TCP connections have sent, as the kernel counts them (Linux)."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable
from typing import Any

# struct tcp_info of linux/tcp.h: tcpi_notsent_bytes, tcpi_bytes_sent and tcpi_bytes_retrans, since Linux
# 4.19.
_QUEUED, _BYTES_SENT, _BYTES_AGAIN, _SIZE = 144, 200, 208, 232
_TCP, _TCP_INFO = 6, 11


def bytes_sent() -> dict[str, int] | None:
    """Bytes given so far to each open TCP connection to send, repeats not counted; None where unreadable.

    Keys are the kernel's names of the sockets. Subtract two readings with ``since``.
    """
    if sys.platform != "linux":
        return None
    # Straight to the C library: a Python socket made of a borrowed descriptor could change its blocking mode.
    getsockopt = ctypes.CDLL(None, use_errno=True).getsockopt
    info, sent = ctypes.create_string_buffer(_SIZE), {}
    for number in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # closed meanwhile
            continue
        if not name.startswith("socket:"):
            continue
        size = ctypes.c_uint(_SIZE)
        if getsockopt(int(number), _TCP, _TCP_INFO, info, ctypes.byref(size)) != 0:
            continue  # not a TCP socket
        if size.value < _BYTES_AGAIN + 8:
            return None
        total, again = struct.unpack_from("=QQ", info, _BYTES_SENT)
        (queued,) = struct.unpack_from("=I", info, _QUEUED)  # the last bytes may wait for a peer to read
        sent[name] = total - again + queued
    return sent


def since(before: dict[str, int] | None) -> int | None:
    """Bytes sent since a reading of ``bytes_sent``; connections closed meanwhile are not seen."""
    now = bytes_sent()
    if before is None or now is None:
        return None
    return sum(count - before.get(name, 0) for name, count in now.items())


def carried(events: Iterable[Any], device: Any) -> bool:
    """Whether all collectives of a step went over sockets: gloo's do, NCCL's pass NVLink or shared memory.

    device: of the rank. A collective whose backend was not seen counts as gloo's on the CPU alone.
    """
    backends = [event.backend for event in events if event.kind == "collective"]
    return all(device.type == "cpu" if backend is None else backend.startswith("gloo:") for backend in backends)
