"""One list of dependencies, and an environment that meets it (cases.md N02, N08, N09)."""

import importlib.metadata
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from d2l_utils.requirements import distribution_mismatches, mismatches

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ENVIRONMENT = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))


def named(requirements: list[str]) -> dict[str, SpecifierSet]:
    return {requirement.name: requirement.specifier for requirement in map(Requirement, requirements)}


def test_n08_environment_yml_takes_its_packages_from_pyproject() -> None:
    *plain, pip = ENVIRONMENT["dependencies"]
    assert pip == {"pip": ["-e .[test]"]}
    assert "test" in PROJECT["optional-dependencies"]
    # conda itself chooses only the interpreter: a torch or numpy from conda would be replaced by pip.
    assert [entry.split("=")[0] for entry in plain] == ["python", "pip"]


def test_n08_environment_yml_asks_for_a_python_that_pyproject_allows() -> None:
    (python,) = (entry for entry in ENVIRONMENT["dependencies"] if str(entry).startswith("python="))
    assert SpecifierSet(PROJECT["requires-python"]).contains(python.split("=")[1])


def test_n08_ranges_are_dnnlpys_own() -> None:
    ours = named(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"])
    theirs = named(importlib.metadata.requires("dnnlpy") or [])
    shared = sorted(set(ours) & set(theirs))
    assert shared == ["matplotlib", "numpy", "psutil", "pytest", "torch"]
    assert {name: ours[name] for name in shared} == {name: theirs[name] for name in shared}
    pythons = importlib.metadata.metadata("dnnlpy")["Requires-Python"]
    assert SpecifierSet(PROJECT["requires-python"]) == SpecifierSet(pythons)


def test_n08_this_environment_meets_pyproject() -> None:
    assert mismatches(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]) == []


@pytest.mark.parametrize("name", ["dnnlpy", "chapter19-9"])
def test_n08_this_environment_meets_what_is_installed(name: str) -> None:
    assert distribution_mismatches(name) == []


def test_n08_a_mismatch_names_the_package_what_is_there_and_what_is_needed() -> None:
    numpy = importlib.metadata.version("numpy")
    assert mismatches(["numpy<1.0", "no-such-package>=2", "numpy>=1.0", "numpy<1.0; python_version < '3'"]) == [
        f"numpy {numpy} is installed; numpy<1.0 is needed",
        "no-such-package is not installed; no-such-package>=2 is needed",
    ]
    assert distribution_mismatches("no-such-package") == ["no-such-package is not installed"]


def test_n08_a_wrong_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 11, 7, "final", 0))
    assert "Python 3.11.7 is running; dnnlpy needs Python <3.15,>=3.12" in [
        line.replace(">=3.12, <3.15", "<3.15,>=3.12") for line in distribution_mismatches("dnnlpy")
    ]


def test_nothing_is_listed_twice() -> None:
    names = [Requirement(line).name for line in PROJECT["dependencies"]]
    names += [Requirement(line).name for line in PROJECT["optional-dependencies"]["test"]]
    assert len(names) == len(set(names))


def test_n09_another_environment_is_told_where_to_go(tmp_path: Path) -> None:
    """pytest of an environment without the chapter: one clear line, not a pile of import errors."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "real = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'dnnlpy' else real(name, *rest)\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            str(ROOT / "tests" / "unit" / "test_environment.py"),
        ],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 4
    assert "This Python lacks dnnlpy. Run `make test`" in done.stdout + done.stderr
