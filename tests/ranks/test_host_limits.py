"""What the host lacks is named within seconds, with what to do: under real limits, in mount and network namespaces and child processes."""

import os
import re
import resource
import shlex
import subprocess
import sys
import textwrap

import pytest

from tests.ranks import hosts

LAUNCHES = """
import sys, time
from d2l_utils import launch
from tests.ranks.test_host_limits import work
for how in sys.argv[1:]:
    begun = time.monotonic()
    try:
        print(how, launch(work, world_size=2, how=how, output="quiet", timeout=60).way)
    except Exception as error:
        print(how, type(error).__name__, error)
    print("seconds", time.monotonic() - begun, flush=True)
"""


def work(how):
    """Rank 1 uses up the disk in this way, after both have met."""
    import os
    import sys

    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1))
    if how == "result":
        return torch.ones(5_000_000)
    if how.startswith("fill") and dist.get_rank() == 1:
        try:
            with open(os.path.join(os.environ["D2L_RUN_FOLDER"], "much"), "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        except OSError:
            if how == "fill and exit":
                sys.exit(3)
    if how == "print" and dist.get_rank() == 1:
        while True:
            print("x" * 10_000)
    return None


def script(tmp_path):
    file = tmp_path / "launches.py"
    file.write_text(textwrap.dedent(LAUNCHES))
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(file))}"


def said(line, *unshare, **env):
    """What a shell line prints, in these namespaces."""
    path = os.pathsep.join(
        os.path.abspath(p) for p in (*os.environ.get("PYTHONPATH", "").split(os.pathsep), os.getcwd())
    )
    done = subprocess.run(
        [*(("unshare", *unshare) if unshare else ()), "sh", "-c", line],
        env={**os.environ, "PYTHONPATH": path, **env}, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_loopback_is_named_at_once(tmp_path):  # X14
    hosts.needed()
    text = said(f"{script(tmp_path)} plain", "--net")
    assert "plain OSError this machine cannot reach itself over loopback" in text and "`ip link set lo up`" in text
    assert float(re.search(r"seconds (\S+)", text)[1]) < 2


@pytest.mark.parametrize(
    ("mount", "why"),
    [
        ("mount -t tmpfs -o ro none /dev/shm", "Read-only file system"),
        (
            "mount -t tmpfs -o size=64k none /dev/shm && head -c 65536 /dev/zero >/dev/shm/full",
            "No space left on device",
        ),
    ],
)
def test_without_semaphores_the_launch_goes_the_cold_way_and_says_why(tmp_path, mount, why):  # X11
    hosts.needed()
    text = said(f"{mount} && {script(tmp_path)} plain", "--mount")
    assert f"no semaphore can be made in /dev/shm, which forking ranks needs ({why})" in text
    assert "plain cold" in text


@pytest.mark.parametrize(
    ("how", "way"), [("result", "warm"), ("fill and exit", "warm"), ("print", "warm"), ("fill", "cold")]
)
def test_a_full_disk_is_named_and_freed_for_the_next_launch(tmp_path, how, way):
    hosts.needed()
    small = tmp_path / "small"
    small.mkdir()
    line = f"mount -t tmpfs -o size=8m none {small} && TMPDIR={small} {script(tmp_path)} plain '{how}' plain"
    text = said(line, "--mount", D2L_LAUNCH=way)
    assert re.search(rf"{how} LaunchError .*the disk is full: remove files, or set TMPDIR", text), text
    assert text.count(f"plain {way}") == 2, text
    assert float(re.findall(r"seconds (\S+)", text)[1]) < 30


@pytest.mark.parametrize("size", [4, 16])
def test_a_disk_that_is_full_before_the_launch_is_named(tmp_path, size):
    hosts.needed()
    small = tmp_path / "small"
    small.mkdir()
    text = said(f"mount -t tmpfs -o size={size}k none {small} && TMPDIR={small} {script(tmp_path)} plain", "--mount")
    assert re.search(r"plain (OS|Launch)Error .*the disk is full: remove files, or set TMPDIR", text), text


@pytest.mark.parametrize("number", [4, 9, 14])
def test_a_limit_on_processes_is_named(tmp_path, number):
    """As another user, since root has no such limit; with root's right to read, where Python may lie in root's own folders."""
    hosts.needed()
    tmp_path.chmod(0o777)
    user = "--reuid=54321 --regid=54321 --clear-groups --inh-caps=+dac_override --ambient-caps=+dac_override"
    line = f"cd {tmp_path} && HOME={tmp_path} TMPDIR={tmp_path} exec setpriv {user} prlimit --nproc={number} {script(tmp_path)} plain"
    text = said(line)
    assert "the limit on processes and threads is reached" in text and "`ulimit -u`" in text, text


def limited(tmp_path, kind, number):
    line = f"exec {script(tmp_path)} plain"
    done = subprocess.run(
        ["sh", "-c", line], preexec_fn=lambda: resource.setrlimit(kind, (number, number)), capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}, timeout=200, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


def test_a_limit_on_open_files_is_named(tmp_path):
    assert "the limit on open files is reached: close files, or raise the limit (`ulimit -n`" in limited(
        tmp_path, resource.RLIMIT_NOFILE, 24
    )


def test_a_limit_on_memory_is_named(tmp_path):
    text = limited(tmp_path, resource.RLIMIT_AS, 2_500_000_000)
    assert "there is not enough memory to start another process" in text and "`ulimit -v`" in text


def test_a_kernel_that_has_no_descriptor_left_is_told_so(tmp_path):
    code = """
import os
from d2l_utils import launch
from tests.ranks.test_host_limits import work
launch(work, world_size=1, how="plain")
opened = []
try:
    while True:
        opened.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
try:
    launch(work, world_size=1, how="plain")
except OSError as error:
    for each in opened:
        os.close(each)
    print(error)
"""
    file = tmp_path / "kernel.py"
    file.write_text(code)
    assert "the limit on open files is reached" in said(f"ulimit -n 256; exec {sys.executable} {file}")
