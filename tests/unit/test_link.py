"""A link's time from bytes and hops, and what is refused."""

import math

import pytest

from d2l_utils.link import Link
from d2l_utils.traffic import hops_on_ring


def test_bytes_over_bandwidth_and_a_latency_for_each_hop():
    link = Link(bandwidth=1e6, latency=1e-3)
    assert link.seconds("all_reduce", 4_000_000, 4) == pytest.approx(6.0 + 6e-3)
    halves = link.seconds("reduce_scatter", 4_000_000, 4) + link.seconds("all_gather", 4_000_000, 4)
    assert halves == pytest.approx(link.seconds("all_reduce", 4_000_000, 4))
    assert link.seconds("recv", 100, 2) == 0
    assert Link(math.inf, 1e-3).seconds("send", 100, 2) == 1e-3
    assert hops_on_ring("unheard_of", 4) is None
    with pytest.raises(ValueError, match="name is 'unheard_of'"):
        link.seconds("unheard_of", 1, 2)


@pytest.mark.parametrize("bad", [0, -1, "1e6", None, True, math.nan])
def test_a_bandwidth_must_be_above_0(bad):
    with pytest.raises(ValueError, match=r"bandwidth is .*: it must be a number above 0"):
        Link(bad)


@pytest.mark.parametrize("bad", [-1e-9, "0", None, True, math.nan, math.inf])
def test_a_latency_must_be_at_least_0(bad):
    with pytest.raises(ValueError, match=r"latency is .*: it must be a number at least 0"):
        Link(1e6, bad)
