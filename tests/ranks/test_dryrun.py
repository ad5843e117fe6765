"""The dry run beside what real ranks hold, launch and reach: the same code, with data and without.

gloo takes memory of its own inside a collective, into which it receives. Where a step is at its fullest while it does,
real ranks stand above the dry run by as much as that; on the chapter's own model they are at their fullest in the loss.
Other ranks may let go of a collective's buffer late, so what counts is the rank with the least.
"""

from collections import Counter

import pytest

from chapter19_9.dryrun.plan import ALLOWED
from d2l_utils import launch
from d2l_utils.transformer import TransformerConfig
from tests.ranks.dryrun_functions import dry_steps, steps

TOY = TransformerConfig()
# nothing divides; one weight in two places; one that is not trained
ODD = TransformerConfig(layers=2, width=18, heads=3, length=13, tied=True, frozen=True)
BATCH = 8
CASES = [(TOY, {}), (ODD, {}), (TOY, {"precision": "bf16"}), (TOY, {"checkpointing": True})]


@pytest.fixture(scope="module", params=[2, 4])
def both(request):
    """{(strategy, number of the case): (real ranks, pretended ranks)} at one world size."""
    n = request.param
    cases = [(name, *case) for name in ALLOWED for case in (CASES if n == 2 else CASES[:2])]
    real = launch(steps, world_size=n, cases=cases, batch=BATCH, output="quiet", timeout=200).results
    dry = launch(dry_steps, world_size=1, cases=cases, n=n, batch=BATCH, output="quiet", timeout=200).results[0]
    found = {}
    for at, case in enumerate(cases):
        key = case[0], next(i for i, each in enumerate(CASES) if each == case[1:])
        found[key] = [rank[at] for rank in real], dry[at]
    return n, found


@pytest.mark.parametrize("name", ALLOWED)
def test_the_ranks_hold_and_launch_the_same_to_the_byte(both, name):
    for number, (real, dry) in ((number, pair) for (strategy, number), pair in both[1].items() if strategy == name):
        for rank, (dry_held, _, dry_sent) in dry.items():
            held, _, sent = real[int(rank)]
            assert held == dry_held, (number, rank)
            assert Counter({(what, size): count for what, size, count in sent}) == Counter(
                {(what, size): count for what, size, count in dry_sent}
            ), (number, rank)


@pytest.mark.parametrize("name", ALLOWED)
def test_the_peak_is_within_2_percent(both, name):
    for (strategy, number), (real, dry) in both[1].items():
        if strategy == name and CASES[number][0] is TOY:
            least = min(peak for _, peak, _ in real)
            assert dry["0"][1] == pytest.approx(least, rel=0.02), number
