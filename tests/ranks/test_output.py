"""Output as it comes: whole, labelled, in time, bounded; and what each rank said, afterwards."""

import io
import os
import re
import subprocess
import sys
import time

import pytest

from d2l_utils import launch
from d2l_utils.launching import output


def counts(lines, pause=0.0):
    import sys
    import time

    import torch.distributed as dist

    for n in range(lines):
        sys.stdout.write(f"r{dist.get_rank()}:")
        sys.stdout.flush()
        sys.stdout.write(f"{n}\n")
        sys.stdout.flush()
        time.sleep(pause)


def test_L14_lines_stay_whole_and_labelled(way, capsys):
    run = launch(counts, world_size=4, lines=200)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[rank")]
    for rank in range(4):
        own = [line for line in printed if line.startswith(f"[rank {rank}]")]
        assert own == [f"[rank {rank}] r{rank}:{n}" for n in range(200)]
        assert run.output[rank] == "".join(f"r{rank}:{n}\n" for n in range(200))
    assert len(printed) == 800


def test_ordered_view_is_rank_by_rank(capsys):
    launch(counts, world_size=3, lines=3, output="ordered")
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[rank")]
    assert printed == [f"[rank {rank}] r{rank}:{n}" for rank in range(3) for n in range(3)]


def test_quiet_says_nothing(capsys):
    run = launch(counts, world_size=2, lines=3, output="quiet")
    assert capsys.readouterr().out == "" and run.output[1] == "r1:0\nr1:1\nr1:2\n"


class Clock(io.StringIO):
    """Standard output that remembers when each text came."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def write(self, text):
        self.seen.append((time.monotonic(), text))
        return super().write(text)


def test_L15_output_comes_while_the_ranks_run(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(sys, "stdout", clock)
    launch(counts, world_size=1, lines=8, pause=0.25)
    times = {int(m[1]): t for t, text in clock.seen for m in re.finditer(r"r0:(\d+)", text)}
    assert sorted(times) == list(range(8))
    assert times[7] - times[0] > 1.0, "all lines came together, at the end"


def chatty(lines):
    for n in range(lines):
        print(n)


def test_L32_a_flood_keeps_head_and_tail(capsys):
    run = launch(chatty, world_size=2, lines=20_000)
    printed = capsys.readouterr().out.splitlines()
    lines = [line for line in printed if line.startswith("[rank")]
    assert len(lines) == output.HEAD + output.TAIL
    note = [line for line in printed if "lines left out" in line]
    assert note == [f"... {40_000 - len(lines)} lines left out; every line is in {run.logs[0].parent}/rank*.log ..."]
    assert lines[-1].endswith(" 19999")
    assert all(log.read_text().splitlines() == [str(n) for n in range(20_000)] for log in run.logs)


def bar():
    import sys
    import time

    for n in range(50):
        sys.stderr.write(f"\r{n + 1}/50")
        sys.stderr.flush()
        time.sleep(0.01)
    sys.stderr.write("\n")
    print("after")


def test_L32_a_progress_bar_is_one_line(capsys):
    launch(bar, world_size=1)
    captured = capsys.readouterr()
    shown = [part for part in captured.out.splitlines() if part.strip()]
    whole = [line for line in shown if line.endswith(("50/50", "after"))]
    assert [line.rpartition("\r")[2] for line in whole][-2:] == ["[rank 0] 50/50", "[rank 0] after"]
    assert captured.out.count("[rank 0]") < 15  # at most five states a second, not fifty lines
    assert captured.err == ""


def mixed():
    import warnings

    import torch
    import torch.distributed as dist

    x = torch.ones(4)
    out = torch.empty(4 * dist.get_world_size())
    dist.all_gather_into_tensor(out, x)  # torch 2.14 announces its renaming with a FutureWarning
    warnings.warn("mine", stacklevel=1)
    return out.sum().item()


def test_N01_H03_no_noise_of_torch_and_nothing_on_stderr(way, capfd):
    run = launch(mixed, world_size=2)
    captured = capfd.readouterr()
    assert captured.err == ""
    assert all("FutureWarning" not in text and "OMP_NUM_THREADS" not in text for text in run.output)
    assert all("mine" in text for text in run.output), "a reader's own warning is not noise"


def chinese(text):
    print(f"秩: {text}")  # 注释
    return text


@pytest.mark.parametrize("locale", [{}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_L26_any_text_any_folder(tmp_path, monkeypatch, capsys, locale):
    folder = tmp_path / "第 19 章" / "a b ü"
    folder.mkdir(parents=True)
    for name, value in locale.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)
    (folder / "脚本.py").write_text("# 注释\nprint('αβ 中文')\n", encoding="utf-8")
    assert launch(chinese, world_size=2, text="显存").results == ["显存", "显存"]
    assert "[rank 1] 秩: 显存" in capsys.readouterr().out
    assert launch("脚本.py", world_size=2).output == ["αβ 中文\n"] * 2


def test_L26_a_kernel_that_takes_its_locale_for_ascii(tmp_path):
    """What it cannot encode itself it must still write, start and name: a script, and a function with a Chinese name."""
    program = "from d2l_utils import launch\ndef 名字(): return '文'\n"
    program += "print(ascii([launch(what, world_size=1).results for what in ('脚本.py', 名字)]))\n"
    (tmp_path / "脚本.py").write_text("print('αβ')\n", encoding="utf-8")
    (tmp_path / "run.py").write_text(program, encoding="utf-8")
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TMPDIR": str(tmp_path)}
    command = [sys.executable, "run.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, encoding="utf-8", errors="replace")
    assert done.stdout.splitlines()[-1:] == [ascii([[None], ["文"]])], done.stderr
