"""Every strategy on N ranks against one process on the whole batch: losses, norms, gradients, weights; and what it
holds and sends against the exact formulas, to the byte.

First weights differ by rank, so a missing broadcast fails. Tolerance: 1e-5 relative; float32 sums in another
order differ by some 1e-7.
"""

from functools import cache

import pytest

from chapter19_9 import theory
from chapter19_9.compare import compare, table
from chapter19_9.strategies import STRATEGIES, get
from chapter19_9.train import train
from d2l_utils import LaunchError, launch
from d2l_utils.transformer import TransformerConfig
from tests.ranks import strategy_functions as ranks
from tests.ranks.tries import holds

EVEN = TransformerConfig(layers=2, width=32, heads=2, length=16)
# nothing divides by 4 or 8; one weight in two places; one that is not trained
ODD = TransformerConfig(layers=2, width=18, heads=3, length=13, tied=True, frozen=True)
CONFIGS = [EVEN, ODD]
NAMES = [name for name in STRATEGIES if name not in ("single", "ddp")]
BY_HAND = ["zero1", "zero2", "zero3"]
STEPS, BATCH = 3, 24
TOLERANCE = 1e-5


def run(function, world_size, **arguments):
    return launch(function, world_size=world_size, output="quiet", timeout=200, **arguments).results


@cache
def trained(n):
    """All strategies at one world size: a launch, used by several tests. (results by rank, what they printed)"""
    done = launch(
        ranks.train_all, world_size=n, output="quiet", timeout=250, strategies=NAMES, configs=CONFIGS if n < 8 else [ODD],
        steps=STEPS, batch=BATCH, seed_by_rank=True, weights=n < 8, record_step=STEPS - 1,
    )  # fmt: skip
    return done.results, done.output


@cache
def reference(config, steps=STEPS, batch=BATCH, **settings):
    """One process, plain model, whole batch. Launched: a rank finds torch warm, which this process is not."""
    settings.update(steps=steps, batch=batch, weights=True)
    return run(ranks.train_all, 1, strategies=["single"], configs=[config], **settings)[0]["single"][0]


def distance(mine, other):
    """Of two dicts of tensors as one vector each, relative to the second's norm; of the names that both have."""
    apart = sum((mine[name].double() - other[name].double()).square().sum() for name in mine.keys() & other.keys())
    return (apart / sum(tensor.double().square().sum() for tensor in other.values())).sqrt().item()


def differs(result, expected, tolerance=TOLERANCE):
    """What is not the same mathematics, by name; empty when all is."""
    wrong = [] if result.losses == pytest.approx(expected.losses, rel=tolerance) else ["losses"]
    wrong += [] if result.gradient_norms == pytest.approx(expected.gradient_norms, rel=tolerance) else ["norms"]
    for kind in ("gradients", "weights"):
        mine, other = getattr(result, kind), getattr(expected, kind)
        wrong += ["names"] if mine.keys() != other.keys() else []
        wrong += [kind] if not distance(mine, other) <= tolerance else []
    return wrong + ["agree"] * (not result.agree) + ["changed"] * (not result.changed)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_one_process_on_the_whole_batch(name, n):
    for rank, results in enumerate(trained(n)[0]):
        for config, result in zip(CONFIGS, results[name], strict=True):
            assert (result.strategy, result.rank, result.world_size) == (name, rank, n)
            assert differs(result, reference(config)) == []
            assert "positions.weight" in result.weights
            assert ("positions.weight" in result.gradients) == (not config.frozen)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_it_holds_and_sends_what_the_formulas_say(name, n):
    for config in CONFIGS if n < 8 else [ODD]:
        shapes, results = theory.shapes(config), [result[name][-1 if config is ODD else 0] for result in trained(n)[0]]
        held = [(r.held.parameters, r.held.gradients, r.held.optimizer or 0) for r in results]
        assert held == [(e.parameters, e.gradients, e.optimizer) for e in theory.exact_memory(name, shapes, n)]
        events = [event for result in results for event in result.recording.events if event.kind == "collective"]
        sent = sum(event.sent_bytes for event in events) / n
        assert sent == pytest.approx(theory.exact_volume(name, shapes, n), abs=1e-3)
        named = {exchange.collective for exchange in get(name).communicates}
        named |= {"send", "recv"} if name in BY_HAND else set()
        assert n == 1 or {event.name for event in events if event.sent_bytes} <= named


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_F07_H03_no_strategy_prints_a_warning(n):
    assert trained(n)[1] == [""] * n


def test_every_strategy_trains_with_a_fused_adamw():
    """Else a GPU takes foreach, which needs M_P more for a moment; fsdp2 alone had it."""
    for found in run(ranks.fused, 2, strategies=list(STRATEGIES)):
        assert found == {name: ["AdamW", True] for name in STRATEGIES}


