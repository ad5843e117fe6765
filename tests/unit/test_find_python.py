"""Which Python .ci/setup.sh finds on pretended machines, and what it says where there is none."""

from pathlib import Path

import pytest

from tests.unit.pretended import Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("python3.12", "3.12.1"),
        ("python3.13", "3.13.0"),
        ("python3.14", "3.14.2"),
        ("python3", "3.13.5"),
        ("python", "3.12.0"),
    ],
)
def test_a_python_on_path_is_found(machine: Machine, name: str, version: str) -> None:
    python = machine.python(name, version)
    assert machine.finds() == str(python)


@pytest.mark.parametrize("version", ["2.7.18", "3.6.15", "3.11.7", "3.15.0"])
def test_another_version_is_passed_over(machine: Machine, version: str) -> None:
    machine.python("python3", version)
    right = machine.python("python", "3.12.1")
    assert machine.finds() == str(right)


def test_a_later_folder_on_path_is_looked_at_when_the_first_refuses(machine: Machine, tmp_path: Path) -> None:
    machine.program("python3.12", "#!/bin/sh\nexit 127\n")
    right = machine.python(tmp_path / "later one" / "python3.12", "3.12.1")
    assert machine.finds(PATH=f"{machine.environ['PATH']}:{right.parent}") == str(right)


@pytest.mark.parametrize("folder", ["home/.pyenv", "elsewhere"])
def test_pyenvs_versions_are_found_behind_shims_that_refuse(machine: Machine, tmp_path: Path, folder: str) -> None:
    shim = '#!/bin/sh\necho "pyenv: $0: command not found" >&2\nexit 127\n'
    for name in ("python3.12", "python3.13"):
        machine.program(name, shim)
    machine.python("python3", "3.11.7")
    versions = tmp_path / folder / "versions"
    machine.python(versions / "3.11.7" / "bin" / "python3.11", "3.11.7")
    right = machine.python(versions / "3.13.0" / "bin" / "python3.13", "3.13.0")
    assert machine.finds(**({} if "home" in folder else {"PYENV_ROOT": str(tmp_path / folder)})) == str(right)


def test_pyenv_says_where_its_versions_are(machine: Machine, tmp_path: Path) -> None:
    machine.program("pyenv", f'#!/bin/sh\n[ "$1" = root ] && echo "{tmp_path}/opt"\n')
    right = machine.python(tmp_path / "opt" / "versions" / "3.12.1" / "bin" / "python3.12", "3.12.1")
    assert machine.finds() == str(right)


def test_uv_gives_one_that_it_has_or_fetches_one(machine: Machine, tmp_path: Path) -> None:
    managed = tmp_path / "uv" / "python3.12"
    spare = machine.python(tmp_path / "spare", "3.12.4")
    machine.program(
        "uv",
        f"""#!/bin/sh
        case $2 in
        install) mkdir -p "{managed.parent}"; cp "{spare}" "{managed}"; echo Installed ;;
        find) [ -e "{managed}" ] && echo "{managed}" ;;
        esac
        """,
    )
    status, out, err = machine.run("find")
    assert (status, out) == (0, f"{managed}\n"), err
    assert "Asking uv" in err
    status, out, err = machine.run("find")
    assert (status, out, err) == (0, f"{managed}\n", "")


@pytest.mark.parametrize("unfit", [{"implementation": "pypy"}, {"free_threaded": True}])
def test_builds_without_wheels_are_passed_over(machine: Machine, unfit: dict) -> None:
    machine.python("python3.13", "3.13.0", **unfit)
    right = machine.python("python3", "3.12.1")
    assert machine.finds() == str(right)


def test_no_python_is_said_in_three_lines(machine: Machine) -> None:
    machine.python("python3", "3.11.7")
    status, out, err = machine.run()
    assert (status, out) == (1, "")
    needs, get, override = err.splitlines()
    assert "Python 3.12, 3.13 or 3.14" in needs
    assert all(word in get for word in ("uv python install", "pyenv install", "conda env create"))
    assert "make lab PYTHON=" in override
    assert sorted(path.name for path in machine.checkout.iterdir()) == [".ci", "pyproject.toml"]


def test_a_missing_debian_package_is_named(machine: Machine) -> None:
    machine.python("python3", "3.13.5", venv=False)
    status, _, err = machine.run("find")
    assert status == 1
    assert "python3 cannot make environments: install python3.13-venv." in err.splitlines()[0]


def test_override(machine: Machine, tmp_path: Path) -> None:
    machine.python("python3.12", "3.12.1")
    chosen = machine.python(tmp_path / "home" / "my python", "3.14.0")
    assert machine.finds(PYTHON=str(chosen)) == str(chosen)
    assert machine.finds(PYTHON="~/my python") == str(chosen)
    assert machine.finds(PYTHON="") == str(machine.bin / "python3.12")


@pytest.mark.parametrize(
    ("wish", "answer"),
    [
        ("3.13", "PYTHON=3.13: no such program."),
        ("old", "PYTHON=old is Python 3.11.7."),
        ("shim", "does not run: refused."),
    ],
)
def test_a_bad_override_is_refused(machine: Machine, wish: str, answer: str) -> None:
    machine.python("python3.12", "3.12.1")
    machine.python("old", "3.11.7")
    machine.program("shim", "#!/bin/sh\necho refused >&2\nexit 127\n")
    status, out, err = machine.run(PYTHON=wish)
    assert (status, out) == (1, "")
    assert answer in err
    assert "Python 3.12, 3.13 or 3.14: make lab PYTHON=/path/to/python3.12" in err
