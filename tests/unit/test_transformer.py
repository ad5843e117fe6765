"""The toy Transformer: shapes, causality, the same weights for the same seed."""

import math

import pytest
import torch

from d2l_utils.text import sequences
from d2l_utils.transformer import Block, Transformer, TransformerConfig

SMALL = TransformerConfig(layers=2, width=16, heads=2, length=8)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("config", [TransformerConfig(), SMALL, TransformerConfig(width=48, vocabulary=100)])
def test_parameter_count_is_the_models_own(config, tied):
    config = TransformerConfig(**{**vars(config), "tied": tied})
    model = Transformer(config)
    assert config.parameter_count == sum(p.numel() for p in model.parameters())
    assert len(model.blocks) == config.layers
    assert all(isinstance(block, Block) for block in model.blocks)


def test_shapes_and_that_nothing_returned_is_a_view():
    model = Transformer(SMALL)
    rows = sequences(8, 3)
    logits = model(rows[:, :-1])
    loss = model(rows[:, :-1], rows[:, 1:])
    assert logits.shape == (3, 8, 256)
    assert loss.shape == ()
    assert not logits._is_view()
    assert not loss._is_view()
    assert model(rows[:, :4]).shape == (3, 4, 256)


def test_the_loss_is_the_mean_cross_entropy():
    model = Transformer(SMALL)
    rows = sequences(8, 3)
    tokens, targets = rows[:, :-1], rows[:, 1:]
    chances = model(tokens).softmax(-1).gather(-1, targets[..., None])
    torch.testing.assert_close(model(tokens, targets), -chances.log().mean())
    assert abs(model(tokens, targets).item() - math.log(256)) < 0.2


def test_a_token_sees_only_what_came_before():
    model = Transformer(SMALL)
    tokens = sequences(8, 1)[:, :-1].clone()
    before = model(tokens)
    tokens[0, 5] = (tokens[0, 5] + 1) % 256
    after = model(tokens)
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(-1).all()


def test_the_same_seed_gives_the_same_weights_and_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first = Transformer(SMALL).state_dict()
    assert torch.equal(torch.rand(3), expected)
    second = Transformer(SMALL).state_dict()
    other = Transformer(TransformerConfig(**{**vars(SMALL), "seed": 1})).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if first[name].dim() > 1)


def test_norms_start_at_one_and_biases_at_zero():
    for name, parameter in Transformer(SMALL).named_parameters():
        if parameter.dim() == 1:
            expected = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            assert torch.equal(parameter, torch.full_like(parameter, expected)), name
        else:
            assert 0.001 < parameter.std() < 0.03, name


def test_tied_weights_are_one_parameter():
    model = Transformer(TransformerConfig(**{**vars(SMALL), "tied": True}))
    assert model.head.weight is model.tokens.weight
    assert len(list(model.parameters())) == len(model.state_dict()) - 1


def test_a_frozen_parameter_takes_no_gradient():
    model = Transformer(TransformerConfig(**{**vars(SMALL), "frozen": True}))
    rows = sequences(8, 2)
    model(rows[:, :-1], rows[:, 1:]).backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == ["positions.weight"]


def test_it_can_be_made_on_the_meta_device():
    with torch.device("meta"):
        model = Transformer(SMALL)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_it_learns():
    model = Transformer(SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = sequences(8, 8)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", ["layers", "width", "heads", "length", "vocabulary"])
@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "4"])
def test_bad_sizes_are_refused(name, bad):
    with pytest.raises(ValueError, match=f"{name} is {bad!r}: it must be a whole number"):
        TransformerConfig(**{name: bad})


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="heads is 3: it must divide width, which is 64"):
        TransformerConfig(heads=3)
    with pytest.raises(ValueError, match=r"tokens has shape \(1, 9\).*at most 8"):
        Transformer(SMALL)(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(ValueError, match=r"tokens has shape \(8,\)"):
        Transformer(SMALL)(torch.zeros(8, dtype=torch.long))