def test_L25_one_rank_holds_the_whole_model():
    for name in NAMES:
        result = trained(1)[0][0][name][0]
        plain = reference(EVEN).held
        assert (result.held.parameters, result.held.gradients) == (plain.parameters, plain.gradients)


@pytest.mark.parametrize("n", [2, 3])
def test_clipping_is_by_the_norm_of_the_whole_gradient(n):
    """A limit below the norm: if each rank took the norm of its own part, ranks would scale differently."""
    expected = reference(ODD, clip=0.25)
    assert min(expected.gradient_norms) > 0.3
    assert distance(expected.weights, reference(ODD).weights) > 1e-4
    names = [*NAMES, "ddp"]
    for result in run(
        ranks.train_all, n, strategies=names, configs=[ODD], steps=STEPS, batch=BATCH, weights=True, clip=0.25
    ):
        for name in names:
            assert differs(result[name][0], expected) == [], name


def test_accumulation_changes_nothing_but_how_often_something_is_sent():
    settings = {"configs": [ODD], "steps": STEPS, "batch": BATCH, "weights": True, "record_step": 2}
    results = run(ranks.train_all, 2, strategies=[*NAMES, "ddp"], accumulation=3, **settings)
    for name in [*NAMES, "ddp"]:
        assert differs(results[1][name][0], reference(ODD)) == [], name
        events = [e for result in results for e in result[name][0].recording.events if e.kind == "collective"]
        sent = theory.exact_volume(name, theory.shapes(ODD), 2, passes=3)
        assert sum(event.sent_bytes for event in events) / 2 == pytest.approx(sent), name


@pytest.mark.parametrize("how", ["ring", "direct", "backend"])
def test_all_ways_to_reduce_scatter_are_the_same_mathematics(how):
    options = {"reduce_scatter": how}
    settings = {"steps": STEPS, "batch": BATCH, "weights": True, "record_step": 1, "options": options}
    results = run(ranks.train_all, 3, strategies=BY_HAND, configs=[ODD], **settings)
    for name in BY_HAND:
        assert differs(results[2][name][0], reference(ODD)) == [], name
        events = [e for result in results for e in result[name][0].recording.events if e.kind == "collective"]
        ideal = theory.exact_volume(name, theory.shapes(ODD), 3)
        assert sum(event.sent_bytes for event in events) / 3 == pytest.approx(ideal)
        through_gloo = sum(event.backend_bytes for event in events) / 3
        if how == "backend":
            assert through_gloo > ideal * 1.2  # an all-reduce inside
        else:
            assert through_gloo == pytest.approx(ideal)


def test_prefetch_changes_when_weights_come_not_what_is_computed():
    settings = {
        "strategies": ["zero3"],
        "configs": [ODD],
        "steps": STEPS,
        "batch": BATCH,
        "weights": True,
        "record_step": 1,
    }
    without = run(ranks.train_all, 2, **settings)[0]["zero3"][0]
    ahead = run(ranks.train_all, 2, options={"prefetch": True}, **settings)[0]["zero3"][0]
    assert differs(ahead, reference(ODD)) == []
    assert ahead.held == without.held

    def gathered_by(result, block):
        """All-gathers that had begun when a block's forward did: the root's and the blocks' so far."""
        begun = next(e.start for e in result.recording.events if e.kind == "forward" and e.name == block)
        return sum(e.name == "all_gather" and e.start < begun for e in result.recording.events)

    # the frozen position embedding is a vector of its own in the root
    assert [gathered_by(without, f"blocks.{i}") for i in range(2)] == [3, 4]
    assert [gathered_by(ahead, f"blocks.{i}") for i in range(2)] == [4, 4]


