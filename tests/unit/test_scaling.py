"""Limits of the cost model that are known in closed form, published counts, bytes of the exact formula, and errors."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from chapter19_9 import signature, theory
from chapter19_9.choosing import flops, scaling_view
from chapter19_9.choosing.cost import FP32
from chapter19_9.choosing.machines import Machines
from chapter19_9.choosing.presets import PRESETS, of_toy, own
from chapter19_9.choosing.scaling import RANKS, Setup, main, predict, sweep
from chapter19_9.choosing.schedule import schedule
from chapter19_9.strategies import STRATEGIES
from d2l_utils.figure import png
from d2l_utils.link import Link
from d2l_utils.traffic import sent_on_ring
from d2l_utils.transformer import TransformerConfig

FREE = Machines(inside=math.inf, between=math.inf, latency_inside=0, latency_between=0)
TALK = [name for name, facts in STRATEGIES.items() if facts.communicates]
TOY = TransformerConfig(layers=3, width=96, heads=4, length=16)
WEAK = Setup("gpt2-xl", micro_batch=8)


def plan_of_toy(strategy, n, **options):
    model = of_toy(TOY)
    work = flops.count(model, 4 * TOY.length, TOY.length)
    return schedule(strategy, model, n, FP32, work, 1.0, **options)


@pytest.mark.parametrize("name", PRESETS)
def test_a_blocks_tensors_are_the_block(name):
    model = PRESETS[name]
    assert sum(model.block_tensors) == model.block
    assert sum(replace(model, qkv_bias=False).block_tensors) == replace(model, qkv_bias=False).block


def test_operations_are_the_published_ones():
    """GPT-3 (arXiv 2005.14165, table D.1): 3.14e23 for 300 billion tokens, without attention's products: 3 % here.
    Megatron (arXiv 2104.04473, equation 3): 96 B s l h^2 (1 + s / 6h + V / 16 l h) with the blocks computed twice,
    where the output layer is not: the paper counts its matrices only."""
    gpt3 = PRESETS["gpt3-175b"]
    total = flops.of_step(gpt3, 300e9, 2048)
    attention = 12 * gpt3.layers * gpt3.width * 2048 * 300e9
    assert total - attention == pytest.approx(3.14e23, rel=0.01)
    for name in ("megatron-7.5b", "megatron-1t", "gpt3-175b"):
        m = PRESETS[name]
        s, h, layers = m.length, m.width, m.layers
        paper = 96 * s * layers * h**2 * (1 + s / (6 * h) + m.vocabulary / (16 * layers * h))
        assert flops.of_step(m, s, s, checkpointing=True) == pytest.approx(paper, rel=2e-3)


def test_one_rank_only_computes():
    for name in STRATEGIES:
        step = predict(Setup("gpt2", name, ranks=1))
        assert (step.efficiency, step.link, step.waiting) == (1.0, 0.0, 0.0)
    alone = predict(Setup("gpt2", "single", ranks=512))
    assert alone.efficiency == 1.0


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("batch", [0, 4096])
def test_links_without_an_end_leave_only_computing(name, batch):
    setup = Setup("gpt2", name, ranks=1024, batch=batch, machines=FREE)
    step = predict(setup)
    assert step.efficiency == pytest.approx(1.0)
    tokens = 1024 * (4 if batch else 1)
    assert step.seconds == pytest.approx(flops.of_step(PRESETS["gpt2"], tokens, 1024) / 400e12)
    assert step.setup.passes == (4 if batch else 1)


@pytest.mark.parametrize("name", TALK)
@pytest.mark.parametrize("n", [2, 4])
def test_collectives_are_those_of_the_exact_formula_to_the_byte(name, n):
    """Of sizes that need no padding; and as many of them as a recorded step has."""
    plan, shapes = plan_of_toy(name, n), theory.shapes(TOY)
    counts: dict[str, int] = {}
    for one in plan.asked:
        counts[one.name] = counts.get(one.name, 0) + 1
        assert 0 <= one.at <= one.by <= plan.computing
    assert counts == signature.launches(name, shapes, n)
    sent = sum(sent_on_ring(one.name, one.bytes, n) for one in plan.asked)
    assert sent == pytest.approx(theory.exact_volume(name, shapes, n), rel=1e-12)


@pytest.mark.parametrize("name", ["gpt2", "gpt2-xl", "llama-7b"])
def test_ddp_fills_its_buckets_with_whole_gradients(name):
    model = PRESETS[name]
    first = [model.vocabulary * model.width, *([model.length * model.width] if model.positions else [])]
    last = [model.width] * (1 if model.gated else 2) + ([] if model.tied else [model.vocabulary * model.width])
    sizes = [4 * size for size in (*first, *model.block_tensors * model.layers, *last)]
    assert sum(sizes) == 4 * model.parameters
    plan = schedule("ddp", model, 8, FP32, flops.count(model, 1024, 1024), 1.0)
    assert len(plan.asked) == signature._buckets(sizes)
    assert plan.asked[-1].at == plan.computing, "the embedding's gradient comes last"


@pytest.mark.parametrize("name", TALK)
def test_the_bytes_term_is_the_volume_over_the_bandwidth(name):
    """Also where a step has several passes, and on nodes, where the slower link decides."""
    model = PRESETS["gpt2"]
    for passes in (1, 4):
        setup = Setup("gpt2", name, ranks=64, batch=64 * passes, precision="fp32", machines=Machines(between=20.0))
        volume = theory.volume(name, FP32.states(model.parameters), 64, passes=passes)
        if name == "fsdp1":  # the textbook gathers the root again too, FSDP1 does not
            volume -= passes * 63 / 64 * 4 * model.root
        step = predict(setup)
        assert step.sending == pytest.approx(volume / 20e9)
        slower_inside = replace(setup, machines=Machines(inside=5.0))
        assert predict(slower_inside).sending == pytest.approx(volume / 5e9)
        inside = predict(replace(setup, ranks=8, batch=8 * passes))
        assert inside.sending == pytest.approx(volume * (7 / 8) / (63 / 64) / 450e9)


def test_where_messages_cost_most_a_step_is_its_hops():
    """Hop by hop: N - 1 for each half of an all-reduce on a ring, m - 1 of them from node to node."""
    for n in (8, 64, 1000):
        nodes = math.ceil(n / 8)
        slow = Machines(8, math.inf, math.inf, 1000.0, 3000.0, algorithm="ring")
        step = predict(Setup("gpt2", "zero3", ranks=n, machines=slow))
        each = 1e-3 * (n - nodes) + 3e-3 * (nodes - 1)
        units = 1 + PRESETS["gpt2"].layers
        assert step.hopping == pytest.approx(3 * units * each)
        assert step.waiting == pytest.approx(step.hopping)
        tree = predict(Setup("gpt2", "zero3", ranks=n, machines=replace(slow, algorithm="tree")))
        assert tree.hopping == pytest.approx(3 * units * (7e-3 + 3e-3 * math.ceil(math.log2(nodes))))
    nccl = Machines()
    assert nccl.latency("all_gather", 4096) == replace(nccl, algorithm="ring").latency("all_gather", 4096)
    assert nccl.latency("all_reduce", 4096) == replace(nccl, algorithm="tree").latency("all_reduce", 4096)
    assert nccl.latency("all_reduce", 8) == 2 * nccl.latency("reduce_scatter", 8)


def test_one_node_with_one_bandwidth_is_a_link():
    machines, link = Machines(8, 3.0, 3.0, 2.0, 2.0, algorithm="ring"), Link(3e9, 2e-6)
    for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        for n in (2, 8, 64):
            assert machines.seconds(name, 1000, n) == pytest.approx(link.seconds(name, 1000, n))
    with pytest.raises(ValueError, match="name is 'unheard_of'"):
        machines.seconds("unheard_of", 1, 2)


@pytest.mark.parametrize("name", TALK)
@pytest.mark.parametrize("batch", [0, 1024])
def test_efficiency_never_rises_with_ranks_and_never_falls_with_better_machines(name, batch):
    setup = Setup("gpt2", name, batch=batch, micro_batch=2)
    steps = sweep(setup)
    assert [step.setup.ranks for step in steps] == [n for n in RANKS if not batch or n <= batch]
    for one, more in pairwise(steps):
        assert more.efficiency <= one.efficiency + 1e-9
        if batch:
            assert more.computing == pytest.approx(one.computing / 2)
        else:
            assert more.computing == one.computing
    for n in (8, 512):
        here = replace(setup, ranks=n)
        base = predict(here)
        for better in (
            {"inside": 1e4, "between": 1e4}, {"latency_inside": 0.1, "latency_between": 0.1}, {"teraflops": 100.0},
        ):  # fmt: skip
            assert predict(replace(here, machines=Machines(**better))).efficiency >= base.efficiency - 1e-9
        assert 0 <= base.waiting <= base.link + 1e-12


def test_overlap_is_the_share_of_what_could_hide():
    full, half, none = (predict(replace(WEAK, ranks=512, overlap=share)) for share in (1.0, 0.5, 0.0))
    assert none.seconds == pytest.approx(none.computing + none.link)
    assert half.seconds == pytest.approx((full.seconds + none.seconds) / 2)
    by_hand = replace(WEAK, strategy="zero3", ranks=512, batch=8 * 512 * 4)
    assert by_hand.passes == 4
    assert predict(by_hand).waiting == pytest.approx(predict(by_hand).link), "in each of the passes"
    assert predict(by_hand).seconds == pytest.approx(predict(replace(by_hand, overlap=0.0)).seconds)


def test_what_hides_in_backward_and_what_does_not():
    """DDP's last bucket has nothing behind it to hide; FSDP's first two all-gathers have not either."""
    ddp, fsdp = plan_of_toy("ddp", 2), plan_of_toy("fsdp2", 2)
    link = Link(1e12)
    assert ddp.seconds(link) - 1.0 == pytest.approx(link.seconds("all_reduce", ddp.asked[-1].bytes, 2))
    early = [one for one in fsdp.asked if one.at == 0]
    assert [one.by > 0 for one in early] == [False, False, True]
    again = [one for one in fsdp.asked if one.name == "all_gather" and one.at > 0.3]
    assert [one.by > one.at for one in again][:2] == [False, True], "root, and then a block ahead"
    leaving = [one for one in plan_of_toy("fsdp2", 2).asked if one.name == "reduce_scatter"]
    assert leaving[0].at < leaving[0].by, "beside the next block's backward"
    assert [one.by for one in leaving[:-2]] == [one.at for one in leaving[1:-1]], "and no longer than that"
    assert all(one.at == one.by for one in plan_of_toy("zero3", 2).asked)
    inner = plan_of_toy("ddp", 2, last=False)
    assert inner.asked == ()


def test_more_samples_on_a_rank_hide_more():
    few, many = predict(replace(WEAK, ranks=2048)), predict(replace(WEAK, ranks=2048, micro_batch=32))
    assert many.link == few.link and many.efficiency > few.efficiency
    strong = predict(replace(WEAK, ranks=512, batch=512))
    assert strong.efficiency < predict(replace(WEAK, ranks=64, batch=512)).efficiency


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "gpt9"}, "model is 'gpt9': it must be one of gpt2"),
        ({"model": "gpt2", "length": 1025}, "length is 1025: it must be at most 1024, the positions"),
        ({"strategy": "zero9"}, "strategy is 'zero9': it must be one of single, ddp"),
        ({"precision": "fp8"}, "precision is 'fp8': it must be one of fp32, bf16"),
        ({"ranks": 0}, "ranks is 0: it must be a whole number of at least 1"),
        ({"ranks": 2**21}, "ranks is 2097152: at most 1048576"),
        ({"ranks": 64, "batch": 32}, "ranks is 64: with a batch of 32, at most one for each sample"),
        ({"length": -1}, "length is -1"),
        ({"micro_batch": 1.5}, "micro_batch is 1.5"),
        ({"batch": True}, "batch is True"),
        ({"checkpointing": "no"}, "checkpointing is 'no': it must be True or False"),
        ({"overlap": 1.1}, "overlap is 1.1: it must be a number from 0 to 1"),
        ({"overlap": -0.1}, "overlap is -0.1: it must be a number of at least 0"),
        ({"machines": 8}, r"machines is 8: it must be Machines\(...\)"),
    ],
)
def test_nonsense_is_refused_by_the_fields_name(changes, message):
    with pytest.raises(ValueError, match="^" + message):
        Setup(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices": 0}, "devices is 0: it must be a whole number of at least 1"),
        ({"inside": 0}, "inside is 0: it must be a number above 0"),
        ({"between": "fast"}, "between is 'fast'"),
        ({"teraflops": math.nan}, "teraflops is nan"),
        ({"latency_inside": -1}, "latency_inside is -1: it must be a number of at least 0"),
        ({"latency_between": math.inf}, "latency_between is inf"),
        ({"algorithm": "star"}, "algorithm is 'star': it must be one of nccl, ring, tree"),
    ],
)
def test_machines_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ValueError, match="^" + message):
        Machines(**changes)


def test_every_answer_says_what_it_assumes(capsys):
    step = predict(WEAK)
    assert all(words in str(step) for words in step.assumptions)
    for words in ("400 TFLOP/s", "450 GB/s", "400 GB/s", "1.9 us", "4 us", "100%", "stragglers", "failures"):
        assert words in str(step)
    other = predict(replace(WEAK, batch=64, checkpointing=True, machines=Machines(teraflops=99.0, algorithm="tree")))
    for words in ("99 TFLOP/s", "8 (checkpointing)", "64 samples", "every collective is a tree"):
        assert words in str(other)
    main(["--strategy", "ddp", "fsdp2", "--ranks", "64", "8", "--micro-batch", "4", "--inside", "100"])
    printed = capsys.readouterr().out
    assert [line.split()[:3] for line in printed.splitlines()[1:5]] == [
        ["gpt2-xl", name, n] for name in ("ddp", "fsdp2") for n in ("8", "64")
    ]
    assert "100 GB/s in a node" in printed and "Not in it: stragglers" in printed
    for arguments, message in (
        (["--latency-inside", "-1"], "latency_inside is -1.0"),
        (["--strategy", "zero9"], "strategy is 'zero9'"),
        (["--ranks", "64", "--batch", "8"], "ranks is 64: with a batch of 8"),
    ):
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in capsys.readouterr().err


def test_the_picture_ends_a_line_where_the_batch_does():
    steps = sweep(WEAK, (8, 64, 512))
    strong = sweep(replace(WEAK, batch=64), (8, 64, 512))
    picture = scaling_view.efficiency({"each": {"a": steps}, "all": {"a": strong}})
    assert png(picture, 50)[:4] == b"\x89PNG"
    weak, ended = picture.axes
    assert list(weak.lines[0].get_xdata()) == [8, 64, 512]
    assert list(ended.lines[0].get_xdata()) == [8, 64]
    assert [text.get_text() for text in ended.texts] == ["one sample\na rank: no\nmore ranks"] and not weak.texts
    assert list(weak.lines[0].get_ydata()) == [100 * step.efficiency for step in steps]
    with pytest.raises(ValueError, match="panels is"):
        scaling_view.efficiency({"each": {"a": []}})


def test_own_sizes_go_too():
    model = own(layers=2, width=64, heads=4, vocabulary=256, length=64)
    assert predict(Setup(model, "ddp", ranks=8)).computing > 0
