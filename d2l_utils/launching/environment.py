"""The environment of ranks: what they must not inherit, and what each platform's torch needs."""

import json
import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from d2l_utils.launching.host_limits import why_no_semaphores
from d2l_utils.launching.limits import cores

# torchrun's own variables, and PET_*, from which it reads defaults for its arguments: left over from another launch they would
# redirect this one.
_TORCHRUN = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_RANK|ROLE_WORLD_SIZE|ROLE_NAME"
    r"|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|TORCH_ELASTIC_.*|TORCH_DISABLE_SHARE_RDZV_TCP_STORE|PET_.*"
    r"|D2L_RUN_FOLDER|D2L_DEVICE_TYPE|D2L_THREADS|D2L_RESTORE)"
)

# With these torch answers "no GPU" from the variable alone and touches no driver. torchrun's agent asks torch for GPUs
# before it starts the ranks; a driver that was asked cannot be used in a fork. Ranks on the CPU keep them: torch's own
# optimizers, device meshes and checkpoints would otherwise take the first GPU that they see.
_NO_DEVICES = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

_HASH_SEED = str(int.from_bytes(os.urandom(4), "little"))

# OMP_NUM_THREADS and its like are set anew in each rank; PYTHONPATH is replaced by the kernel's sys.path.
_READ_AT_START = re.compile(
    r"(?!PYTHONPATH$|PYTHONSTARTUP$|[A-Z]+_NUM_THREADS$)"
    r"((PYTHON|LD_|MALLOC_|GLIBC_|LC_|OMP_|GOMP_|KMP_|MKL_|OPENBLAS_|ATEN_|TORCH_|PYTORCH_)\w*|LANG|TZ|HOME)"
)

_LOOPBACK = {"linux": "lo", "darwin": "lo0", "win32": "Loopback Pseudo-Interface 1"}


def loopback_interface() -> str:
    """The name of the interface that holds 127.0.0.1 on this machine."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == "127.0.0.1" for address in addresses):
            return name
    return _LOOPBACK.get(sys.platform, "lo")


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
        GLOO_SOCKET_IFNAME=interface,  # an inherited value may name an interface that is not there
        NCCL_SOCKET_IFNAME=f"={interface}",  # without = it is the beginning of a name
        PET_LOG_DIR=folder,  # torchrun makes a folder for its own logs and never removes it: let it be in ours
        TORCH_ELASTIC_SHUTDOWN_TIMEOUT="3",  # a rank that ignores SIGTERM would otherwise hold torchrun for 30 s
        PYTHONUTF8="1",
        PYTHONIOENCODING="utf-8",
        PYTHONPATH=os.pathsep.join(os.path.abspath(entry) for entry in import_path),
    )
    restored = ["PYTHONSAFEPATH", *(_NO_DEVICES if device_type != "cpu" else ())]
    env["D2L_RESTORE"] = json.dumps({name: environ.get(name) for name in restored})
    env.update(_NO_DEVICES, PYTHONSAFEPATH="1")
    # All ranks that are forked have their parent's seed of str's hash; those that are started get the same one.
    env.setdefault("PYTHONHASHSEED", _HASH_SEED)
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # C++ warnings would land among the ranks' lines
    env.setdefault("KINETO_LOG_LEVEL", "99")
    if sys.platform == "win32":
        env["USE_LIBUV"] = "0"  # torch for Windows is built without libuv
    return env


def restore(environ: MutableMapping[str, str]) -> None:
    """In a rank: give back the reader's own values of the variables that only its torchrun agent had to have otherwise,
    such as the view of the devices of a rank that uses one."""
    for name, value in json.loads(environ.pop("D2L_RESTORE", "{}")).items():
        if value is None:
            environ.pop(name, None)
        else:
            environ[name] = value


def read_at_start(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that Python, the C library or torch read once, when they start or are imported. A process that has
    started with others than these cannot be forked for a rank that is to have these."""
    return {name: value for name, value in environ.items() if _READ_AT_START.fullmatch(name)}


def check_idle_seconds(environ: Mapping[str, str]) -> None:
    """ValueError unless D2L_HELPER_IDLE, where it is set, is a number of seconds above 0."""
    text = environ.get("D2L_HELPER_IDLE") or "600"
    try:
        good = 0 < float(text) < float("inf")
    except ValueError:
        good = False
    if not good:
        raise ValueError(f"D2L_HELPER_IDLE is {text!r}: allowed is a number of seconds above 0")


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


def why_no_fork(folder: Path) -> str | None:
    """Why a launch that took the warm way has to be made again the cold way, or None where it has not. folder: the launch's."""
    if any(folder.glob("rank*.badfork")):
        return "a process above the ranks has asked the accelerator's driver, and a fork of it cannot use that"
    return None
