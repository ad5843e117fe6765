"""The collective explorer's exchange on real ranks, against arithmetic done here."""

import pytest

from d2l_utils import LaunchError, launch
from d2l_utils.collectives import FINDINGS, NAMES, exchange


def expected(collective: str, world: int) -> list[list[int] | None]:
    before = [[10 * (rank + 1) + chunk for chunk in range(world)] for rank in range(world)]
    total = [sum(column) for column in zip(*before, strict=True)]
    return {
        "broadcast": [before[0]] * world,
        "reduce": [total] + [None] * (world - 1),
        "all_reduce": [total] * world,
        "all_gather": [[row[0] for row in before]] * world,
        "reduce_scatter": [[value] for value in total],
    }[collective]


@pytest.mark.parametrize("collective", NAMES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_collective_does_what_the_figure_says(collective, world_size):
    run = launch(exchange, world_size=world_size, output="quiet", collective=collective)
    assert [result["after"] for result in run.results] == expected(collective, world_size)
    assert [result["before"][0] for result in run.results] == [10 * (r + 1) for r in range(world_size)]
    assert [text for text in run.output if text] == [], "ranks say nothing, warnings included (H03)"


def test_every_collective_has_a_finding():
    assert set(FINDINGS) == set(NAMES)


def test_an_unknown_collective_is_named_by_every_rank():
    with pytest.raises(LaunchError, match="collective is 'gossip'; allowed: broadcast, reduce, all_reduce"):
        launch(exchange, world_size=2, output="quiet", collective="gossip")
