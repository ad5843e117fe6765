"""Published model shapes, from 100 million to a trillion parameters, each with its source.

    >>> PRESETS["llama-7b"].parameters
    6738415616

A shape is counted, not quoted: ``published`` is what its source prints, and a test holds the count against it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from d2l_utils.transformer import TransformerConfig


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder-only Transformer.

    layers, width, heads : blocks, features of a token, attention heads.
    length               : longest sequence, in tokens, that it was published for.
    vocabulary           : number of different tokens, as large as the embedding has rows.
    kv_heads             : heads of keys and values; 0 means as many as ``heads``.
    hidden               : width inside the MLP; 0 means 4 x width.
    gated                : the MLP has a third matrix, its gate (SwiGLU), and no block has biases (as in Llama).
    positions            : a learned embedding for each position.
    tied                 : the output layer uses the token embedding's own weight.
    qkv_bias             : queries, keys and values have biases, where the other layers have.
    published            : parameters as its source prints them; None for sizes of one's own.
    source               : paper or model card.
    """

    name: str
    layers: int
    width: int
    heads: int
    length: int
    vocabulary: int
    kv_heads: int = 0
    hidden: int = 0
    gated: bool = False
    positions: bool = True
    tied: bool = True
    qkv_bias: bool = True
    published: float | None = None
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "length", "vocabulary"):
            whole(name, getattr(self, name), 1)
        for name in ("kv_heads", "hidden"):
            whole(name, getattr(self, name), 0)
        if self.width % self.heads:
            raise ValueError(f"heads is {self.heads}: it must divide width, which is {self.width}")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"kv_heads is {self.kv_heads}: it must divide heads, which is {self.heads}")

    @property
    def longest(self) -> float:
        """Tokens of the longest sequence that it can take: its learned positions, or no limit."""
        return self.length if self.positions else math.inf

    def check_length(self, length: int) -> None:
        """ValueError for a sequence that is longer than the positions that were learned."""
        if length > self.longest:
            raise ValueError(
                f"length is {length}: it must be at most {self.length}, the positions that the model has learned"
            )

    @property
    def inner(self) -> int:
        """Width inside the MLP."""
        return self.hidden or 4 * self.width

    @property
    def kv_width(self) -> int:
        """Features of one token's keys, and of its values."""
        return self.width // self.heads * (self.kv_heads or self.heads)

    @property
    def block(self) -> int:
        """Parameters of one block: two norms, attention, MLP."""
        w, matrices = self.width, 3 if self.gated else 2
        weights = 2 * w * w + 2 * w * self.kv_width + matrices * w * self.inner
        if self.gated:
            return weights + 2 * w
        biases = w + self.inner + w + (w + 2 * self.kv_width if self.qkv_bias else 0)
        return weights + biases + 4 * w

    @property
    def block_tensors(self) -> tuple[int, ...]:
        """Numbers in each of a block's tensors, in order; their sum is ``block``. Queries, keys and values are one
        tensor, except where there is a gate."""
        w, kv, inner = self.width, self.kv_width, self.inner
        if self.gated:
            return (w, w * w, w * kv, w * kv, w * w, w, w * inner, w * inner, inner * w)
        qkv = (w * (w + 2 * kv), *([w + 2 * kv] if self.qkv_bias else []))
        return (w, w, *qkv, w * w, w, w, w, w * inner, inner, inner * w, w)

    @property
    def output(self) -> int:
        """Parameters of the output layer, and of the norm before it: what backward comes to first."""
        return self.vocabulary * self.width + self.norm

    @property
    def norm(self) -> int:
        return self.width if self.gated else 2 * self.width

    @property
    def root(self) -> int:
        """Parameters in no block: embeddings, last norm, output layer."""
        embeddings = (self.vocabulary + self.length * self.positions) * self.width
        return embeddings + self.norm + (0 if self.tied else self.vocabulary * self.width)

    @property
    def parameters(self) -> int:
        return self.layers * self.block + self.root


def of_toy(config: TransformerConfig) -> Model:
    """This chapter's Transformer of that config, as a ``Model``."""
    return Model(
        "toy", config.layers, config.width, config.heads, config.length, config.vocabulary,
        tied=config.tied, qkv_bias=False, source="d2l_utils.transformer",
    )  # fmt: skip


