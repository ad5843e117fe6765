"""The tensors in what a module is given and in what it returns, in whatever containers they lie."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary


def tensors(value: Any) -> Iterator[Any]:
    """The tensors in tuples, lists, dicts, sets and dataclasses, nested in any way, and the other objects in them."""
    for leaf in tree_leaves(value):
        # torch's tree does not look into dataclasses that nobody registered, nor into subclasses of containers
        if is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors([getattr(leaf, field.name, None) for field in fields(leaf)])
        elif isinstance(leaf, Mapping):
            yield from tensors(list(leaf.values()))
        elif isinstance(leaf, list | tuple | set | frozenset):
            yield from tensors(list(leaf))
        else:
            yield leaf


def versions(*given: Any) -> Mapping[Tensor, int]:
    """The version of each tensor in a module's inputs that needs a gradient; a change in place raises it."""
    found = [leaf for leaf in tensors(given) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return WeakTensorKeyDictionary({tensor: tensor._version for tensor in found})  # keeps no activation alive


def made_by(unit: str, output: Any, given: Mapping[Tensor, int]) -> Iterator[Tensor]:
    """The tensors in ``output`` that backward comes to before it comes to the module's own weights: all that need a
    gradient but the inputs that come back as they were ``given``.

    Raises TypeError, naming the unit, for an object in which a tensor could hide.
    """
    if not torch.is_grad_enabled():
        return
    for leaf in tensors(output):
        if isinstance(leaf, Tensor):
            # a view that is changed in place later loses its hook, and what it is a view of does not
            for tensor in (leaf, leaf._base):
                if tensor is not None and tensor.requires_grad and given.get(tensor) != tensor._version:
                    yield tensor
        # what Python's collector of cycles does not track, such as a number or a string, refers to nothing else
        elif gc.is_tracked(leaf) and not isinstance(leaf, Enum | type):
            name = f"block {unit!r}" if unit else "the model"
            raise TypeError(
                f"{name} returns a {type(leaf).__qualname__}: ZeRO-3 would not find the tensors in it, and backward "
                "would begin without the weights. Return tensors, or tuples, lists, dicts or dataclasses of them"
            )


def is_container(value: Any) -> bool:
    """Whether a module that is given it can put a tensor into it, where ``tensors`` finds it."""
    return isinstance(value, list | dict) or (is_dataclass(value) and not isinstance(value, type))
