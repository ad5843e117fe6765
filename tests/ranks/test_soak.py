"""A short soak: launches that end in ways drawn at random, and FSDP trainings. `make soak` is the long one."""

import random

from tests import soak

SEED = 1036  # draws twelve different endings


def test_random_endings_leave_nothing_and_say_the_truth():
    assert soak.endings(12, random.Random(SEED)) == 0


def test_fsdp_runs_are_not_reported_as_failed_after_they_delivered():
    assert sum(soak.trainings(family, 3, random.Random(SEED)) for family in soak.FSDP) == 0
