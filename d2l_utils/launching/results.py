"""What a rank's function returned, on its way to the notebook: what may travel, and how it is packed.

Tensors arrive detached and on the CPU. They share memory where the rank's did (tied weights stay tied), and bring no memory that none
of them shows (a slice leaves the rest behind, an expanded tensor stays expanded).
"""

import datetime
import decimal
import enum
import fractions
import io
import pathlib
import pickle
import sys
import threading
import uuid
from collections import defaultdict, deque
from typing import Any

_NUMBERS_AND_TEXT = (bool, int, float, complex, str, bytes, bytearray, decimal.Decimal, fractions.Fraction)
_SMALL = (
    enum.Enum,
    pathlib.PurePath,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    uuid.UUID,
    range,
    slice,
)
_unpacking = threading.local()


def check_portable(value: Any, where: str = "the result", seen: set[int] | None = None) -> None:
    """TypeError names the first part of `value` that cannot travel to the notebook."""
    seen = set() if seen is None else seen
    kind = type(value)
    if value is None or kind in _NUMBERS_AND_TEXT:
        return
    if kind.__module__ == "__main__" and not isinstance(value, dict):
        raise TypeError(_of_the_script(where, kind))
    if isinstance(value, dict | list | tuple | set | frozenset | deque):
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, dict):
            for key, part in value.items():
                check_portable(key, f"a key of {where}", seen)
                check_portable(part, f"{where}[{key!r}]", seen)
        else:
            for i, part in enumerate(value):
                check_portable(part, f"{where}[{i}]", seen)
    elif not _is_portable(value, where):
        raise TypeError(
            f"{where} is a {kind.__qualname__}: a rank can return numbers, strings, lists, tuples, dicts, tensors, numpy arrays and "
            "dataclasses of a module"
        )


def _of_the_script(where: str, kind: type) -> str:
    return f"{where} is a {kind.__name__} of the script, which the notebook cannot import: return a dict instead"


def _is_portable(value: Any, where: str) -> bool:
    if hasattr(type(value), "__dataclass_fields__"):
        return True  # what its fields hold is looked at when it is packed
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None and isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"{where} is a {type(value).__name__}: return its to_local() or full_tensor()")
        if value.is_meta:
            raise TypeError(f"{where} is a tensor on the meta device, which holds no numbers: return its shape")
        return True
    if torch is not None and isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return True
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic | numpy.dtype):
        for part in value.flat if isinstance(value, numpy.ndarray) and value.dtype == object else ():
            check_portable(part, f"a part of {where}")
        return True
    if isinstance(value, type):
        return "<locals>" not in value.__qualname__ and value.__module__ != "__main__"
    return isinstance(value, (*_NUMBERS_AND_TEXT, *_SMALL, BaseException))


class _Pickler(pickle.Pickler):
    """Sets tensors aside, so that all of them are known before their memory is copied."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Any] = []
        self.torch, self.numpy = sys.modules.get("torch"), sys.modules.get("numpy")

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, dict) and (kind is defaultdict or kind.__module__ == "__main__"):
            return dict, (), None, None, iter(value.items())  # a factory is as a rule a lambda, which nothing can pack
        if kind.__module__ == "__main__":
            raise TypeError(_of_the_script("a part of the result", kind))
        if self.torch is not None and isinstance(value, self.torch.Tensor):
            check_portable(value, "a tensor of the result")
            self.tensors.append(value)
            return _tensor, (len(self.tensors) - 1,)
        if self.numpy is not None and kind is self.numpy.ndarray and value.size > 1 and 0 in value.strides:
            # numpy itself would write out what it only repeats
            once = value[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in value.strides)]
            return self.numpy.broadcast_to, (once.copy(), value.shape)
        return NotImplemented


def packed(value: Any) -> bytes:
    """`value` as bytes: plain pickle, or torch's own format around it where there are tensors. TypeError where pickle knows no way."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError) as error:
        raise TypeError(f"the result cannot travel to the notebook: {error}") from None
    if not pickler.tensors:
        return buffer.getvalue()
    import torch

    structure, buffer = buffer.getvalue(), io.BytesIO()
    torch.save((structure, _own_memory(pickler.tensors)), buffer)
    return buffer.getvalue()


def unpacked(data: bytes) -> Any:
    """What `packed` was given. Its bytes come from this user's own folder: pickle is safe here."""
    if not data.startswith(b"PK"):
        return pickle.loads(data)
    import torch

    structure, _unpacking.tensors = torch.load(io.BytesIO(data), weights_only=False)
    try:
        return pickle.loads(structure)
    finally:
        del _unpacking.tensors


def _tensor(index: int) -> Any:
    return _unpacking.tensors[index]


def _own_memory(tensors: list[Any]) -> list[Any]:
    """The tensors on the CPU, with memory of their own that they share as before."""
    import torch

    made: dict[Any, Any] = {}
    by_storage: dict[int, list[Any]] = {}
    flat = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
    for tensor in flat:
        if _has_strides(tensor):
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    for group in by_storage.values():
        places = {_place(tensor): tensor for tensor in group}
        spans = [_span(tensor) for tensor in group]
        low, high = min(begin for begin, _ in spans) // 16 * 16, max(end for _, end in spans)
        storage = group[0].untyped_storage()
        if high > storage.nbytes():
            raise TypeError(
                "a tensor of the result holds no numbers now, because its memory was freed: gather it first"
            )
        if high - low <= sum(tensor.nbytes for tensor in places.values()) + 16:
            part = torch.empty(0, dtype=torch.uint8, device=group[0].device).set_(storage, low, (high - low,), (1,))
            part = part.cpu() if high - low == storage.nbytes() else part.cpu().clone()
            for place, tensor in places.items():
                offset = (_span(tensor)[0] - low) // tensor.element_size()
                view = torch.empty(0, dtype=tensor.dtype, device="cpu")  # whatever the default device is
                made[place] = view.set_(part.untyped_storage(), offset, tensor.size(), tensor.stride())
        else:  # what they show lies far apart
            made |= {
                place: tensor.cpu().clone(memory_format=torch.contiguous_format) for place, tensor in places.items()
            }
    return [made[_place(tensor)] if _has_strides(tensor) else tensor.cpu() for tensor in flat]


def _has_strides(tensor: Any) -> bool:
    """Whether it is an ordinary view of one storage: not sparse, quantized or nested."""
    return str(tensor.layout) == "torch.strided" and not tensor.is_quantized and not tensor.is_nested


def _place(tensor: Any) -> tuple[Any, ...]:
    return (tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype)


def _span(tensor: Any) -> tuple[int, int]:
    """The bytes of its storage that it shows: the first, and one after the last."""
    begin = tensor.storage_offset() * tensor.element_size()
    if not tensor.numel():
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()
