"""Formulas of sharded strategies: the textbook's against the paper's own table, the exact ones against counting by hand."""

import pytest

from chapter19_9.strategies import STRATEGIES, get
from chapter19_9.theory import (
    Shape,
    States,
    adamw_states,
    exact_memory,
    exact_volume,
    memory,
    mixed_precision_states,
    paper_table,
    shapes,
    volume,
)
from d2l_utils.transformer import TransformerConfig

CONFIG = TransformerConfig(layers=2, width=18, heads=3, length=7, vocabulary=10)
SHARDED = [name for name, strategy in STRATEGIES.items() if strategy.optimizer == "sharded"]
# 3 x 5 and 5 in block "a", 2 in the root, 7 frozen in the root
SMALL = [
    Shape("a.w", (5, 3), True, "a"),
    Shape("a.b", (5,), True, "a"),
    Shape("n", (2,), True, ""),
    Shape("f", (7,), False, ""),
]


@pytest.mark.parametrize(
    ("n", "stages"),
    [(4, (52.5, 41.25, 30.0)), (16, (35.6, 21.6, 7.5)), (64, (31.4, 16.6, 1.88)), (1024, (30.1, 15.1, 0.12))],
)
def test_the_papers_table(n, stages):
    """7.5 billion parameters, GB as printed in Table 1 of arXiv 1910.02054."""
    (row,) = paper_table((7.5e9,), (n,))
    assert row[:2] == (7.5e9, n)
    assert row[2:] == pytest.approx(stages, abs=0.05)
    assert memory("ddp", mixed_precision_states(7.5e9), n).total == 120e9


def test_a_trillion_parameters_on_1024_ranks():
    assert paper_table()[-1][0] == 1e12
    assert paper_table()[-1][-1] == pytest.approx(15.6, abs=0.05)
    assert len(paper_table()) == 18


@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("n", [1, 2, 16])
def test_textbook_volume_in_units_of_the_parameters(name, n):
    states, ring = States(100.0, 100.0, 200.0), (n - 1) / n * 100
    times = {"zero3": 3, "fsdp2": 3, "fsdp1": 3, "zero_redundancy": 3}.get(name, 2)
    assert volume(name, states, n) == pytest.approx(times * ring)


def test_accumulation_multiplies_only_what_every_pass_sends():
    states = States(100.0, 100.0, 200.0)
    once = {name: volume(name, states, 2) for name in STRATEGIES}
    four = {name: volume(name, states, 2, passes=4) for name in STRATEGIES}
    assert four["ddp"] == once["ddp"]
    assert four["zero1"] == once["zero1"] == 100
    assert four["zero2"] == 4 * 50 + 50
    assert four["zero3"] == 4 * once["zero3"]
    assert four["fsdp2"] == 4 * 100 + 50
    with pytest.raises(ValueError, match="passes is 0: it must be a whole number of at least 1"):
        volume("ddp", states, 2, passes=0)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_exact_is_the_textbook_where_everything_divides(name, n):
    """Sizes that are multiples of 64; only the step counts of AdamW differ, 4 bytes a tensor."""
    config = TransformerConfig(layers=2, width=64, heads=4, length=64)
    model, states, tensors = shapes(config), adamw_states(config), len(shapes(config))
    for rank in exact_memory(name, model, n):
        textbook = memory(name, states, n)
        assert rank.parameters == textbook.parameters
        assert rank.gradients == textbook.gradients
        slack = 4 * tensors if name != "zero_redundancy" else 0.2 * textbook.optimizer
        assert rank.optimizer == pytest.approx(textbook.optimizer, abs=slack)
    if name == "fsdp1":  # the root is not gathered again
        root = 4 * sum(shape.numel for shape in model if not shape.unit)
        assert exact_volume(name, model, n) == pytest.approx(volume(name, states, n) - (n - 1) / n * root)
    else:
        assert exact_volume(name, model, n) == pytest.approx(volume(name, states, n))


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 64, 1000])
def test_every_element_is_trained_by_exactly_one_rank(name, n):
    for model in (shapes(CONFIG), SMALL):
        ranks = exact_memory(name, model, n)
        assert len(ranks) == n
        trained = sum(shape.numel for shape in model if shape.trained)
        copies = n if get(name).optimizer == "replicated" else 1
        padding = sum(rank.optimizer for rank in ranks) - 8 * copies * trained
        # what is left: step counts, and for flat shards padding of less than one element a rank and vector
        assert 0 <= padding <= n * 12 * len(model)
        assert sum(rank.parameters for rank in ranks) >= 4 * sum(shape.numel for shape in model)


