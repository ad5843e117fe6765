"""Real English text with no download: Python's own language reference, as bytes.

CPython ships it as ``pydoc_data.topics`` (about half a megabyte). It is the same on every machine with the
same Python version; another Python version has a slightly different text.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor
from torch.utils.data import Dataset


@cache
def corpus() -> bytes:
    """The topics of the language reference, in the order of their names, joined as UTF-8."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode("utf-8")


@cache
def _tokens() -> Tensor:
    return torch.frombuffer(bytearray(corpus()), dtype=torch.uint8)


def _check(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}: it must be a whole number of at least {least}")


def sequences(length: int, count: int, offset: int = 0) -> Tensor:
    """``count`` consecutive pieces of the text, starting with piece number ``offset``: int64, (count,
    length + 1).

    Row i holds bytes [s, s + length] with s = (offset + i) * length, so that row[:-1] are ``length`` tokens
    and row[1:] the byte that follows each. Past its end the text starts again. Same arguments, same result.

    Raises ValueError when length or count is below 1 or offset is negative.
    """
    _check("length", length, 1)
    _check("count", count, 1)
    _check("offset", offset, 0)
    starts = (torch.arange(count) + offset) * length
    index = starts[:, None] + torch.arange(length + 1)
    text = _tokens()
    return text[index % len(text)].long()


def batches(length: int, batch: int, steps: int, offset: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """``steps`` times (tokens, targets), each int64 (batch, length): consecutive pieces, none twice until
    the text ends.

    Step s takes pieces offset + s * batch and the ``batch - 1`` after it. Errors as in ``sequences``.
    """
    _check("batch", batch, 1)
    _check("steps", steps, 0)
    for step in range(steps):
        rows = sequences(length, batch, offset + step * batch)
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Text(Dataset):
    """The text as a dataset of (tokens, targets), each int64 (length,); ``size`` keeps the first ``size``
    pieces only.

    Raises ValueError when length is below 1 or longer than the text, or size is negative or more than there
    is.
    """

    def __init__(self, length: int, size: int | None = None) -> None:
        _check("length", length, 1)
        whole = (len(corpus()) - 1) // length
        if whole < 1:
            raise ValueError(f"length is {length}: the text has {len(corpus())} bytes")
        if size is not None:
            _check("size", size, 0)
            if size > whole:
                raise ValueError(f"size is {size}: the text has {whole} pieces of length {length}")
        self.length = length
        self.size = whole if size is None else size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.size:
            raise IndexError(f"index is {index}: the dataset has {self.size} pieces")
        row = sequences(self.length, 1, int(index))[0]
        return row[:-1], row[1:]
