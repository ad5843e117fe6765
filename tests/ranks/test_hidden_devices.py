"""Tests that launch keep the GPUs hidden: their numbers are the CPU's."""

import os

from d2l_utils.device import choose


def test_launches_of_tests_are_on_the_cpu_because_the_suite_says_so() -> None:
    assert (os.environ["D2L_DEVICE"], os.environ["CUDA_VISIBLE_DEVICES"]) == ("cpu", "")
    assert choose(1).reason.startswith("D2L_DEVICE=cpu")
