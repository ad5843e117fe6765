""".ci/run on pretended machines: it installs what is missing, and nothing else, then runs README's test command."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.pretended import ROOT, Machine

FONTS = any(Path("/usr/share/fonts").rglob("*.ttf"))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = Machine(tmp_path)
    shutil.copy(ROOT / ".ci" / "run", machine.checkout / ".ci")
    machine.program("make", '#!/bin/sh\necho "make $* with CI=$CI D2L_CI=$D2L_CI in $PWD"\nexit 7\n')
    machine.program("apt-get", '#!/bin/sh\necho "apt-get $*" >>"$LOG"\n')
    machine.program("ip", "#!/bin/sh\n")
    for tool in ("bash", "find"):
        (machine.bin / tool).symlink_to(shutil.which(tool) or pytest.fail(f"this machine has no {tool}"))
    return machine


def ci(machine: Machine, user: str = "0") -> tuple[str, str, list[str]]:
    """What .ci/run printed, said on stderr, and asked of apt-get."""
    machine.program("id", f"#!/bin/sh\necho {user}\n")
    done = subprocess.run(
        ["bash", str(machine.checkout / ".ci" / "run")],
        env=machine.environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 7, done.stderr  # make's own status
    return done.stdout, done.stderr, [line for line in log(machine) if line.startswith("apt-get")]


def log(machine: Machine) -> list[str]:
    return machine.log.read_text().splitlines() if machine.log.exists() else []


def test_a_machine_that_has_everything_is_left_as_it_is(machine: Machine) -> None:
    machine.python("python3", "3.12.1")
    machine.program("chromium", "#!/bin/sh\n")
    out, _, asked = ci(machine)
    assert out.splitlines()[-1] == f"make test with CI=true D2L_CI=1 in {machine.checkout}"
    assert asked == (
        [] if FONTS else ["apt-get update -qq", "apt-get install -y -qq --no-install-recommends fonts-dejavu-core"]
    )


def test_what_is_missing_is_installed(machine: Machine) -> None:
    machine.python("python3", "3.11.7")
    (machine.bin / "ip").unlink()
    _, _, (update, install) = ci(machine)
    assert update == "apt-get update -qq"
    packages = install.removeprefix("apt-get install -y -qq --no-install-recommends ").split()
    assert set(packages) - {"fonts-dejavu-core"} == {"chromium", "iproute2", "python3", "python3-venv"}


def test_who_may_not_install_is_told_what_is_missing(machine: Machine) -> None:
    machine.python("python3", "3.12.1")
    out, err, asked = ci(machine, user="1000")
    assert "This machine lacks: chromium" in err
    assert asked == []
    assert out.startswith("make test")


def test_the_extras_are_installed_into_the_environment_that_make_uses(machine: Machine) -> None:
    machine.python("python3", "3.12.1")
    machine.program("chromium", "#!/bin/sh\n")
    ci(machine)
    first, extra = [line for line in log(machine) if " -m pip " in line]
    python = machine.checkout / ".venv" / "bin" / "python"
    assert first == f"{python} -m pip install -q --disable-pip-version-check -e .[test]"
    assert extra == f"{python} -m pip install -q --disable-pip-version-check --no-build-isolation -e .[deepspeed,book]"


def test_without_the_extras_make_is_not_called(machine: Machine) -> None:
    machine.python("python3", "3.12.1")
    machine.program("chromium", "#!/bin/sh\n")
    ci(machine)
    machine.log.with_name("pip.log.fail").touch()
    done = subprocess.run(
        ["bash", str(machine.checkout / ".ci" / "run")], env=machine.environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "make" not in done.stdout
