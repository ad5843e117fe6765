"""The environment of ranks: what they must not inherit, and what each platform's torch needs."""

import os
import re
import sys
from collections.abc import Mapping

from d2l_utils.launching.host_limits import why_no_semaphores

# torchrun's own variables, and PET_*, from which it reads defaults for its arguments: left over from another launch they would
# redirect this one (cases.md L01).
_TORCHRUN = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_RANK|ROLE_WORLD_SIZE|ROLE_NAME"
    r"|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|TORCH_ELASTIC_.*|TORCH_DISABLE_SHARE_RDZV_TCP_STORE|PET_.*"
    r"|D2L_RUN_FOLDER|D2L_DEVICE_TYPE|D2L_THREADS)"
)

_LOOPBACK = {"linux": "lo", "darwin": "lo0", "win32": "Loopback Pseudo-Interface 1"}


def loopback_interface() -> str:
    """The name of the interface that holds 127.0.0.1 on this machine."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    return _LOOPBACK.get(sys.platform, "lo")


def cores() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_per_rank(ranks: int, environ: Mapping[str, str]) -> int:
    """`max(1, cores // ranks)`, unless the user set OMP_NUM_THREADS to a whole number."""
    wish = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    own = wish.isascii() and wish.isdecimal() and len(wish) < 5 and int(wish) > 0
    return int(wish) if own else max(1, cores() // ranks)


def for_ranks(
    environ: Mapping[str, str], ranks: int, folder: str, device_type: str, import_path: list[str]
) -> dict[str, str]:
    """The environment that the agents and ranks of a single-host launch get.

    environ: the kernel's. ranks: world size. folder: where ranks leave output and results. device_type: from `device.choose`.
    import_path: the kernel's sys.path, so that what it can import the ranks can too.
    """
    env = {name: value for name, value in environ.items() if not _TORCHRUN.fullmatch(name)}
    interface = loopback_interface()
    threads = threads_per_rank(ranks, environ)
    env.update(
        D2L_RUN_FOLDER=folder,
        D2L_DEVICE_TYPE=device_type,
        D2L_THREADS=str(threads),
        OMP_NUM_THREADS=str(threads),  # set, so that torchrun prints no banner about it
        GLOO_SOCKET_IFNAME=interface,  # an inherited value may name an interface that is not there (L13)
        NCCL_SOCKET_IFNAME=interface,
        PET_LOG_DIR=folder,  # torchrun makes a folder for its own logs and never removes it: let it be in ours
        TORCH_ELASTIC_SHUTDOWN_TIMEOUT="3",  # a rank that ignores SIGTERM would otherwise hold torchrun for 30 s
        PYTHONUTF8="1",
        PYTHONIOENCODING="utf-8",
        PYTHONPATH=os.pathsep.join(entry for entry in import_path if entry),
    )
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # C++ warnings would land among the ranks' lines
    env.setdefault("KINETO_LOG_LEVEL", "99")
    if sys.platform == "win32":
        env["USE_LIBUV"] = "0"  # torch for Windows is built without libuv
    return env


def why_not_warm(environ: Mapping[str, str]) -> str | None:
    """None where the warm way may be taken; otherwise the reason for the cold one, in words for the reader."""
    wish = environ.get("D2L_LAUNCH", "").strip().lower()
    if wish not in ("", "warm", "cold"):
        raise ValueError(f"D2L_LAUNCH is {environ['D2L_LAUNCH']!r}: allowed are 'warm' and 'cold', or leave it unset")
    if wish == "cold":
        return "D2L_LAUNCH=cold asks for it"
    if sys.platform != "linux":
        return f"forking a process that has imported torch is not safe on {sys.platform}"
    return why_no_semaphores()