def test_bf16_computes_in_16_bits_and_trains_float32_shards():
    expected = reference(ODD)
    settings = {"steps": STEPS, "batch": BATCH, "weights": True, "options": {"dtype": "bfloat16"}, "record_step": 1}
    results = run(ranks.train_all, 2, strategies=BY_HAND, configs=[ODD], seed_by_rank=True, **settings)
    full = {name: theory.exact_memory(name, theory.shapes(ODD), 2)[0] for name in BY_HAND}
    for name in BY_HAND:
        result = results[1][name][0]
        # bf16 has 8 bits: a loss near 5.5 is a multiple of 1/32
        assert result.losses == pytest.approx(expected.losses, rel=1e-2)
        assert 1e-6 < distance(result.weights, expected.weights) < 2e-2
        assert {tensor.dtype.itemsize for tensor in result.weights.values()} == {4 if name == "zero3" else 2}
        assert result.agree
    one, two, three = (results[0][name][0].held for name in BY_HAND)
    masters = {name: (full[name].optimizer - 4 * 3) // 2 for name in BY_HAND}  # beside 3 step counts
    assert one.parameters == full["zero1"].parameters // 2
    assert one.gradients == full["zero1"].gradients // 2
    assert one.optimizer == full["zero1"].optimizer + masters["zero1"]
    assert two.gradients == full["zero2"].gradients // 2
    assert two.optimizer == full["zero2"].optimizer + masters["zero2"]
    assert (three.parameters, three.gradients) == (full["zero3"].parameters, full["zero3"].gradients)
    # half the bytes on the way
    for name in BY_HAND:
        events = [e for r in results for e in r[name][0].recording.events if e.kind == "collective"]
        sent = sum(event.sent_bytes for event in events) / 2
        assert sent == pytest.approx(theory.exact_volume(name, theory.shapes(ODD), 2) / 2)


def test_peaks_inside_the_step_are_ordered_as_the_theory_says():
    """Few tokens, so that states matter more than activations."""
    config = TransformerConfig(layers=8, width=64, heads=2, length=8)
    settings = {"strategies": [*NAMES, "ddp"], "configs": [config], "steps": 3, "batch": 2}
    settings |= {"record_step": 2, "allocations": True}

    def ordered(results):
        peak = {name: max(result[name][0].peak for result in results) for name in results[0]}
        held = {name: results[0][name][0].held for name in results[0]}
        # FSDP's own varies by some blocks from rank to rank: gloo's threads let go of tensors when they come to it
        least = {name: min(result[name][0].peak for result in results) for name in results[0]}
        for lower, higher in [
            ("zero1", "ddp"),
            ("zero2", "zero1"),
            ("zero3", "zero2"),
            ("fsdp2", "fsdp2_no_reshard"),
            ("fsdp2_no_reshard", "fsdp2_root_only"),
            ("fsdp1", "fsdp1_grad_op"),
        ]:
            assert least[lower] < least[higher], (lower, higher, least)
        # the optimizer's share is the only difference between these two, at the peak as well
        one, other = (max(result[name][0].held.optimizer for result in results) for name in ("ddp", "zero_redundancy"))
        assert peak["ddp"] - peak["zero_redundancy"] == one - other
        # whole gradients never exist at once: what zero2 has at its peak beside P and O is less than they are
        states = theory.adamw_states(config)
        assert peak["zero2"] - held["zero2"].parameters - held["zero2"].optimizer < states.gradients
        # and with zero3, neither weights nor gradients
        assert peak["zero3"] - held["zero3"].total < states.parameters

    holds(ordered, lambda _: run(ranks.train_all, 2, **settings))


def test_the_comparison_sets_every_sharded_state_beside_its_exact_formula():
    config = TransformerConfig(layers=1, width=18, heads=3, length=7)
    rows = compare(["zero1", "fsdp2"], (3,), config, steps=3, batch=6)
    assert [(row.strategy, row.world_size) for row in rows] == [("zero1", 3), ("fsdp2", 3)]
    for row in rows:
        assert row.held_error == row.sent_error == 0
        assert row.loss_error < TOLERANCE
        assert row.peak > row.held.total
    # 256 rows in three chunks of 86: more than a third, which the textbook does not know
    assert rows[1].held.parameters > theory.memory("fsdp2", theory.adamw_states(config), 3).parameters
    text = table(rows).splitlines()
    assert [line.split()[:2] for line in text[2:4]] == [["zero1", "3"], ["fsdp2", "3"]]
    with pytest.raises(ValueError, match="steps is 2: it must be at least 3"):
        compare(["zero1"], (2,), config, steps=2)


@pytest.mark.parametrize(
    ("strategy", "arguments", "message"),
    [
        (
            "zero1",
            {"options": {"reduce_scatter": "tree"}},
            "reduce_scatter is 'tree': it must be one of auto, ring, direct",
        ),
        ("zero2", {"options": {"dtype": "int8"}}, "dtype is 'int8': it must be a floating-point type"),
        ("zero3", {"options": {"prefech": True}}, "prefech: strategy 'zero3' has no such setting"),
        ("zero2", {"average": True}, "strategy 'zero2' averages gradients itself"),
        ("fsdp2", {"bucket_mb": 1.0}, "bucket_mb: strategy 'fsdp2' has no such setting"),
        ("zero3", {"clip": 0.0}, "clip is 0.0: it must be above 0"),
    ],
)
def test_what_does_not_fit_is_refused(strategy, arguments, message):
    with pytest.raises(LaunchError, match="ValueError") as caught:
        run(train, 2, strategy=strategy, config=ODD, steps=1, batch=2, **arguments)
    assert message in str(caught.value)
