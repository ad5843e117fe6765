"""Two hosts on one machine: network namespaces with addresses, host names and processes of their own, joined by a virtual cable.

Each host lives as long as its first process, a `cat` whose input this process holds: when this process ends, in whatever way, the
`cat` ends too, the kernel then kills every process of that host, and namespace and cable go with the last of them. Nothing is
ever made in this machine's own network.
"""

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

_BIN = str(Path(sys.executable).parent)  # where torchrun is


class Host:
    """One host. `run` starts a shell line on it."""

    def __init__(self, name: str, address: str, others: str, folder: Path) -> None:
        self.name, self.address, self.folder = name, address, folder / name
        self.folder.mkdir()
        self.started: list[subprocess.Popen[bytes]] = []
        # As Debian and Ubuntu have it: a host's own name leads to itself, not to its network.
        hosts = folder / f"{name}.hosts"
        hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n{address} {name}.lan\n{others}")
        script = f'mount --bind "$0" /etc/hosts && hostname {name} && ip link set lo up && echo up && exec cat'
        flags = ["--net", "--uts", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child"]
        self.holder = subprocess.Popen(
            ["unshare", *flags, "sh", "-c", script, str(hosts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.holder.stdout
        if (said := self.holder.stdout.readline()) != "up\n":
            raise OSError(f"this machine does not let its root make a network namespace: {said.strip()}")
        self.first = psutil.Process(self.holder.pid).children()[0].pid

    def enter(self, *command: str) -> list[str]:
        return ["nsenter", f"--target={self.first}", "--net", "--uts", "--mount", "--pid", *command]

    def do(self, line: str) -> None:
        subprocess.run(self.enter("sh", "-c", line), check=True, capture_output=True, text=True)

    def run(self, line: str, **env: str) -> subprocess.Popen[bytes]:
        """Start a shell line in this host's folder; what it prints goes into `log`. Nothing of the tester's shell goes along."""
        clean = {"PATH": f"{_BIN}:{os.environ['PATH']}", "HOME": str(self.folder), "D2L_DEVICE": "cpu", **env}
        if "PYTHONPATH" in os.environ:
            clean["PYTHONPATH"] = os.pathsep.join(
                os.path.abspath(p) for p in os.environ["PYTHONPATH"].split(os.pathsep)
            )
        place = shlex.quote(str(self.folder))  # who enters a host stands in its root folder
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                self.enter("sh", "-c", f"cd {place} && {line}"),
                env=environment(self.folder, **env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.started.append(process)
        return process

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def processes(self) -> list[str]:
        """Command lines of what runs on this host, its first process left out."""
        mine, found = os.readlink(f"/proc/{self.first}/ns/pid"), []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == mine and process.pid != self.first:
                    found.append(" ".join(process.cmdline()) or process.name())
        return found

    def left(self, seconds: float = 5.0) -> list[str]:
        """Wait up to `seconds` for the last process to go. Returns those that stay."""
        deadline = time.monotonic() + seconds
        while (found := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def close(self) -> None:
        assert self.holder.stdin and self.holder.stdout
        self.holder.stdin.close()
        self.holder.stdout.close()
        try:
            self.holder.wait(10)
        except subprocess.TimeoutExpired:
            self.holder.kill()  # its child is killed with it
            self.holder.wait()
        for process in self.started:  # they ended with the host
            process.wait(10)


def environment(home: Path, **more: str) -> dict[str, str]:
    """What a fresh login has: this environment's programs, and nothing else of the tester's shell."""
    env = {"PATH": f"{_BIN}:{os.environ['PATH']}", "HOME": str(home), "D2L_DEVICE": "cpu"}
    if "PYTHONPATH" in os.environ:
        env["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, os.environ["PYTHONPATH"].split(os.pathsep)))
    return env | more


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[list[Host]]:
    """Two hosts on one cable, `node-a` at 192.168.77.1 and `node-b` at 192.168.77.2; each knows the other's address by name."""
    # Above 127: of two ranks the one with the lower address listens (gloo), and a host that gives itself as 127.0.0.1 must be caught.
    places = [("node-a", "192.168.77.1"), ("node-b", "192.168.77.2")]
    with contextlib.ExitStack() as stack:
        hosts = []
        for name, address in places:
            others = "".join(f"{there} {other}\n" for other, there in places if other != name)
            hosts.append(Host(name, address, others, folder))
            stack.callback(hosts[-1].close)
        a, b = hosts
        cable = f"ip link add lan0 netns {a.first} type veth peer name lan0 netns {b.first}"
        subprocess.run(cable.split(), check=True, capture_output=True, text=True)
        for host in hosts:
            host.do(f"ip addr add {host.address}/24 dev lan0 && ip link set lan0 up")
        yield hosts


def why_not() -> str | None:
    """None where two hosts can be made, otherwise what is missing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs Linux and root, to make network namespaces"
    for tool, package in (("ip", "iproute2"), ("unshare", "util-linux"), ("nsenter", "util-linux")):
        if subprocess.run(["sh", "-c", f"command -v {tool}"], capture_output=True, check=False).returncode:
            return f"needs {tool} (Debian's package {package})"
    flags = ["--net", "--uts", "--mount", "--pid", "--mount-proc", "--fork"]
    done = subprocess.run(["unshare", *flags, "true"], capture_output=True, text=True, check=False)
    return f"this machine does not let its root make namespaces: {done.stderr.strip()}" if done.returncode else None


def needed() -> None:
    """Skip, saying why, where two hosts cannot be made; fail where D2L_CI allows no skip."""
    reason = why_not()
    if reason and os.environ.get("D2L_CI"):
        pytest.fail(f"D2L_CI=1 allows no skip, and two hosts cannot be made: {reason}")
    if reason:
        pytest.skip(reason)
