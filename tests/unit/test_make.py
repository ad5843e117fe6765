"""The commands: README, Makefile and modules name the same ones, and `make lab` serves on loopback, with a token."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from urllib.parse import parse_qs, urlsplit

import psutil
import pytest

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TOLD = set(re.findall(r"^([a-z-]+):.* ## ", MAKEFILE, re.MULTILINE))


def make(*arguments: str) -> str:
    """What make prints; `-n` in the arguments keeps it from running anything."""
    # Not what an outer make, which may have started these tests, passes on.
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "ARGS"))}
    done = subprocess.run(["make", *arguments], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_help_lists_every_target() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert set(phony.split()) == TOLD
    assert {"help", "lab", "test", "test-gpu", "compare", "notebooks", "book", "check", "bench", "soak"} <= TOLD
    listed = re.findall(r"^make ([a-z-]+) +\S", make("help"), re.MULTILINE)
    assert set(listed) == TOLD
    assert make() == make("help")


def test_readme_names_every_target_and_no_other() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`make ([a-z-]+)", readme))
    for block in re.findall(r"^```.*?^```", readme, re.MULTILINE | re.DOTALL):
        named |= set(re.findall(r"^(?:\$ )?make ([a-z-]+)", block, re.MULTILINE))
    assert named == TOLD


@pytest.mark.parametrize("target", sorted(TOLD - {"help", "setup"}))
def test_what_a_target_runs_exists(target: str) -> None:
    modules = re.findall(r'"\$python" -m ([\w.]+)', make("-n", target))
    assert modules
    assert [module for module in modules if importlib.util.find_spec(module) is None] == []


def test_arguments_reach_the_program() -> None:
    assert '-m pytest -n 2 --dist worksteal -k "one two"' in make("-n", "test", 'ARGS=-k "one two"')


def test_gpu_tests_run_one_at_a_time() -> None:
    assert "-m pytest -p no:xdist -m gpu tests/gpu -x" in make("-n", "test-gpu", "ARGS=-x")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """What `make lab` runs, under this Python, without a browser and without this user's own settings."""
    line = make("-n", "lab", "ARGS=--no-browser").replace("$(sh .ci/setup.sh)", shlex.quote(sys.executable))
    settings = {"JUPYTER_CONFIG_DIR": "config", "JUPYTER_RUNTIME_DIR": "runtime", "JUPYTER_DATA_DIR": "data"}
    process = subprocess.Popen(
        ["sh", "-c", line],
        cwd=ROOT,
        env=os.environ | {name: str(tmp_path / folder) for name, folder in settings.items()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    limit = Timer(120, process.kill)
    limit.start()
    yield process
    limit.cancel()
    process.terminate()
    process.communicate(timeout=30)


def test_lab_serves_the_first_lesson_on_loopback_with_a_token(lab: subprocess.Popen[str]) -> None:
    assert lab.stderr is not None
    said = []
    for line in lab.stderr:
        said.append(line)
        if match := re.search(r"http://127\.0\.0\.1:\S+", line):
            break
    else:
        pytest.fail("".join(said))
    url = urlsplit(match.group())
    assert url.path == "/lab/tree/notebooks/00-start.ipynb"
    assert parse_qs(url.query)["token"]
    server = psutil.Process(lab.pid)
    ends = time.monotonic() + 30
    while not (listening := {c.laddr.ip for c in server.net_connections() if c.status == psutil.CONN_LISTEN}):
        assert time.monotonic() < ends, "it never listened"
        time.sleep(0.1)
    assert listening == {"127.0.0.1"}
    page = f"{url.scheme}://{url.netloc}/api/contents/notebooks/00-start.ipynb?content=0"
    with urllib.request.urlopen(f"{page}&{url.query}") as answer:
        assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError, match="403") as refused:
        urllib.request.urlopen(page)
    refused.value.close()
