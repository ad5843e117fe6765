"""In a real kernel: the stop button, a restart, a kernel or test runner that is killed outright, cells' sources, two at once."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from jupyter_client.manager import KernelManager

from tests.ranks.leftovers import none_left, processes_of

SETUP = """
from d2l_utils import launch
from d2l_utils.launching import folders
print(folders.base())
def endless():
    import torch, torch.distributed as dist
    x = torch.ones(1)
    while True:
        dist.all_reduce(x)
def own(number, seconds=0):
    import time, torch, torch.distributed as dist
    time.sleep(seconds)
    x = torch.tensor([float(number)])
    dist.all_reduce(x)
    return x.item()
"""


class Kernel:
    """A kernel as JupyterLab starts it. `run` gives (text, error name, error text) of a cell."""

    def __init__(self, **env):
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env={**os.environ, **env}, extra_arguments=["--IPKernelApp.log_level=40"])
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def start(self, code):
        return self.client.execute(textwrap.dedent(code))

    def finish(self, request, timeout=60):
        text, error, deadline = "", (None, ""), time.monotonic() + timeout
        while time.monotonic() < deadline:
            message = self.client.get_iopub_msg(timeout=timeout)
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                assert content["name"] == "stdout", f"on stderr: {content['text']}"
                text += content["text"]
            elif message["msg_type"] == "error":
                error = (content["ename"], "\n".join(content["traceback"]))
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return text, *error
        raise TimeoutError(text)

    def run(self, code, timeout=60):
        return self.finish(self.start(code), timeout)

    def end(self):
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()


@pytest.fixture
def kernel():
    opened = []

    def open_kernel(**env):
        opened.append(Kernel(**env))
        return opened[-1]

    yield open_kernel
    for each in opened:
        each.end()


def wait_for_ranks(folder, number, seconds=40):
    deadline = time.monotonic() + seconds
    while len(list(Path(folder).glob("run-*/rank*.pid"))) < number and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    assert processes_of(folder)


def helpers_left(folder, seconds=5):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        left = [p for p in psutil.process_iter(["cmdline"]) if folder in (p.info["cmdline"] or [])]
        if not left:
            return []
        time.sleep(0.05)
    return left


@pytest.mark.parametrize("way", ["warm", "cold"])
def test_L02_stop_button(kernel, way):
    k = kernel(D2L_LAUNCH=way)
    folder = k.run(SETUP)[0].strip()
    request = k.start("launch(endless, world_size=2)")
    wait_for_ranks(folder, 2)
    begun = time.monotonic()
    k.manager.interrupt_kernel()
    _, name, _ = k.finish(request)
    assert name == "KeyboardInterrupt" and time.monotonic() - begun < 6
    assert not none_left(folder)
    text, name, _ = k.run("print(launch(own, world_size=2, number=1).results)")
    assert name is None and "[2.0, 2.0]" in text


def gone(folder, seconds=5):
    """Whether the folder goes within some seconds."""
    deadline = time.monotonic() + seconds
    while Path(folder).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not Path(folder).exists()


def test_restart_and_kill_leave_nothing(kernel):
    for end in ("restart", "kill"):
        k = kernel()
        folder = k.run(SETUP)[0].strip()
        k.start("launch(endless, world_size=2)")
        wait_for_ranks(folder, 2)
        if end == "restart":
            k.manager.restart_kernel(now=True)
        else:
            os.kill(k.manager.provisioner.process.pid, signal.SIGKILL)
        assert not none_left(folder)
        assert gone(folder), "temporary files stayed"
        assert not helpers_left(folder), "the helper outlived its kernel"


@pytest.mark.parametrize("way", ["warm", "cold"])
def test_a_killed_test_runner_leaves_no_rank(tmp_path, way):
    script = tmp_path / "runner.py"
    script.write_text(
        SETUP + "\nif __name__ == '__main__':\n    print(flush=True)\n    launch(endless, world_size=2)\n"
    )
    env = {**os.environ, "D2L_LAUNCH": way}
    runner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=env)
    folder = runner.stdout.readline().strip()
    wait_for_ranks(folder, 2)
    runner.kill()
    runner.wait()
    runner.stdout.close()
    assert not none_left(folder)
    assert gone(folder), "temporary files stayed"


@pytest.mark.parametrize("ready", [False, True])
def test_a_process_killed_before_its_first_launch_leaves_no_folder(tmp_path, ready):
    code = "from d2l_utils.launching import folders, helper; import select; h = helper.warm_helper()\n"
    code += "select.select([h.control], [], [])\n" * ready
    code += "print(folders.base(), flush=True); input()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    with process:
        folder = process.stdout.readline().strip()
        process.kill()
    assert gone(folder, 30)


def test_error_in_a_cell_is_the_readers_own(kernel):
    k = kernel()
    k.run(SETUP)
    _, name, text = k.run("def bad():\n    raise ValueError('mine')\nlaunch(bad, world_size=2)")
    assert name == "LaunchError" and text.startswith("LaunchError: rank ")
    assert "raise ValueError('mine')" in text and "launcher.py" not in text


def test_L31_current_source_of_cells(kernel):
    k = kernel()
    k.run(SETUP)
    k.run(
        "import math\nclass Box:\n    def __init__(self, n):\n        self.n = n\ndef f(n):\n    return Box(n).n + math.floor(0.5)"
    )
    _, name, text = k.run("launch(f, world_size=1, n=1)")
    assert name == "TypeError" and "uses=[Box]" in text
    assert "[1]" in k.run("print(launch(f, uses=[Box], world_size=1, n=1).results)")[0]
    k.run("def f(n):\n    return Box(n).n + 10\nclass Box:\n    def __init__(self, n):\n        self.n = 2 * n")
    assert "[12]" in k.run("print(launch(f, uses=[Box], world_size=1, n=1).results)")[0]
    _, name, text = k.run("limit = 3\ndef g():\n    return limit\nlaunch(g, world_size=1)")
    assert name == "TypeError" and "'limit'" in text and "keyword argument" in text
    assert text.startswith("TypeError: g reads the notebook's variable") and "launcher.py" not in text


def test_L01_two_notebooks_at_once(kernel):
    k, other = kernel(MASTER_PORT="29500", MASTER_ADDR="10.255.255.1", RANK="7", WORLD_SIZE="9"), kernel()
    k.run(SETUP), other.run(SETUP)
    first = k.start("print(launch(own, world_size=2, number=1, seconds=1).results)")
    second = other.start("print(launch(own, world_size=2, number=100, seconds=1).results)")
    assert "[2.0, 2.0]" in k.finish(first)[0] and "[200.0, 200.0]" in other.finish(second)[0]


def test_edited_module_is_never_stale(kernel, tmp_path):
    module = tmp_path / "edited_lesson.py"
    module.write_text("def answer():\n    return 1\n")
    k = kernel()
    k.run(
        SETUP
        + f"\nimport sys; sys.path.insert(0, {str(tmp_path)!r}); sys.dont_write_bytecode = True\nimport edited_lesson"
    )
    assert "[1, 1]" in k.run("print(launch(edited_lesson.answer, world_size=2).results)")[0]
    module.write_text("def answer():\n    return 2222\n")
    assert "[2222, 2222]" in k.run("print(launch(edited_lesson.answer, world_size=2).results)")[0]


def test_L18_threads_of_the_kernel_do_not_matter(kernel):
    k = kernel()
    k.run(SETUP)
    text, name, _ = k.run(
        "import torch\na = torch.randn(512, 512)\n(a @ a).sum()\nprint(launch(own, world_size=2, number=1).results)"
    )
    assert name is None and "[2.0, 2.0]" in text


def test_L22_ranks_use_the_kernels_python(kernel):
    k = kernel(PATH="/usr/bin:/bin")
    k.run(SETUP)
    k.run("def prefix():\n    import sys\n    return sys.prefix")
    text = k.run("import sys; print(set(launch(prefix, world_size=2).results) == {sys.prefix})")[0]
    assert "True" in text
