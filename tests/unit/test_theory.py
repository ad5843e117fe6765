"""Formulas against models and optimizers that really exist, and against the printed numbers of the literature."""

import subprocess
import sys

import pytest

from chapter19_9.strategies import Exchange, Strategy
from chapter19_9.theory import States, adamw_states, combinations, global_batch, memory, nearest, volume
from chapter19_9.train import train
from d2l_utils.transformer import TransformerConfig

CONFIGS = [
    TransformerConfig(),
    TransformerConfig(layers=2, width=32, heads=2, length=16, tied=True),
    TransformerConfig(layers=1, width=16, heads=2, length=8, frozen=True),
    TransformerConfig(layers=3, width=24, heads=3, length=8, vocabulary=50, tied=True, frozen=True),
]


@pytest.mark.parametrize("config", CONFIGS[:3])  # the last has too small a vocabulary for the text
def test_adamw_states_are_what_training_really_holds(config):
    held = train("single", config, steps=2, batch=2).held
    assert adamw_states(config) == States(held.parameters, held.gradients, held.optimizer)


@pytest.mark.parametrize("config", CONFIGS)
def test_element_size_scales_all_but_the_step_counts(config):
    full, half = adamw_states(config), adamw_states(config, element=2)
    assert (full.parameters, full.gradients) == (2 * half.parameters, 2 * half.gradients)
    counts = 2 * half.optimizer - full.optimizer
    assert counts > 0
    assert counts % 4 == 0
    assert full.total == full.parameters + full.gradients + full.optimizer


def test_a_known_size():
    # 12 w^2 + 10 w in each of 4 blocks, w = 64; embeddings (256 + 64) w; norm 2 w; output 256 w
    count = 4 * (12 * 64**2 + 10 * 64) + 320 * 64 + 2 * 64 + 256 * 64
    tensors = 4 * 11 + 2 + 2 + 1
    assert adamw_states(TransformerConfig()) == States(4 * count, 4 * count, 8 * count + 4 * tensors)


@pytest.mark.parametrize("n", [1, 2, 4, 64, 1024])
def test_ddp_holds_everything_on_every_rank_and_sends_twice_the_gradients(n):
    states = States(100.0, 80.0, 160.0)
    assert memory("ddp", states, n) == states
    assert volume("ddp", states, n) == pytest.approx(2 * (n - 1) / n * 80)
    assert volume("single", states, n) == 0


def test_volume_follows_the_registry_not_the_name():
    made_up = Strategy(
        "x", "x", "", "", communicates=(Exchange("all_gather", "parameters", "forward"),) * 2
        + (Exchange("reduce_scatter", "gradients", "backward"),),
    )  # fmt: skip
    assert volume(made_up, States(100, 80, 0), 4) == pytest.approx(0.75 * (2 * 100 + 80))


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ValueError, match="strategy is 'nope': it must be one of single, ddp"):
        volume("nope", States(1, 1, 1), 2)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2"])
def test_a_bad_number_of_ranks_is_refused(bad):
    for formula in (memory, volume):
        with pytest.raises(ValueError, match=r"n is .*: it must be a whole number of at least 1"):
            formula("ddp", States(1, 1, 1), bad)


def test_the_global_batch_in_both_directions():
    assert global_batch(4, 8, 16) == 512
    assert global_batch(2, 16, 8) == 256
    ways = combinations(512, 8)
    assert all(way.size == 512 and way.ranks == 8 for way in ways)
    micros = [way.micro for way in ways]
    assert micros == [64, 32, 16, 8, 4, 2, 1]
    assert combinations(512, 6) == []
    assert nearest(512, 6) == (510, 516)


def test_reading_the_formulas_needs_no_torch():
    code = "import sys; from chapter19_9.theory import States, volume; volume('ddp', States(1, 1, 1), 4)\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
