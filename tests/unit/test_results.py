"""What a rank returns arrives as it was: values, types, ties between tensors, and no more bytes than it shows (X24)."""

import datetime
import enum
import math
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from d2l_utils.launching.results import check_portable, packed, unpacked

Point = namedtuple("Point", "x y")


class Color(enum.Enum):
    RED = 1


@dataclass(frozen=True)
class Holder:
    weight: object
    name: str = "w"


def travelled(value, at_most=None):
    check_portable(value)
    data = packed(value)
    assert at_most is None or len(data) < at_most
    return unpacked(data)


PLAIN = [
    *(None, True, 3, 1.5, 1 + 2j, "a", b"b", bytearray(b"c"), Decimal("0.1"), Fraction(1, 3), range(3), slice(1, 2)),
    *(Color.RED, Path("a/b"), datetime.datetime(2026, 1, 2), datetime.timedelta(seconds=1), OrderedDict(a=1)),
    *([1, (2, {3})], {"k": frozenset({1})}, deque([1]), Point(1, 2), Holder(3), torch.float32, torch.device("cpu")),
    *(torch.Size([2, 3]), torch.strided, np.float32(1.5), np.int64(3), np.complex128(1j), np.dtype("f4"), Color, dict),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_values_keep_their_type(value):
    got = travelled(value)
    assert got == value and type(got) is type(value)


def test_containers_that_pickle_cannot_do():
    assert travelled(defaultdict(lambda: 0, a=1)) == {"a": 1}
    assert travelled(type("Attributes", (dict,), {"__module__": "__main__"})(a=1)) == {"a": 1}
    itself = [1]
    itself.append(itself)
    assert travelled(itself)[1][1][0] == 1
    assert str(travelled(ValueError("x"))) == "x" and math.isnan(travelled(math.nan))


TENSORS = {
    "bf16": torch.arange(6).bfloat16(),
    "complex": torch.tensor([1 + 2j]),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 3),
    "slice": torch.arange(10.0)[3:7],
    "column": torch.arange(12.0).view(3, 4)[:, 1],
    "expanded slice": torch.arange(10.0)[3:4].expand(5),
    "float8": torch.ones(3).to(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_keep_shape_type_and_numbers(name):
    tensor = TENSORS[name]
    for got in (travelled(tensor), travelled([tensor])[0], travelled(Holder(tensor)).weight):
        assert got.dtype == tensor.dtype and got.shape == tensor.shape
        assert torch.equal(got.to(torch.complex64), tensor.to(torch.complex64))


def test_tensors_of_other_layouts():
    got = travelled([torch.eye(3).to_sparse(), torch.ones(2, requires_grad=True) * 2])
    assert got[0].is_sparse and torch.equal(got[0].to_dense(), torch.eye(3))
    assert not got[1].requires_grad


def test_no_more_bytes_than_a_tensor_shows():
    big = torch.zeros(1_000_000)
    assert travelled(torch.ones(1).expand(30_000, 10_000), 5_000).shape == (30_000, 10_000)
    assert travelled(Holder(torch.ones(1).expand(30_000, 10_000)), 5_000).weight.stride() == (0, 0)
    assert torch.equal(travelled(big[5:10], 5_000), big[5:10])
    assert torch.equal(travelled({"a": big[:3], "b": big[-3:]}, 5_000)["b"], big[-3:])
    assert travelled(big.view(1000, 1000)[:, 3], 10_000).shape == (1000,)
    assert len(packed([big] * 5)) < 4_100_000
    array = np.broadcast_to(np.arange(3), (100_000, 3))
    assert np.array_equal(travelled(array, 2_000), array)
    assert np.array_equal(travelled(np.zeros(1_000_000)[2:5], 2_000), np.zeros(3))


def test_tied_tensors_arrive_tied():
    weight = torch.nn.Parameter(torch.arange(6.0))
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2, bias=False), "b": torch.nn.Linear(2, 2, bias=False)})
    model["b"].weight = model["a"].weight
    state = travelled(model.state_dict())
    state["a.weight"].zero_()
    assert not state["b.weight"].any()
    one, other = travelled((weight, weight))
    assert one is other
    whole, part, held = travelled([weight.detach(), weight.detach()[2:4], Holder(weight.detach().view(2, 3))])
    whole.fill_(7)
    assert part.tolist() == [7, 7] and held.weight.tolist() == [[7] * 3] * 2
    far = torch.zeros(1000)
    first, again, last = travelled([far[:2], far[:2], far[-2:]])
    first.fill_(1)
    assert again.tolist() == [1, 1] and last.tolist() == [0, 0]
    assert far.sum() == 0 and weight.detach().tolist() == [0, 1, 2, 3, 4, 5]


Local = type("Local", (), {"__module__": "__main__"})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "the result is a object: a rank can return"),
        ([1, {"a": (x for x in ())}], r"the result\[1\]\['a'\] is a generator"),
        (Local(), "is a Local of the script, which the notebook cannot import"),
        (Local, "is a type"),
        (torch.empty(3, device="meta"), "meta device, which holds no numbers"),
        (type("Sharded", (torch.Tensor,), {})(), r"Sharded: return its to_local\(\)"),
        (np.array([object()], dtype=object), "a part of the result is a object"),
        (torch.nn.Linear(1, 1), "is a Linear"),
        (print, "is a builtin"),
    ],
)
def test_what_cannot_travel_is_named(value, words):
    with pytest.raises(TypeError, match=words):
        check_portable(value)


def test_what_pickle_or_sharding_leaves_nothing_of():
    with pytest.raises(TypeError, match=r"the result cannot travel to the notebook: .*lambda"):
        packed(Holder(lambda: 1))
    with pytest.raises(TypeError, match="a part of the result is a Local of the script"):
        packed(Holder(Local()))
    with pytest.raises(TypeError, match=r"is a Sharded: return its to_local\(\)"):
        packed(Holder(type("Sharded", (torch.Tensor,), {})()))
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match="its memory was freed"):
        packed(freed)


def test_tensors_travel_whatever_the_default_device_is():
    with torch.device("meta"):
        assert travelled(torch.ones(2, device="cpu")).tolist() == [1, 1]
