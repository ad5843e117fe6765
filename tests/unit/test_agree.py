"""How far two sets of tensors are apart, as one vector."""

import pytest
import torch

from d2l_utils.agree import relative_difference


def test_relative_difference_is_that_of_one_long_vector():
    other = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    one = {"a": torch.tensor([3.0, 0.3]), "b": torch.tensor([[4.4]])}
    assert relative_difference(one, other) == pytest.approx(0.5 / 5)
    assert relative_difference(other, other) == 0


def test_relative_difference_refuses_what_cannot_be_compared():
    with pytest.raises(ValueError, match="'b'"):
        relative_difference({"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)})
    with pytest.raises(ValueError, match="zeros"):
        relative_difference({"a": torch.ones(1)}, {"a": torch.zeros(1)})
