"""What can be launched, what it may do to its process, and how its results travel."""

from d2l_utils import launch


def test_a_script_of_the_readers_own(tmp_path, capsys):
    script = tmp_path / "mine.py"
    script.write_text(
        "import argparse, torch, torch.distributed as dist\np = argparse.ArgumentParser()\np.add_argument('--learning-rate', type=float)\n"
        "a = p.parse_args()\ndist.init_process_group('gloo')\nprint(dist.get_rank(), a.learning_rate)\n"
        "dist.barrier()\ndist.destroy_process_group()\n"
    )
    run = launch(script, world_size=2, learning_rate=0.5, output="ordered")
    assert run.output == ["0 0.5\n", "1 0.5\n"] and run.results == [None, None] and run.script == script


def own_group():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.barrier()  # gloo: who leaves at once disturbs those that still connect
    dist.destroy_process_group()
    return rank


def test_a_function_that_makes_its_own_group_is_left_alone(way):
    assert launch(own_group, world_size=2).results == [0, 1]


def values():
    import numpy
    import torch

    return {
        "t": torch.arange(6).reshape(2, 3)[:, 1],
        "n": numpy.ones(2),
        "l": [1, 2.5, None, "x", (True,)],
        3: b"b",
    }


def test_results_travel():
    import torch

    (value,) = launch(values, world_size=1).results
    assert torch.equal(value["t"], torch.tensor([1, 4])) and value["t"].untyped_storage().nbytes() == 16
    assert value["n"].tolist() == [1.0, 1.0] and value["l"] == [1, 2.5, None, "x", (True,)] and value[3] == b"b"


def test_a_script_that_ends_in_sys_exit_0_is_done_and_finds_what_lies_beside_it(tmp_path, way):
    (tmp_path / "beside.py").write_text("answer = 42\n")
    script = tmp_path / "main.py"
    script.write_text("import sys\nfrom beside import answer\nprint(answer)\nsys.exit()\n")
    run = launch(script, world_size=2, output="quiet")
    assert run.results == [None, None] and run.output == ["42\n"] * 2


def random():
    """Named like a module of Python's own."""
    import random

    import torch.distributed as dist

    return dist.get_rank() + random.choice([0])


def test_a_function_named_like_a_module(tmp_path):
    run = launch(random, world_size=2)
    assert run.results == [0, 1] and run.script.name == "run_random.py"


def run(value):
    """Named like the launcher's own."""
    return value


def test_a_function_named_run():
    assert launch(run, world_size=1, value=7).results == [7]


def own_environment():
    import os

    rank = os.environ["RANK"]
    for name in ("RANK", "WORLD_SIZE", "D2L_RUN_FOLDER"):
        os.environ.pop(name)
    return rank


def test_a_function_may_change_the_environment():
    assert launch(own_environment, world_size=2).results == ["0", "1"]


def odd_tensors():
    import torch

    return [
        torch.zeros(2, dtype=torch.uint16),
        torch.ones(1, dtype=torch.bfloat16),
        torch.zeros(1, dtype=torch.float8_e4m3fn),
    ]


def test_tensors_of_any_type_travel():
    import torch

    (found,) = launch(odd_tensors, world_size=1).results
    assert [t.dtype for t in found] == [torch.uint16, torch.bfloat16, torch.float8_e4m3fn]


def leaves_a_daemon():
    import os
    import time

    if os.fork() == 0:
        os.setsid()
        time.sleep(300)
        os._exit(0)
    return 1


def test_a_forked_child_that_stays_does_not_hold_the_launch():
    assert launch(leaves_a_daemon, world_size=2, timeout=100).seconds < 60
