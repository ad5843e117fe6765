"""A real JupyterLab on a free loopback port, and Debian's Chromium to look at it.

Where there is no Chromium the tests are skipped and say so; under CI they fail instead. D2L_CHROMIUM names another.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from .lab import Lab, Watched

ROOT = Path(__file__).parents[2]
SCREENSHOTS = ROOT / "build" / "screenshots"  # kept by CI, not by git
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("D2L_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        message = "no Chromium on PATH: browser tests need it (Debian: apt-get install chromium)"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def start_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Lab]]:
    """start_lab(**page_config) -> a JupyterLab of its own: folders, port and token."""
    started: list[subprocess.Popen[bytes]] = []

    def start(**page_config: object) -> Lab:
        folder = tmp_path_factory.mktemp("lab")
        process, lab = _start(folder, page_config)
        started.append(process)
        start.labs.append(lab)
        return lab

    start.labs = []
    yield start
    for process in started:
        _end(process)


@pytest.fixture(scope="session")
def lab(start_lab: Callable[..., Lab]) -> Lab:
    return start_lab()


@pytest.fixture
def page(browser, start_lab, request: pytest.FixtureRequest) -> Iterator[Watched]:
    """A fresh page whose requests and console are watched; a screenshot of its end is kept in build/screenshots."""
    with watched(browser) as page:
        yield page
        page.keep(SCREENSHOTS / f"{request.node.name}.png")
    for lab in start_lab.labs:
        lab.end_kernels()
    page.check()


@contextmanager
def watched(browser) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    context.set_default_timeout(20_000)
    yield Watched(context.new_page())
    context.close()


@pytest.fixture(scope="module")
def shared_page(browser, start_lab) -> Iterator[Watched]:
    """One page for several tests of a file, so that they share a kernel: a kernel's first launch takes seconds."""
    with watched(browser) as page:
        yield page
    for lab in start_lab.labs:
        lab.end_kernels()


def _start(folder: Path, page_config: dict[str, object]) -> tuple[subprocess.Popen[bytes], Lab]:
    names = ("root", "config", "runtime", "data", "ipython", "settings", "workspaces")
    paths = {name: folder / name for name in names}
    for path in paths.values():
        path.mkdir()
    quiet = {"news_url": None, "check_for_updates_class": "jupyterlab.NeverCheckForUpdate"}
    config = {
        "LabApp": quiet | {"extension_manager": "readonly"},
        "LanguageServerManager": {"autodetect": False},
        "ServerApp": {"port": 0, "ip": "127.0.0.1", "open_browser": False, "root_dir": str(paths["root"])},
    }
    (paths["config"] / "jupyter_server_config.json").write_text(json.dumps(config))
    (paths["config"] / "labconfig").mkdir()
    (paths["config"] / "labconfig" / "page_config.json").write_text(json.dumps(page_config))
    for plugin, setting in {
        "@jupyterlab/apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
        # Otherwise cells outside the window are not in the page.
        "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
        "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
    }.items():
        file = paths["settings"] / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(setting))
    token = secrets.token_hex(16)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTER", "IPYTHON"))} | {
        "JUPYTER_CONFIG_DIR": str(paths["config"]),
        "JUPYTER_RUNTIME_DIR": str(paths["runtime"]),
        "JUPYTER_DATA_DIR": str(paths["data"]),
        "IPYTHONDIR": str(paths["ipython"]),
        "JUPYTERLAB_SETTINGS_DIR": str(paths["settings"]),
        "JUPYTERLAB_WORKSPACES_DIR": str(paths["workspaces"]),
        "JUPYTER_TOKEN": token,
    }
    log = (folder / "log").open("wb")
    process = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", "--allow-root"], cwd=paths["root"], env=environment,
        stdin=subprocess.DEVNULL, stdout=log, stderr=log,
    )  # fmt: skip
    log.close()
    deadline = time.monotonic() + 60
    # Port 0 lets the system choose; the server writes which one it got.
    info = paths["runtime"] / f"jpserver-{process.pid}.json"
    while not (info.exists() and info.stat().st_size):
        if process.poll() is not None or time.monotonic() > deadline:
            _end(process)
            pytest.fail(f"JupyterLab did not start:\n{(folder / 'log').read_text()[-3000:]}")
        time.sleep(0.1)
    url = json.loads(info.read_text())["url"]
    return process, Lab(url, token, paths["root"], process.pid, folder / "log")


def _end(process: subprocess.Popen[bytes]) -> None:
    """The server and what it started, by pid."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(family, 5)
    for child in alive:
        child.kill()
