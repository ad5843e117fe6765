"""A step behind a link, on plans made by hand; and the table's own arithmetic."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from matplotlib.text import Text

from chapter19_9 import cockpit_view, signature, theory
from chapter19_9.choosing.cost import Moment
from chapter19_9.compare import Row
from chapter19_9.one_picture import figure, text
from chapter19_9.slow_link import FREE, Asked, Plan, crossover
from d2l_utils.grid import Cell, grid, judged
from d2l_utils.link import Link
from d2l_utils.transformer import TransformerConfig

MB = 1_000_000


def asked(size, at, by, name="all_gather", real=0.0):
    """On two ranks an all-gather sends half of ``size``."""
    return Asked(name, 2 * size, 2, at, by, real)


def test_what_is_waited_for_adds_up_and_what_is_not_hides():
    link = Link(1 * MB)  # a second for each megabyte
    assert Plan(3.0, ()).seconds(link) == 3.0
    assert Plan(3.0, (asked(MB, 1.0, 1.0), asked(2 * MB, 2.0, 2.0))).seconds(link) == pytest.approx(6.0)
    assert Plan(3.0, (asked(MB, 1.0, 2.5),)).seconds(link) == pytest.approx(3.0)
    assert Plan(3.0, (asked(MB, 1.0, 1.5),)).seconds(link) == pytest.approx(3.5)


def test_one_thing_at_a_time_is_on_the_link():
    link = Link(1 * MB)
    # the second waits for the first: both end 2 s after the launch, 0.5 s after the end of computing
    both = Plan(3.0, (asked(MB, 1.5, 3.0), asked(MB, 1.5, 3.0)))
    assert both.seconds(link) == pytest.approx(3.5)
    assert both.charged(link) == pytest.approx(2.0)
    # a wait moves what is asked for later
    assert Plan(2.0, (asked(MB, 0.0, 0.0), asked(MB, 1.0, 1.5))).seconds(link) == pytest.approx(3.5)


def test_latency_counts_for_each_hop_and_a_free_link_costs_what_was_real():
    plan = Plan(1.0, (asked(MB, 0.5, 0.5, "all_reduce", real=0.25),))
    assert plan.seconds(FREE) == pytest.approx(1.25)
    assert plan.seconds(Link(math.inf, 0.1)) == pytest.approx(1.45)


def test_the_backend_too_does_one_thing_at_a_time():
    two = (asked(MB, 0.0, 1.0, real=0.5), asked(MB, 0.0, 1.0, real=0.5))
    assert Plan(1.0, two).seconds(FREE) == pytest.approx(1.0), "both hide"
    assert Plan(0.4, tuple(replace(one, by=0.4) for one in two)).seconds(FREE) == pytest.approx(1.0)
    # a slow link brings them apart: the backend has done the first when the second comes
    assert Plan(1.0, two).seconds(Link(1 * MB)) == pytest.approx(2.5)


def test_the_crossover_is_where_both_take_as_long():
    computes, sends = Plan(2.0, (asked(MB, 1.0, 1.0),)), Plan(1.0, (asked(3 * MB, 0.5, 0.5),))
    bandwidth = crossover(computes, sends)
    assert bandwidth == pytest.approx(2 * MB, rel=1e-3)
    assert computes.seconds(Link(bandwidth)) == pytest.approx(sends.seconds(Link(bandwidth)), rel=1e-2)
    assert crossover(sends, computes) is None
    assert crossover(computes, computes) is None


def test_ddp_fills_a_bucket_of_1_mib_first_and_of_25_mib_then():
    small, large = TransformerConfig(layers=2, width=32), TransformerConfig(layers=6, width=96)
    assert signature.launches("ddp", theory.shapes(small), 4) == {"all_reduce": 1}
    assert signature.launches("ddp", theory.shapes(large), 4) == {"all_reduce": 2}
    assert signature.launches("fsdp2", theory.shapes(large), 4) == {"all_gather": 14, "reduce_scatter": 7}
    assert signature.launches("ddp", theory.shapes(large), 1) == {}
    sizes = [30 * 2**20, 100, 20 * 2**20, 6 * 2**20, 2**20]  # from the last: 1 MiB, then 26 MiB, then the rest
    assert signature._buckets(sizes) == 3


def test_a_cell_says_how_far_off_it_is():
    assert judged(10, 10).mark == "exact"
    assert judged(10.4, 10).mark == "close"
    assert judged(11, 10).mark == "off"
    assert judged(1, 0).mark == "off"
    assert judged(1, None) == Cell("1")
    with pytest.raises(ValueError, match="mark is 'fine'"):
        Cell("1", mark="fine")
    with pytest.raises(ValueError, match=r"rows\['a'\] has 1 cells; there are 2 columns"):
        grid({"a": [Cell("1")]}, ["x", "y"])


def row(**changes):
    same = theory.States(4000, 4000, 8000)
    values = {
        "strategy": "ddp", "world_size": 2, "held": same, "held_formula": same, "between": same,
        "between_formula": same, "sent": 4000.0, "sent_formula": 4000.0, "counts": {"all_reduce": 1},
        "counts_formula": {"all_reduce": 1}, "on_gloo": 4000.0, "wire": 4100.0, "peak": 20_000, "at_peak": same,
        "losses": (5.0,), "loss_error": 0.0, "agree": True, "seconds": None,
    }  # fmt: skip
    return Row(**(values | changes))


def test_what_no_socket_carried_is_said_in_words_and_is_never_0():
    pictures = {wire: figure([row(wire=wire)]) for wire in (4100.0, None)}
    texts = {wire: " ".join(t.get_text() for t in picture.findobj(Text)) for wire, picture in pictures.items()}
    note = "No bytes on the wire: no socket carried them, or nothing counts them here"
    assert note in " ".join(texts[None].split())
    assert note not in " ".join(texts[4100.0].split())
    said = "on the wire: not carried by sockets"
    flown = {wire: SimpleNamespace(sent=4e6, sent_formula=4e6, wire=wire) for wire in (4.1e6, None)}
    for wire, one in flown.items():
        picture = cockpit_view._sent(one, None, {}, {"now": one})
        shown = [t.get_text() for t in picture.findobj(Text)]
        assert (said in " ".join(shown)) == (wire is None)
        assert ("on the wire" in shown) == (wire is not None)


def test_what_no_step_was_looked_into_for_is_left_open():
    """DeepSpeed's rows."""
    row_ = row(strategy="deepspeed3", between=None, between_formula=None, at_peak=None, counts_formula=None)
    assert figure([row_]).alt.startswith("[figure: table")
    assert text([row_]).splitlines()[1].split()[7:9] == ["-", "-"]


def test_the_text_tells_equal_from_not():
    head, line = text([row()]).splitlines()
    assert head.split()[:4] == ["strategy", "P", "G", "O"]
    assert line == "ddp       4.0 =  4.0 =  8.0 =      4.0 =      4.0 =  4.0 =  1 AR ="
    off = text([row(sent=6000.0, held=theory.States(4000, 4004, 8000), counts={})]).splitlines()[1]
    assert "6.0 not 4.0: +50.0%" in off and "4.0 not 4.0: +0.1%" in off and "none not 1 AR" in off
    assert figure(
        [row(), row(strategy="single", world_size=1)], {"ddp": Moment("loss", 4000, 4000, 8000, loss=3500)}
    ).alt.startswith("[figure: table")
