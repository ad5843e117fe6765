"""Checkpoints without ranks: boxes of a flat range, what is refused, and in which words."""

import os
import shutil
from math import prod

import pytest
import torch

from chapter19_9.checks import check_checkpoints
from chapter19_9.resuming.checkpoint import Checkpoints, batch_of, check, load, newest, save
from chapter19_9.resuming.named import Pieces, boxes, index_of
from chapter19_9.resuming.view import contents
from chapter19_9.strategies import get
from chapter19_9.train import train
from d2l_utils.transformer import Transformer, TransformerConfig

CONFIG = TransformerConfig(layers=1, width=16, heads=2, length=8)


@pytest.mark.parametrize("shape", [(7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2, 2), ()])
def test_every_flat_range_is_its_boxes(shape):
    whole = torch.arange(prod(shape)).view(shape)
    for first in range(prod(shape) + 1):
        for last in range(first, prod(shape) + 1):
            found = [
                whole[tuple(slice(at, at + n) for at, n in zip(offset, size, strict=True))].flatten().tolist()
                for offset, size in boxes(shape, first, last)
            ]
            assert [number for box in found for number in box] == list(range(first, last))
            begins = [index_of(shape, offset) for offset, _ in boxes(shape, first, last)]
            assert begins == [box[0] for box in found]
            assert len(found) <= max(1, 2 * len(shape) - 1)


def test_pieces_have_the_shape_of_the_whole_and_compute_nothing():
    pieces = Pieces((3, 4), torch.zeros(5), {torch.Size((0, 0)): torch.ones(1, 4)})
    assert (pieces.shape, pieces.dtype) == ((3, 4), torch.float32)
    with pytest.raises(TypeError, match="only parts of this tensor are here"):
        pieces.sum()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(tmp_path_factory.mktemp("checkpoints"), 3, Transformer(CONFIG))


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / saved.name)


def test_what_was_saved_comes_back(saved):
    other = Transformer(TransformerConfig(layers=1, width=16, heads=2, length=8, seed=5))
    load(saved, other)
    for one, two in zip(other.parameters(), Transformer(CONFIG).parameters(), strict=True):
        assert torch.equal(one, two)
    assert sum(part.bytes for part in contents(saved)) == 4 * CONFIG.parameter_count


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("__0_0.distcp", cut, "__0_0.distcp has "),
        ("__0_0.distcp", os.remove, "__0_0.distcp is missing: "),
        (".metadata", cut, ".metadata cannot be read ("),
        (".metadata", os.remove, ".metadata is missing: "),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_the_file_s_name(copy, name, damage, words):
    damage(copy / name)
    with pytest.raises(ValueError, match="remove its folder to go on from the one before") as caught:
        check(copy)
    assert str(caught.value).startswith(str(copy / words))
    with pytest.raises(ValueError, match="the checkpoint cannot be used"):
        Checkpoints(str(copy.parent)).resume(Transformer(CONFIG), None, 9, 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"width": 32}, r"model.tokens.weight has shape \(256, 16\) there, and \(256, 32\) here"),
        ({"layers": 2}, r"model.blocks.1.norm1.weight is not in it"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(saved, changes, words):
    config = TransformerConfig(**{"layers": 1, "width": 16, "heads": 2, "length": 8} | changes)
    with pytest.raises(ValueError, match=f"is of another model: {words}"):
        load(saved, Transformer(config))


def test_the_newest_that_was_finished_counts(saved, copy):
    folder = copy.parent
    assert newest(folder / "nothing") is None
    shutil.copytree(copy, folder / "step-000010")
    shutil.copytree(copy, folder / "step-000020.draft")
    (folder / "step-notes").mkdir()
    assert newest(folder) == folder / "step-000010"
    with pytest.raises(ValueError, match=r"steps is 10: .*step-000010 has 10 behind it, so it must be more"):
        Checkpoints(str(folder)).resume(Transformer(CONFIG), None, 10, 4)


def test_another_batch_is_refused_or_asked_for(tmp_path):
    settings = {"config": CONFIG, "strategy": "single"}
    train(steps=2, batch=4, checkpoints=Checkpoints(str(tmp_path), every=2), **settings)
    with pytest.raises(ValueError, match=r"batch is 2: .*step-000002 was saved with batch 4, .*another_batch=True"):
        train(steps=4, batch=2, checkpoints=Checkpoints(str(tmp_path)), **settings)
    same = train(steps=4, batch=4, checkpoints=Checkpoints(str(tmp_path)), **settings)
    other = train(steps=4, batch=2, checkpoints=Checkpoints(str(tmp_path), every=4, another_batch=True), **settings)
    assert same.first == other.first == 2
    assert same.losses == train(steps=4, batch=4, **settings).losses[2:]
    assert [batch_of(path) for path in sorted(tmp_path.iterdir())] == [4, 2]


def test_a_checkpoint_of_before_that_says_no_batch_is_resumed_with_any(saved):
    assert batch_of(saved) is None
    assert Checkpoints(str(saved.parent), optimizer=False).resume(Transformer(CONFIG), None, 9, 4) == 3


@pytest.mark.parametrize("every", [-1, 1.5, True, None])
def test_every_is_a_whole_number(every):
    with pytest.raises(ValueError, match=r"every is .*: it must be a whole number of at least 0"):
        Checkpoints("folder", every)


@pytest.mark.parametrize(
    ("strategy", "ranks", "precision", "average", "words"),
    [
        ("single", 2, "fp32", False, "each rank has other weights"),
        ("ddp", 2, "fp16", False, "a loss scale, which is not saved"),
        ("deepspeed3", 2, "fp32", False, "in its own way"),
    ],
)
def test_what_a_checkpoint_would_not_hold_is_refused(strategy, ranks, precision, average, words):
    with pytest.raises(ValueError, match=words):
        check_checkpoints(get(strategy), ranks, precision, average)
    check_checkpoints(get("single"), 2, "fp32", True)
    check_checkpoints(get("single"), 1, "bf16", False)
