"""A pretended machine for .ci/setup.sh: Pythons of any version, a pip that only writes down that it was called."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ["sh", "cat", "cksum", "cp", "dirname", "head", "mkdir", "mv", "rm", "sed", "sleep", "touch"]

# Runs the code it is given under the real Python, made to look like another. `-m venv` copies itself into the
# new environment; `-m pip install` writes a line into $LOG, and waits or fails if a file beside it says so.
FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
"-m venv") for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python" ;;
"-m pip")
    [ "$3" = --version ] && exit
    echo "$0 $*" >>"$LOG"
    [ ! -e "$LOG.wait" ] || {{ touch "$LOG.waiting"; sleep 60; }}
    [ ! -e "$LOG.fail" ] || exit 1 ;;
"-I -c") exec {real} -c '{disguise}' "$3" ;;
"-c "*) exec {real} -c '{disguise}' "$2" ;;
*) exit 2 ;;
esac
"""
DISGUISE = """
import sys, sysconfig, importlib.util, importlib.metadata
sys.version_info = {version}
sys.base_prefix = "{home}"
sys._base_executable = "{base}"
sys.implementation.name = "{implementation}"
sysconfig.get_config_var = lambda name: {free_threaded}
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: find(name) if {venv} else None
class Installed:
    def read_text(self, name): return {origin!r}
def distribution(name):
    if {origin!r} is None: raise importlib.metadata.PackageNotFoundError(name)
    return Installed()
importlib.metadata.distribution = distribution
exec(sys.argv[1])
"""


class Machine:
    """A checkout whose path has spaces and Chinese in it, and nothing on PATH but what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.home = folder / "home"
        self.checkout = folder / "第 19 章" / "a checkout"
        self.log = folder / "pip.log"
        tools = folder / "tools"
        for made in (self.bin, self.home, tools, self.checkout / ".ci"):
            made.mkdir(parents=True)
        for tool in TOOLS:
            (tools / tool).symlink_to(shutil.which(tool) or pytest.fail(f"this machine has no {tool}"))
        shutil.copy(ROOT / ".ci" / "setup.sh", self.checkout / ".ci")
        shutil.copy(ROOT / "pyproject.toml", self.checkout)
        self.environ = {"PATH": f"{self.bin}:{tools}", "HOME": str(self.home), "LOG": str(self.log)}

    def python(
        self,
        path: str | Path,
        version: str,
        *,
        implementation: str = "cpython",
        free_threaded: bool = False,
        venv: bool = True,
        origin: str | None = None,
        base: Path | None = None,
    ) -> Path:
        """Puts a pretended Python at a path, in `bin` if it is only a name."""
        numbers = (*map(int, version.split(".")), "final", 0)
        disguise = DISGUISE.format(
            version=numbers,
            home=f"/home of {version}",
            base=base or self.bin / path,
            implementation=implementation,
            free_threaded=int(free_threaded),
            venv=venv,
            origin=origin,
        )
        disguise = disguise.replace("'", "'\"'\"'")
        return self.program(path, FAKE_PYTHON.format(real=sys.executable, disguise=disguise))

    def program(self, path: str | Path, text: str) -> Path:
        path = self.bin / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        return path

    def start(self, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["sh", str(self.checkout / ".ci" / "setup.sh"), *arguments],
            env=self.environ | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, **environ: str) -> tuple[int, str, str]:
        process = self.start(*arguments, **environ)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    def finds(self, **environ: str) -> str:
        status, out, err = self.run("find", **environ)
        assert status == 0, err
        return out.removesuffix("\n")

    def installs(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0
