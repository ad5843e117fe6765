"""On real ranks: what goes in as an argument, what comes back, and what a script of the reader's own says of its arguments."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from d2l_utils import LaunchError, launch


def returns(count, weight):
    assert type(count) is int and type(weight[0]) is float
    tied = torch.nn.Parameter(torch.arange(4.0))
    return {"z": 1 + 2j, "wide": torch.ones(1).expand(30_000, 10_000), "tied": (tied, tied.view(2, 2))}


def test_complex_numbers_expanded_and_tied_tensors_come_back():
    """X24 and X42: a 4-byte tensor came with 1.2 GB, tied ones as two, and numpy's scalars were refused."""
    run = launch(returns, world_size=2, output="quiet", count=np.int64(3), weight=[np.float32(0.5)])
    assert all((run.folder / f"rank{rank}.result").stat().st_size < 20_000 for rank in range(2))
    for result in run.results:
        one, other = result["tied"]
        one.fill_(7)
        assert result["z"] == 1 + 2j and result["wide"].shape == (30_000, 10_000) and other.tolist() == [[7, 7], [7, 7]]


def refused():
    return [3, object()]


def test_what_cannot_travel_is_told_without_the_launchers_own_lines():
    with pytest.raises(LaunchError, match=r"rank 0 failed: TypeError: the result\[1\] is a object") as caught:
        launch(refused, world_size=2, output="quiet")
    assert "results.py" not in caught.value.message and "worker.py" not in caught.value.message


SCRIPT = """
import argparse, sys
parser = argparse.ArgumentParser()
parser.add_argument("--verbose", action="store_true")
parser.add_argument("--n", type=int, default=0)
parser.add_argument("--role")
parser.add_argument("--fail", type=int)
options = parser.parse_args()
print(options.n, options.role)
sys.exit(options.fail)
"""


def test_a_script_that_refuses_its_arguments_says_so_in_the_error(tmp_path):
    """X42: the error was `sys.exit(2)` alone."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with pytest.raises(
        LaunchError,
        match=r"rank 0 failed: sys\.exit\(2\); the last line that it printed is: train\.py: error: .*--verb",
    ):
        launch(script, world_size=2, output="quiet", verbose=True)
    with pytest.raises(LaunchError, match=r"rank 0 failed: sys\.exit\(3\); the last line that it printed is: 1 None"):
        launch(script, world_size=2, output="quiet", n=1, fail=3)


def test_a_scripts_own_arguments_are_no_options_of_torchruns(tmp_path):
    """Older Pythons took --n for --nnodes or --node-rank, and no rank started."""
    (tmp_path / "train.py").write_text(SCRIPT)
    run = launch(tmp_path / "train.py", world_size=1, output="quiet", n=np.int64(3), role="worker")
    assert run.output == ["3 worker\n"]


def test_a_cold_rank_has_its_arguments_and_the_newest_text_of_a_module(tmp_path, monkeypatch):
    """X32, the cold way: the module was rewritten in the second of the bytecode that the notebook had written."""
    module = tmp_path / "answers_cold_x32.py"
    module.write_text("answer = 1")
    os.utime(module, ns=(0, 1_700_000_000_001_000_000))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    subprocess.run([sys.executable, "-c", "import answers_cold_x32"], cwd=tmp_path, check=True)
    (own,) = (tmp_path / "__pycache__").glob("*.pyc")
    os.utime(own, ns=(0, 1_700_000_000_100_000_000))
    module.write_text("answer = 2")
    os.utime(module, ns=(0, 1_700_000_000_200_000_000))
    monkeypatch.setenv("D2L_LAUNCH", "cold")
    (tmp_path / "asks.py").write_text("import sys, answers_cold_x32\nprint(answers_cold_x32.answer, sys.argv[1:])")
    assert launch(tmp_path / "asks.py", world_size=1, output="quiet", n=3).output == ["2 ['--n=3']\n"]
