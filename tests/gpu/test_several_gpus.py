"""Two GPUs or more: every strategy beside one process, communication beside the kernels themselves, and how launches end."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chapter19_9 import theory
from chapter19_9.strategies import STRATEGIES
from d2l_utils import LaunchError, launch
from d2l_utils.events import hidden_and_exposed
from d2l_utils.notebooks.builder import read_notebook
from d2l_utils.notebooks.form import tags
from d2l_utils.transformer import TransformerConfig
from tests.gpu import rank_functions as ranks
from tests.gpu import raw_traces

ROOT = Path(__file__).parents[2]
CONFIG = TransformerConfig(layers=6, width=256, length=128)
SETTINGS = {"config": CONFIG, "batch": 24, "steps": 4}
RECORDED = {"record_step": 3, "allocations": True}
SMALL = {"config": TransformerConfig(layers=2, width=64, length=32), "batch": 24}
BY_HAND = ("zero1", "zero2", "zero3")
LAUNCH_GAP = 50e3  # nanoseconds between kernels that a rank does not wait in, but launches


@pytest.fixture(params=[2, 4, 8])
def n(request, gpus):
    """Numbers of ranks for which there are GPUs."""
    if gpus.count < request.param:
        pytest.skip(f"{gpus.count} GPU{'s' * (gpus.count != 1)} here, {request.param} needed")
    return request.param


@pytest.fixture(scope="module")
def reference(gpus):
    """The losses of one process on one GPU."""
    made = launch(ranks.traced, world_size=1, device=gpus.type, output="quiet", strategy="single", **SETTINGS)
    return made.results[0]["result"].losses


def test_each_rank_has_a_gpu_of_its_own(gpus, run, n):
    found = run(ranks.device_of_this_rank, n)
    assert not any(rank["bad fork"] for rank in found)
    assert [rank["local rank"] for rank in found] == list(range(n))
    if gpus.type != "cpu":
        assert [rank["device"] for rank in found] == [f"{gpus.type}:{rank}" for rank in range(n)]
        assert [rank["current"] for rank in found] == list(range(n))


def test_the_default_group_takes_cpu_tensors_too(run, n):
    assert run(ranks.cpu_tensors, n) == [{"CPU": n, "DDP": True, "objects": list(range(n)), "device": n}] * n


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "single"])
def test_a_strategy_on_gpus(gpus, run, keep, reference, n, strategy):
    """Losses of one process, bytes of the formulas, one kernel for each launch, and times of the kernels themselves."""
    options = {"options": {"reduce_scatter": "backend"}} if strategy in BY_HAND else {}
    traced = run(ranks.traced, n, strategy=strategy, seed_by_rank=True, **options, **SETTINGS, **RECORDED)
    keep(strategy, traced)
    results, shapes = [rank["result"] for rank in traced], theory.shapes(CONFIG)
    for result in results:
        assert result.losses == pytest.approx(reference, rel=1e-5)
        assert result.agree
    assert [states(result.held) for result in results] == list(map(states, theory.exact_memory(strategy, shapes, n)))
    collectives = [event for result in results for event in result.recording.events if event.kind == "collective"]
    sent = sum(event.sent_bytes or 0 for event in collectives) / n
    assert sent == pytest.approx(theory.exact_volume(strategy, shapes, n))
    assert all(event.end is not None for event in collectives)
    if gpus.type != "cpu":
        for rank in traced:
            times_are_the_kernels(rank)


def states(bytes_held):
    return bytes_held.parameters, bytes_held.gradients, bytes_held.optimizer


def times_are_the_kernels(rank):
    """What the chapter says of hidden and total communication lies between what the kernels say without and with the gaps
    between kernels that are only launched one after the other."""
    kernels = raw_traces.kernels(rank["rows"])
    communication = [row for row in kernels if raw_traces.is_communication(row)]
    computing = raw_traces.spans(row for row in kernels if not raw_traces.is_communication(row))
    assert len(communication) == raw_traces.launches(rank["rows"])
    busy = raw_traces.spans(communication)
    total = raw_traces.covered(busy)
    least = raw_traces.overlap(busy, computing)
    most = raw_traces.overlap(busy, raw_traces.closed(computing, LAUNCH_GAP))
    seen = hidden_and_exposed(rank["result"].recording.events)
    slack = 0.05 * total + 50e3
    assert 1e9 * seen.total == pytest.approx(total, abs=slack)
    assert least - slack <= 1e9 * seen.hidden <= most + slack


def test_zero3_with_prefetch_trains_as_without(run, n):
    settings = {"strategy": "zero3", "steps": 30, "config": CONFIG, "batch": 24}
    with_and_without = [
        run(ranks.traced, n, options={"reduce_scatter": "backend", "prefetch": prefetch}, **settings)[0][
            "result"
        ].losses
        for prefetch in (True, False)
    ]
    assert with_and_without[0] == pytest.approx(with_and_without[1], abs=1e-4)


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "single"])
def test_the_lifecycle_of_a_step_breaks_no_rule(run, n, strategy):
    from chapter19_9.lifecycle import frames

    assert frames(run(ranks.frames_of, n, strategy=strategy, **SMALL)).frames


@pytest.mark.parametrize("how", ["ring", "direct"])
def test_reduce_scatter_by_hand_gives_the_backends(run, n, how):
    assert max(run(ranks.scattered, n, how=how)) < 1e-4


@pytest.mark.parametrize(
    ("how", "words", "most"),
    [
        ("raise", "rank 1 failed: ValueError: boom", 25),
        ("return", "rank 1 returned before the others", 25),
        ("stay", "rank 1 never joined", 40),
    ],
)
def test_a_rank_that_does_not_join_is_named(run, n, how, words, most):
    begun = time.monotonic()
    with pytest.raises(LaunchError) as caught:
        run(ranks.ending, n, how=how, timeout=10)
    assert words in caught.value.message.splitlines()[0]
    assert time.monotonic() - begun < most


RUN = "\n\n\nif __name__ == '__main__':\n    from d2l_utils.launching.worker import run_rank\n\n    run_rank(program)\n"


@pytest.mark.parametrize("lesson", ["03", "08", "09"])
def test_a_lessons_program_runs_under_plain_torchrun(tmp_path, n, lesson):
    """As on a cluster: nothing of `launch` is there."""
    (notebook,) = (ROOT / "notebooks").glob(f"{lesson}-*.ipynb")
    (source,) = [cell.source for cell in read_notebook(notebook).cells if "full-program" in tags(cell)]
    script = tmp_path / "program.py"
    script.write_text(source + RUN, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", str(script)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"[rank {rank}] " in done.stdout for rank in range(n))
