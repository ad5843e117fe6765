"""What the tests do in JupyterLab, in the words of someone who uses it."""

import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import nbformat
import psutil


@dataclass
class Lab:
    url: str
    token: str
    root: Path
    pid: int
    log: Path

    def write(self, name: str, *cells: str, outputs: list | None = None) -> Path:
        """A notebook of these code cells; `outputs` are stored with the last one."""
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        if outputs is not None:
            notebook.cells[-1].outputs = outputs
            notebook.cells[-1].execution_count = 1
        nbformat.write(notebook, self.root / name)
        return self.root / name

    def end_kernels(self) -> None:
        """As the reader's "Shut Down All Kernels" does."""
        for session in json.loads(self._ask("GET", "api/sessions")):
            self._ask("DELETE", f"api/sessions/{session['id']}")

    def _ask(self, method: str, path: str) -> bytes:
        headers = {"Authorization": f"token {self.token}"}
        with urlopen(Request(self.url + path, method=method, headers=headers), timeout=30) as answer:
            return answer.read()

    def family(self) -> list[psutil.Process]:
        """The server, its kernels and all they started."""
        server = psutil.Process(self.pid)
        return [server, *server.children(recursive=True)]


@dataclass
class Watched:
    """A page, the requests that left this machine, and the errors on its console."""

    page: object
    foreign: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    benign: dict[str, str] = field(default_factory=dict)  # part of a message: why a test expects it

    def __post_init__(self) -> None:
        self.page.on("request", lambda request: self._asked(request.url))
        self.page.on("websocket", lambda socket: self._asked(socket.url))
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.errors.append(f"uncaught: {error}"))

    def keep(self, shot: Path) -> None:
        """A screenshot with the last cell in view."""
        shot.parent.mkdir(parents=True, exist_ok=True)
        self.page.locator(".jp-Cell").last.scroll_into_view_if_needed()
        self.page.screenshot(path=shot)

    def check(self) -> None:
        """Nothing left this machine and nothing went wrong on the console."""
        assert self.foreign == [], "the page asked for addresses outside this machine"
        assert self.errors == [], "the console shows errors"

    def open(self, lab: Lab, name: str) -> None:
        # Without reset the page would also open what earlier tests left open.
        self.page.goto(f"{lab.url}lab/tree/{name}?token={lab.token}&reset")
        self.page.locator(".jp-Notebook .jp-Cell").first.wait_for()
        # Run All on a kernel that is still starting asks which kernel to use.
        self.page.locator("#jp-main-statusbar").get_by_text("| Idle").wait_for()

    def run_all(self, timeout: float = 180) -> None:
        """Run > Run All Cells, and wait until every code cell has its number."""
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        self.wait_for_cells(timeout)

    def run_cell(self, at: int, timeout: float = 60) -> None:
        """Run one code cell, counted from 0, and wait for its number."""
        cell = self.page.locator(".jp-Notebook .jp-CodeCell").nth(at)
        before = cell.locator(".jp-InputPrompt").inner_text()
        cell.locator(".jp-InputPrompt").click()
        self.page.keyboard.press("Control+Enter")
        self.until(lambda: cell.locator(".jp-InputPrompt").inner_text() != before, timeout, "the cell starts")
        self.wait_for_cells(timeout)

    def wait_for_cells(self, timeout: float = 180) -> None:
        prompts = self.page.locator(".jp-Notebook .jp-CodeCell .jp-InputPrompt")
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            # A cell whose input is folded away shows no prompt; the kernel is idle when the last one has run.
            texts = [text.strip() for text in prompts.all_inner_texts() if text.strip()]
            if texts and all(re.fullmatch(r"\[\d+\]:", text) for text in texts) and self._idle():
                return
            self.page.wait_for_timeout(100)
        raise AssertionError(f"cells still run after {timeout} s: {texts}\n{self.failures()}")

    def _idle(self) -> bool:
        return self.page.locator("#jp-main-statusbar").get_by_text("| Idle").is_visible()

    def failures(self) -> list[str]:
        """The text of error outputs."""
        return self.page.locator('[data-mime-type="application/vnd.jupyter.error"]').all_inner_texts()

    def sources(self, scope: str = ".jp-OutputArea") -> list[str]:
        """What the images of outputs show, each as its address or data."""
        return self.page.locator(f"{scope} img").evaluate_all("images => images.map(image => image.src)")

    def until(self, true: object, seconds: float = 60, why: str = "") -> None:
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, f"not within {seconds} s: {why}"
            self.page.wait_for_timeout(50)

    def _asked(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob", "file") and parts.hostname != "127.0.0.1":
            self.foreign.append(url)

    def _said(self, message: object) -> None:
        if message.type == "error" and not any(known in message.text for known in self.benign):
            self.errors.append(f"{message.text} ({message.location.get('url', '')})")
