"""What lessons show of the package's code: the code itself, and short differences without docstrings."""

from chapter19_9 import reading
from chapter19_9.strategies import ddp, fsdp1, fsdp2, zero2, zero3


def one(a):
    """Says one thing."""

    return a + 1


def other(a):
    """Says
    another.
    """
    b = 2  # kept

    return a + b


class Holder:
    """Only a docstring."""

    def method(self):
        """And one."""
        return 1


def test_a_difference_is_that_of_the_code_alone():
    assert reading.diff(one, other).splitlines() == [
        "-def one(a):",
        "-    return a + 1",
        "+def other(a):",
        "+    b = 2  # kept",
        "+",
        "+    return a + b",
    ]
    assert reading.diff(one, one) == ""


def test_a_method_is_shown_as_if_it_stood_alone():
    assert reading.source(Holder.method).startswith("def method(self):\n    ")
    assert reading.diff(Holder.method, Holder.method) == ""


def test_the_differences_of_the_lessons_are_short():
    for before, after in ((zero2, zero3), (ddp, fsdp1), (fsdp1, fsdp2)):
        assert 0 < len(reading.diff(before.shard, after.shard).splitlines()) < 40
