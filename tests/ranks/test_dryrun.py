"""The dry run beside what real ranks hold, launch and reach: the same code, with data and without.

gloo takes memory of its own inside a collective, into which it receives. Where a step is at its fullest while it does,
real ranks stand above the dry run by as much as that; on the chapter's own model they are at their fullest in the loss.
Other ranks may let go of a collective's buffer late, so what counts is the rank with the least.
"""

from collections import Counter
from functools import cache, partial

import pytest

from chapter19_9.dryrun.plan import ALLOWED
from d2l_utils import launch
from d2l_utils.transformer import TransformerConfig
from tests.ranks.dryrun_functions import dry_steps, steps
from tests.ranks.tries import holds

TOY = TransformerConfig()
# nothing divides; one weight in two places; one that is not trained
ODD = TransformerConfig(layers=2, width=18, heads=3, length=13, tied=True, frozen=True)
BATCH = 8
CASES = [(TOY, {}), (ODD, {}), (TOY, {"precision": "bf16"}), (TOY, {"checkpointing": True})]


def cases(n):
    return [(name, *case) for name in ALLOWED for case in (CASES if n == 2 else CASES[:2])]


@cache
def measured(n, attempt):
    return launch(steps, world_size=n, cases=cases(n), batch=BATCH, output="quiet", timeout=200).results


@cache
def pretended(n):
    return launch(dry_steps, world_size=1, cases=cases(n), n=n, batch=BATCH, output="quiet", timeout=200).results[0]


def both(n, name, attempt=0):
    """(model, arguments, real ranks, pretended ranks) of each case of this strategy."""
    for at, (strategy, model, arguments) in enumerate(cases(n)):
        if strategy == name:
            yield model, arguments, [rank[at] for rank in measured(n, attempt)], pretended(n)[at]


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("n", [2, 4])
def test_the_ranks_hold_and_launch_the_same_to_the_byte(n, name):
    for *case, real, dry in both(n, name):
        for rank, (dry_held, _, dry_sent) in dry.items():
            held, _, sent = real[int(rank)]
            assert held == dry_held, (case, rank)
            assert Counter({(what, size): count for what, size, count in sent}) == Counter(
                {(what, size): count for what, size, count in dry_sent}
            ), (case, rank)


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.parametrize("n", [2, 4])
def test_the_peak_is_within_2_percent(n, name):
    def as_reached(found):
        for model, arguments, real, dry in found:
            if model is TOY:
                assert dry["0"][1] == pytest.approx(min(peak for _, peak, _ in real), rel=0.02), arguments

    holds(as_reached, partial(both, n, name))
