""".ci/setup.sh with pretended Pythons: it finds one, installs once, and repairs what was cut short."""

import os
import shutil
import signal
import subprocess
import sys
import time
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
def test_pyenvs_versions_are_found_behind_shims_that_refuse(
    machine: Machine, tmp_path: Path, folder: str
) -> None:
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
def test_another_conda_environment_is_left_alone(
    machine: Machine, tmp_path: Path, origin: str | None
) -> None:
    environ = conda(machine, tmp_path, "base", origin)
    assert machine.run(**environ)[:2] == (0, f"{machine.checkout}/.venv/bin/python\n")
    assert "/conda/bin/python -m pip" not in machine.log.read_text()


def test_an_override_wins_over_conda(machine: Machine, tmp_path: Path) -> None:
    environ = conda(machine, tmp_path, "chapter19-9", None)
    assert (
        machine.run(PYTHON=str(machine.bin / "python3.12"), **environ)[1]
        == f"{machine.checkout}/.venv/bin/python\n"
    )
