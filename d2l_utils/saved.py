"""How much forward saves for backward: the activations, and whatever else autograd keeps.

with SavedBytes(model) as saved:
    model(tokens, targets).backward()
print(saved.bytes)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from d2l_utils.ranges import in_memory


class SavedBytes:
    """Bytes of the distinct storages that one forward of ``model`` leaves for its backward, without its weights.

    Read when the model's forward ends, from autograd's own saved tensors; the most of several forwards. A weight's
    16-bit copy, which autocast makes, counts: it is memory that is kept for backward. What was freed by then, such as
    gathered weights that are gathered again, does not. Recomputed activations are not saved, so they do not count.

    weights: gives what does not count; by default the model's parameters.
    bytes: None before the first forward has ended.
    """

    def __init__(self, model: nn.Module, weights: Callable[[], Iterable[Tensor]] | None = None) -> None:
        self.model, self.weights = model, weights or model.parameters
        self.bytes: int | None = None
        self._tensors: list[Tensor] = []
        self._hooks: Any = None

    def __enter__(self) -> SavedBytes:
        self._handles = [
            self.model.register_forward_pre_hook(self._begin),
            self.model.register_forward_hook(self._end, always_call=True),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()

    def _pack(self, tensor: Tensor) -> Tensor:
        kept = tensor.detach()  # a tensor that holds its own graph would keep itself alive
        self._tensors.append(kept)
        return kept

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._hooks is None:
            return
        self._hooks.__exit__(None, None, None)
        sizes = _storages(self._tensors)
        for address in _storages(self.weights()):
            sizes.pop(address, None)
        self.bytes = max(self.bytes or 0, sum(sizes.values()))
        self._tensors, self._hooks = [], None


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address -> bytes of the storages behind some tensors that have memory now."""
    storages = [part.untyped_storage() for tensor in tensors for part in in_memory(tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
