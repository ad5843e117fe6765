""".ci/setup.sh on pretended machines: it installs once, repairs what was cut short, and leaves others' things alone."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.unit.pretended import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_sets_up_once(machine: Machine) -> None:
    machine.python("python3.12", "3.12.1")
    python = f"{machine.checkout}/.venv/bin/python\n"
    status, out, err = machine.run()
    assert (status, out) == (0, python), err
    assert "Making .venv with Python 3.12.1 of /home of 3.12.1" in err
    assert machine.log.read_text().splitlines() == [
        f"{python.strip()} -m pip install -q --disable-pip-version-check -e .[test]"
    ]
    assert machine.run() == (0, python, "")
    assert machine.installs() == 1


def test_a_change_of_pyproject_installs_again_into_the_same_environment(machine: Machine) -> None:
    machine.python("python3.12", "3.12.1")
    machine.run()
    kept = machine.checkout / ".venv" / "kept"
    kept.touch()
    with (machine.checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert machine.run()[0] == 0
    assert machine.installs() == 2
    assert kept.exists()
    machine.run()
    assert machine.installs() == 2


def test_touching_pyproject_changes_nothing(machine: Machine) -> None:
    machine.python("python3.12", "3.12.1")
    machine.run()
    os.utime(machine.checkout / "pyproject.toml", (0, 0))
    machine.run()
    assert machine.installs() == 1


def killed_while_installing(machine: Machine) -> None:
    wait = Path(f"{machine.log}.wait")
    wait.touch()
    process = machine.start()
    waiting = Path(f"{machine.log}.waiting")
    for _ in range(300):
        if waiting.exists():
            break
        time.sleep(0.1)
    assert waiting.exists()
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    wait.unlink()
    waiting.unlink()


def test_a_set_up_that_was_killed_begins_anew(machine: Machine) -> None:
    machine.python("python3.12", "3.12.1")
    killed_while_installing(machine)
    half = machine.checkout / ".venv" / "half written"
    half.touch()
    status, out, err = machine.run()
    assert (status, out) == (0, f"{machine.checkout}/.venv/bin/python\n")
    assert "cut short" in err
    assert not half.exists()
    assert machine.installs() == 2
    assert machine.run()[2] == ""


def test_an_update_that_was_killed_begins_anew(machine: Machine) -> None:
    machine.python("python3.12", "3.12.1")
    machine.run()
    with (machine.checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    killed_while_installing(machine)
    assert "cut short" in machine.run()[2]
    assert machine.installs() == 3


def test_a_set_up_that_failed_is_told_and_tried_again(machine: Machine) -> None:
    machine.python("python3.12", "3.12.1")
    fail = Path(f"{machine.log}.fail")
    fail.touch()
    status, out, err = machine.run()
    assert (status, out) == (1, "")
    assert "Call make again" in err.splitlines()[-1]
    fail.unlink()
    assert machine.run()[0] == 0
    assert machine.installs() == 2


@pytest.mark.parametrize("damage", ["python gone", "not an environment"])
def test_a_broken_environment_is_made_anew(machine: Machine, damage: str) -> None:
    machine.python("python3.12", "3.12.1")
    machine.run()
    python = machine.checkout / ".venv" / "bin" / "python"
    if damage == "python gone":
        python.unlink()
        python.symlink_to("/no/longer/there")
    else:
        shutil.rmtree(machine.checkout / ".venv")
        (machine.checkout / ".venv").mkdir()
    status, out, err = machine.run()
    assert (status, out) == (0, f"{python}\n"), err
    assert machine.installs() == 2


def test_a_checkout_that_was_moved_gets_a_new_environment(machine: Machine) -> None:
    machine.python("python3.12", "3.12.1")
    machine.run()
    machine.checkout = machine.checkout.rename(machine.checkout.with_name("moved"))
    status, out, _ = machine.run()
    assert (status, out) == (0, f"{machine.checkout}/.venv/bin/python\n")
    assert machine.installs() == 2


def test_an_environment_is_never_made_from_itself(machine: Machine) -> None:
    base = machine.python("python3.12", "3.12.1")
    machine.run()
    activated = machine.checkout / ".venv" / "bin"
    machine.python(activated / "python", "3.12.1", base=base)
    shutil.copy(activated / "python", activated / "python3.12")
    (machine.checkout / ".venv" / ".set-up").write_text("of a checkout that was moved")
    status, out, err = machine.run(PATH=f"{activated}:{machine.environ['PATH']}")
    assert (status, out) == (0, f"{activated}/python\n"), err
    assert machine.installs() == 2


def test_an_override_remakes_the_environment_only_if_it_is_another_python(machine: Machine) -> None:
    machine.python("python3.12", "3.12.1")
    machine.python("python3.13", "3.13.0")
    machine.run()
    assert machine.run(PYTHON="python3.12")[2] == ""
    assert "Making .venv with Python 3.13.0" in machine.run(PYTHON="python3.13")[2]
    assert machine.run()[2] == ""  # without a wish, what is there stays
    assert machine.installs() == 2


def test_two_at_once_install_once(machine: Machine) -> None:
    machine.python("python3.12", "3.12.1")
    started = [machine.start() for _ in range(3)]
    outputs = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], outputs
    assert machine.installs() == 1


def conda(machine: Machine, tmp_path: Path, name: str, origin: str | None) -> dict[str, str]:
    machine.python("python3.12", "3.12.1")
    python = machine.python(tmp_path / "conda" / "bin" / "python", "3.12.8", origin=origin)
    return {
        "CONDA_PREFIX": str(python.parent.parent),
        "CONDA_DEFAULT_ENV": name,
        "PATH": f"{python.parent}:{machine.environ['PATH']}",
    }


def test_an_activated_conda_environment_of_this_checkout_is_used(machine: Machine, tmp_path: Path) -> None:
    environ = conda(machine, tmp_path, "any-name", f'{{"url": "{machine.checkout.as_uri()}"}}')
    python = f"{tmp_path}/conda/bin/python\n"
    assert machine.run(**environ)[:2] == (0, python)
    assert machine.run(**environ) == (0, python, "")
    assert machine.installs() == 1
    assert not (machine.checkout / ".venv").exists()


def test_a_conda_environment_from_environment_yml_is_finished(machine: Machine, tmp_path: Path) -> None:
    """Its pip part failed or was cut short: the name says that it was meant for the chapter."""
    environ = conda(machine, tmp_path, "chapter19-9", None)
    assert machine.run(**environ)[:2] == (0, f"{tmp_path}/conda/bin/python\n")
    assert "/conda/bin/python -m pip install" in machine.log.read_text()


@pytest.mark.parametrize("origin", [None, '{"url": "file:///another/checkout"}'])
def test_another_conda_environment_is_left_alone(machine: Machine, tmp_path: Path, origin: str | None) -> None:
    environ = conda(machine, tmp_path, "base", origin)
    assert machine.run(**environ)[:2] == (0, f"{machine.checkout}/.venv/bin/python\n")
    assert "/conda/bin/python -m pip" not in machine.log.read_text()


def test_an_override_wins_over_conda(machine: Machine, tmp_path: Path) -> None:
    environ = conda(machine, tmp_path, "chapter19-9", None)
    assert machine.run(PYTHON=str(machine.bin / "python3.12"), **environ)[1] == f"{machine.checkout}/.venv/bin/python\n"