def test_by_hand_at_three_ranks():
    """Trained: block 15 + 5 = 20 -> shards of 7; root 2 -> shards of 1."""
    assert exact_memory("zero1", SMALL, 3)[2] == States(4 * (21 + 3 + 7), 4 * (21 + 3), 8 * 8 + 2 * 4)
    assert exact_memory("zero2", SMALL, 3)[2] == States(4 * (21 + 3 + 7), 4 * 8, 8 * 8 + 2 * 4)
    # the frozen 7 are in shards of 3
    assert exact_memory("zero3", SMALL, 3)[2] == States(4 * (7 + 1 + 3), 4 * 8, 8 * 8 + 2 * 4)
    # rows 2, 2, 1 of 5 x 3 and of 5; 1, 1, 0 of 2; the frozen 7 in chunks of 3. Stored as if all were the first
    fsdp2 = exact_memory("fsdp2", SMALL, 3)
    assert {(rank.parameters, rank.gradients) for rank in fsdp2} == {(4 * (6 + 2 + 1 + 3), 4 * (6 + 2 + 1))}
    assert [rank.optimizer for rank in fsdp2] == [8 * 9 + 12, 8 * 9 + 12, 8 * 4 + 12]
    # block: 15, then 5 from element 16 on: 21 -> 7 each; root: 2, then 7 from element 4 on: 11 -> 4 each
    fsdp1 = exact_memory("fsdp1", SMALL, 3)
    assert {(rank.parameters, rank.gradients) for rank in fsdp1} == {(4 * (7 + 4), 4 * (7 + 4))}
    assert [rank.optimizer for rank in fsdp1] == [8 * (7 + 2) + 8, 8 * 7 + 4, 8 * (1 + 5) + 8]
    # the largest first, to the rank with the fewest: 15 | 7 (frozen) | 5, 2
    zero = exact_memory("zero_redundancy", SMALL, 3)
    assert [rank.optimizer for rank in zero] == [8 * 15 + 4, 0, 8 * 7 + 8]
    assert exact_volume("zero1", SMALL, 3) == pytest.approx(2 / 3 * 4 * (24 + 24))
    assert exact_volume("zero3", SMALL, 3) == pytest.approx(2 / 3 * 4 * (2 * (21 + 3 + 9) + 21 + 3))
    assert exact_volume("fsdp1", SMALL, 3) == pytest.approx(2 / 3 * 4 * ((21 + 12) + 21 + (21 + 12)))


def test_deepspeeds_layouts_by_hand_at_three_ranks():
    """Stages 1 and 2: 15 + 5 + 2 = 22 in one vector of 24, shards of 8. w ends at 15, b at 20, n at 22."""
    for name in ("deepspeed1", "deepspeed2"):
        ranks = exact_memory(name, SMALL, 3)
        assert {(rank.parameters, rank.optimizer) for rank in ranks} == {(4 * (24 + 7), 12 * 8 + 4)}
        # whole gradients of w | w, b | b, n, and 2 of padding
        assert [rank.gradients for rank in ranks] == [4 * 15, 4 * 20, 4 * (7 + 2)]
        assert exact_volume(name, SMALL, 3) == pytest.approx(2 / 3 * 4 * (2 * 22 + 24))
    assert exact_volume("deepspeed1", SMALL, 3, passes=4) == exact_volume("deepspeed1", SMALL, 3)
    assert exact_volume("deepspeed2", SMALL, 3, passes=4) == pytest.approx(2 / 3 * 4 * (4 * 2 * 22 + 24))
    norm = 4 / 3 * 8  # a float64, all-reduced
    # each tensor by itself: shards of 5, 2, 1, and 3 of the frozen one
    assert exact_memory("deepspeed3", SMALL, 3)[1] == States(4 * (5 + 2 + 1 + 3), 4 * 8, 12 * 8 + 4)
    assert exact_volume("deepspeed3", SMALL, 3) == pytest.approx(2 / 3 * 4 * (24 + 9 + 24 + 24) + norm)
    twice = [Shape("a.w", (5, 3), True, "a", uses=2)]
    assert exact_volume("deepspeed3", twice, 3) == pytest.approx(2 / 3 * 4 * 5 * 15 + norm)


def test_tied_weights_are_one_shape_of_the_root():
    tied = shapes(TransformerConfig(layers=1, width=8, heads=2, length=4, tied=True, frozen=True))
    assert "head.weight" not in {shape.name for shape in tied}
    assert [shape.trained for shape in tied if shape.name == "positions.weight"] == [False]
    assert {shape.unit for shape in tied} == {"", "blocks.0"}
    assert {shape.name: shape.uses for shape in tied if shape.uses > 1} == {"tokens.weight": 2}
