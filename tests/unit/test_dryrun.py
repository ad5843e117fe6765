"""The dry run without ranks: the paper's table, the structure of eighty blocks, models by their counts, bad input."""

import json
import os
import subprocess
import sys
import threading
import time

import psutil
import pytest

from chapter19_9 import theory
from chapter19_9.choosing.presets import PRESETS, own
from chapter19_9.dryrun import DryRun, Plan, dry_run
from chapter19_9.dryrun.__main__ import main
from chapter19_9.dryrun.process import Bar
from chapter19_9.dryrun.view import curve_of
from d2l_utils.launching.errors import LaunchError, LaunchStopped, LaunchTimeout
from d2l_utils.transformer import TransformerConfig

# 7.5 billion parameters to 4 digits, in few large blocks: the number of blocks is nothing to the table
PAPER = own(layers=4, width=12288, heads=96, length=2048, vocabulary=18426)
PRINTED = {4: (52.5, 41.3, 30.0), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.9)}  # GB of stages 1, 2 and 3
SMALL = own(layers=2, width=64, heads=2, length=32, vocabulary=100)


def step(plan):
    """In this process's own child, which starts from a Python that has torch already."""
    return dry_run(plan, output="quiet")


@pytest.fixture(scope="module")
def many():
    """{name: found} of several dry runs in one process, since most of the time of one goes into imports."""
    plans = {f"{stage}-{n}": Plan(PAPER, stage, n) for stage in ("zero1", "zero2", "zero3") for n in (4, 16, 64)}
    thin = {"width": 64, "heads": 2, "length": 8, "vocabulary": 100}
    plans["eighty"] = Plan(own(layers=80, **thin), "fsdp2", 8, options={"root": None})
    plans["alike"] = Plan(own(layers=3, **thin), "fsdp2", 8)
    plans["tied"] = Plan(own(layers=2, **thin), "fsdp2", 8, checkpointing=True)
    plans["gated"] = Plan(own(layers=2, kv_heads=1, gated=True, positions=False, tied=False, **thin), "zero3", 8)
    code = (
        "import json, sys\n"
        "from chapter19_9.dryrun import DryRun, Plan\n"
        "from chapter19_9.dryrun.step import pretend\n"
        "for name, fields in json.load(sys.stdin).items():\n"
        "    plan = Plan.from_json(fields)\n"
        "    found = DryRun(plan, *pretend(plan, lambda *_: None), 0.0, 0.0, 0)\n"
        "    print(json.dumps([name, found.to_json()]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        input=json.dumps({name: plan.to_json() for name, plan in plans.items()}),
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    return {name: DryRun.from_json(value) for name, value in found.items()}


@pytest.mark.parametrize("n", [4, 16, 64])
def test_it_is_the_zero_papers_table(many, n):
    assert PAPER.parameters == pytest.approx(7.5e9, rel=1e-4)
    row = next(row for row in theory.paper_table((7.5e9,), (n,)))
    found = [many[f"{stage}-{n}"].rest.total / 1e9 for stage in ("zero1", "zero2", "zero3")]
    assert found == pytest.approx(row[2:], rel=1e-4)
    assert found == pytest.approx(PRINTED[n], abs=0.051)


def test_eighty_blocks_and_the_root_are_81_units(many):
    """Each is gathered for forward and again for backward, where the default keeps the root; each is reduced once."""
    units = 80 + 1
    default = many["eighty"]
    assert default.count("all_gather") == 2 * units - 1 == 161
    assert default.count("reduce_scatter") == units == 81
    assert (default.count("all_gather", "forward"), default.count("all_gather", "backward")) == (81, 80)
    alike = many["alike"]  # the root like the blocks
    assert (alike.count("all_gather"), alike.count("reduce_scatter")) == (2 * 4, 4)


@pytest.mark.parametrize("name", ["tied", "gated"])
def test_a_model_has_the_parameters_that_it_counts(many, name):
    found = many[name]
    assert found.parameters == found.plan.sizes.parameters
    assert found.rest.parameters == pytest.approx(4 * found.parameters / 8, rel=0.02)


def test_every_preset_has_the_parameters_that_it_counts():
    import torch

    from chapter19_9.dryrun.models import Shaped

    for name, model in PRESETS.items():
        with torch.device("meta"):
            built = Shaped(model)
        assert sum(parameter.numel() for parameter in built.parameters()) == model.parameters, name


def test_what_a_rank_sends_is_the_textbooks(many):
    """zero2: (N-1)/N (M_G + M_P), of 16 bits each."""
    found = many["zero2-16"]
    assert found.sent == pytest.approx(theory.volume("zero2", theory.mixed_precision_states(PAPER.parameters), 16))


@pytest.fixture(scope="module")
def found():
    return step(Plan(SMALL, "fsdp2", 4))


def test_a_value_that_goes_through_json_and_a_picture(found):
    assert DryRun.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert found.peak.total == max(moment.total for moment in found.curve)
    assert found.to_json()["peak"]["name"] == found.peak.name
    assert list(dict.fromkeys(moment.phase for moment in found.curve)) == ["forward", "backward", "optimizer"]
    words = str(found)
    assert f"in {found.peak.name}" in words and "6 all_gather" in words and "3 reduce_scatter" in words
    assert "at the peak" in curve_of(found).get_suptitle()


def test_it_leaves_no_process_and_loads_no_torch_here():
    code = (
        "import sys, psutil\n"
        "from chapter19_9.dryrun import Plan, dry_run\n"
        "from chapter19_9.choosing.presets import own\n"
        "found = dry_run(Plan(own(layers=1, width=8, heads=1, length=4, vocabulary=8), 'zero3', 2), output='quiet')\n"
        "print(found.peak.total > 0, 'torch' in sys.modules, psutil.Process().children(recursive=True))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["True", "False", "[]"]
    assert not done.stderr


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "llama-8b"}, "model is 'llama-8b': it must be one of gpt2"),
        ({"model": 7}, "model is 7: it must be one of gpt2"),
        ({"strategy": "ddp"}, "DDP reduces in C\\+\\+.*Allowed: fsdp2.*theory or chapter19_9.choosing.advisor"),
        ({"strategy": "fsdp1"}, "strategy is 'fsdp1': its code was not made for fake tensors"),
        ({"strategy": "fsdp3"}, "strategy is 'fsdp3': it must be one of"),
        ({"world_size": 0}, "world_size is 0: it must be a whole number of at least 1"),
        ({"world_size": True}, "world_size is True"),
        ({"world_size": 2**20}, "world_size is 1048576: it must be a whole number from 1 to 131072"),
        ({"rank": 1024}, "rank is 1024: it must be below world_size, which is 1024"),
        ({"micro_batch": 0}, "micro_batch is 0"),
        ({"model": "gpt2", "length": 2048}, "length is 2048: it must be at most 1024"),
        ({"precision": "fp16"}, "precision is 'fp16': it must be one of bf16, fp32"),
        ({"checkpointing": 1}, "checkpointing is 1: it must be True or False"),
        ({"options": None}, "options is None: it must be a dict"),
        ({"options": {"rooot": None}}, "options has 'rooot': a dry run of 'fsdp2' has no such setting; allowed: resh"),
        ({"options": {"root": 1}}, "options\\['root'\\] is 1: it must be one of 'same', True, False, None"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_process(fields, message):
    with pytest.raises(ValueError, match=message):
        Plan(**fields)


def test_the_way_to_run_it_is_checked_too():
    with pytest.raises(TypeError, match="plan is a str: it must be a Plan"):
        dry_run("gpt2")
    with pytest.raises(ValueError, match="output is 'loud'"):
        dry_run(Plan(SMALL), output="loud")
    with pytest.raises(ValueError, match="timeout is 0"):
        dry_run(Plan(SMALL), timeout=0)


def none_left():
    mine = psutil.Process().children(recursive=True)
    return not [process for process in mine if "chapter19_9.dryrun.worker" in " ".join(process.cmdline())]


def test_it_can_be_stopped_and_has_a_limit():
    with pytest.raises(LaunchTimeout, match=r"timed out after 0\.3 s: the dry run was at"):
        dry_run(Plan(SMALL), output="quiet", timeout=0.3)
    stop = threading.Event()
    threading.Timer(0.3, stop.set).start()
    with pytest.raises(LaunchStopped, match="stopped"):
        dry_run(Plan(SMALL), output="quiet", stop=stop)
    assert none_left()


def test_its_process_sees_no_gpu_whatever_the_reader_s_sees(monkeypatch):
    def started(command, *, env, **_):
        raise OSError(f"{env['CUDA_VISIBLE_DEVICES']!r} {env['HIP_VISIBLE_DEVICES']!r}")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(subprocess, "Popen", started)
    with pytest.raises(OSError, match=r"^'' ''$"):
        dry_run(Plan("gpt2", "fsdp2"), output="quiet")


def test_an_interrupt_ends_it(monkeypatch):
    def interrupted(bar, what, done):
        raise KeyboardInterrupt

    monkeypatch.setattr(Bar, "show", interrupted)
    with pytest.raises(KeyboardInterrupt):
        dry_run(Plan(SMALL))
    assert none_left()


def test_the_end_of_the_one_that_waits_ends_it():
    code = (
        "from chapter19_9.dryrun import Plan, dry_run\n"
        "from chapter19_9.dryrun.process import Bar\n"
        "import os, psutil, signal\n"
        "def show(bar, what, done):\n"
        "    print(*[process.pid for process in psutil.Process().children()], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "Bar.show = show\n"
        "dry_run(Plan('llama-65b'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    (pid,) = map(int, done.stdout.split())
    deadline = time.monotonic() + 20
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "still there"
        time.sleep(0.05)


def test_its_own_error_comes_through(monkeypatch):
    """A config that Plan lets through and torch does not."""
    monkeypatch.setattr(Plan, "to_json", lambda self: {"model": "gpt2", "strategy": "ddp"})
    with pytest.raises(LaunchError, match="the dry run failed: ValueError: strategy is 'ddp'"):
        dry_run(Plan(SMALL), output="quiet")


def test_the_bar_is_gone_at_the_end(capsys):
    bar = Bar(sys.stdout)
    bar.show("forward of block 3", 0.5)
    bar.clear()
    shown = capsys.readouterr().out
    assert "[############............] forward of block 3" in shown
    assert shown.endswith("\r") and not shown.rsplit("\r", 2)[1].strip()


def test_in_a_terminal(capsys):
    main(["--layers=1", "--width=8", "--heads=1", "--vocabulary=8", "--length=4", "--strategy=zero3", "--json"])
    found = DryRun.from_json(json.loads(capsys.readouterr().out))
    assert (found.plan.strategy, found.plan.world_size, found.count("reduce_scatter")) == ("zero3", 1024, 2)
    with pytest.raises(SystemExit):
        main(["--strategy=ddp"])
    assert "DDP reduces in C++" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--layers=1"])
    assert "width is missing: own sizes go together" in capsys.readouterr().err


def test_the_toy_is_itself():
    plan = Plan(TransformerConfig(layers=2, tied=True), "zero2", 2)
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan and plan.is_toy
    assert os.path.basename(plan.sizes.source) == "d2l_utils.transformer"