def sizes_of(model: object) -> Model:
    """Those sizes, or the preset of that name. ValueError when ``model`` is neither."""
    if isinstance(model, Model):
        return model
    if not isinstance(model, str) or model not in PRESETS:
        raise ValueError(f"model is {model!r}: it must be one of {', '.join(PRESETS)}, or sizes")
    return PRESETS[model]


def whole(name: str, value: object, least: int) -> int:
    """``value``, when it is a whole number of at least ``least``; else ValueError, which names the field."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}: it must be a whole number of at least {least}")
    return value


def number(name: str, value: object, zero: bool) -> None:
    """ValueError that names the field when it is not a number above 0; zero: not a finite one from 0 on."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (0 <= value < math.inf if zero else value > 0)
    ):
        raise ValueError(f"{name} is {value!r}: it must be a number {'of at least' if zero else 'above'} 0")


def own(**sizes: object) -> Model:
    """A model of one's own sizes, by the names of ``Model``. ValueError names the size that does not fit."""
    names = {field.name for field in fields(Model)}
    if unknown := sorted(sizes.keys() - names):
        raise ValueError(f"{unknown[0]}: a model has no such size; allowed: {', '.join(sorted(names))}")
    return Model(**{"name": "own", "source": "own sizes", **sizes})  # type: ignore[arg-type]


_GPT2 = "GPT-2 (Radford et al. 2019), model card openai-community/gpt2"
_MEGATRON = "Narayanan et al. 2021 (arXiv 2104.04473), table 1"
_LLAMA = "LLaMA (arXiv 2302.13971), table 2"
_LLAMA3 = "Llama 3 (arXiv 2407.21783), table 3"


def _all() -> Iterator[Model]:
    yield Model("gpt2", 12, 768, 12, 1024, 50257, published=124e6, source=_GPT2)
    yield Model("gpt2-xl", 48, 1600, 25, 1024, 50257, published=1542e6, source="GPT-2 (Radford et al. 2019), table 2")
    llama = {"gated": True, "positions": False, "tied": False}
    yield Model(
        "tinyllama-1.1b", 22, 2048, 32, 2048, 32000, kv_heads=4, hidden=5632, published=1.1e9,
        source="TinyLlama (arXiv 2401.02385)", **llama,
    )  # fmt: skip
    for name, layers, width, heads, hidden, count in (
        ("llama-7b", 32, 4096, 32, 11008, 6.7e9),
        ("llama-13b", 40, 5120, 40, 13824, 13.0e9),
        ("llama-33b", 60, 6656, 52, 17920, 32.5e9),
        ("llama-65b", 80, 8192, 64, 22016, 65.2e9),
    ):
        yield Model(name, layers, width, heads, 2048, 32000, hidden=hidden, published=count, source=_LLAMA, **llama)
    for name, layers, width, heads, hidden, count in (
        ("llama3-8b", 32, 4096, 32, 14336, 8e9),
        ("llama3-70b", 80, 8192, 64, 28672, 70e9),
        ("llama3-405b", 126, 16384, 128, 53248, 405e9),
    ):
        yield Model(
            name, layers, width, heads, 8192, 128256, kv_heads=8, hidden=hidden, published=count,
            source=_LLAMA3, **llama,
        )  # fmt: skip
    yield Model(
        "gpt3-175b", 96, 12288, 96, 2048, 50257, published=174.6e9, source="GPT-3 (arXiv 2005.14165), table 2.1"
    )
    for name, layers, width, heads, count in (
        ("megatron-7.5b", 36, 4096, 32, 7.5e9),
        ("megatron-39b", 48, 8192, 64, 39.1e9),
        ("megatron-530b", 105, 20480, 128, 529.6e9),
        ("megatron-1t", 128, 25600, 160, 1008.0e9),
    ):
        yield Model(name, layers, width, heads, 2048, 51200, published=count, source=_MEGATRON)


PRESETS = {model.name: model for model in sorted(_all(), key=lambda model: model.parameters)}
