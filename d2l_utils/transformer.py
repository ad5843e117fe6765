"""A small causal Transformer over bytes: large enough to have layers to shard, small enough for four CPU
ranks.

Pre-norm blocks, GELU MLP of four times the width, scaled dot-product attention, no dropout. Every parameter
is drawn from a generator of its own, so the same seed gives the same weights whatever else used random
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a Transformer.

    layers, width, heads : number of blocks, features of a token, attention heads (heads divides width).
    length               : the longest sequence, in tokens.
    vocabulary           : number of different tokens; 256 for bytes.
    tied                 : the output layer uses the token embedding's own weight.
    frozen               : the position embedding takes no gradient.
    seed                 : the same seed gives the same weights.
    """

    layers: int = 4
    width: int = 64
    heads: int = 4
    length: int = 64
    vocabulary: int = 256
    tied: bool = False
    frozen: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "length", "vocabulary"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}: it must be a whole number of at least 1")
        if self.width % self.heads:
            raise ValueError(f"heads is {self.heads}: it must divide width, which is {self.width}")

    @property
    def parameter_count(self) -> int:
        """Number of parameters, counted by hand: 12 w^2 + 10 w in a block, the embeddings, the last norm,
        the output."""
        w = self.width
        block = 12 * w * w + 10 * w
        output = 0 if self.tied else self.vocabulary * w
        return self.layers * block + (self.vocabulary + self.length) * w + 2 * w + output


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to its input. (batch, length, width) -> the same
    shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        # no bias: softmax cancels a key's bias, so its gradient is rounding noise, which AdamW would blow up
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.attention(self.norm1(x)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attention(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same shape. Inside: (batch, heads, length, width / heads)."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).reshape(batch, length, width)


class Transformer(nn.Module):
    """Predicts the next byte.

    ``model(tokens)``          : tokens (batch, length) int64 -> logits (batch, length, vocabulary).
    ``model(tokens, targets)`` : the mean cross-entropy in nats, a scalar; targets have the shape of tokens.

    Neither result is a view: FSDP2 warns about a root module that returns one.
    Raises ValueError when ``tokens`` is not (batch, length) or longer than ``config.length``.
    """

    def __init__(self, config: TransformerConfig = TransformerConfig()) -> None:
        super().__init__()
        self.config = config
        # torch's layers draw their first weights from the global generator: put it back as it was
        with torch.random.fork_rng(devices=[]):
            self.tokens = nn.Embedding(config.vocabulary, config.width)
            self.positions = nn.Embedding(config.length, config.width)
            self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
            self.norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight
        if config.frozen:
            self.positions.weight.requires_grad_(False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Matrices from N(0, 0.02^2), what each block adds to its input scaled down by its depth; norms 1,
        biases 0."""
        generator = torch.Generator().manual_seed(self.config.seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0 if ".norm" in f".{name}" and name.endswith("weight") else 0.0)
                continue
            if parameter.is_meta:
                continue
            deep = name.endswith(("out.weight", "down.weight"))
            std = 0.02 / (2 * self.config.layers) ** 0.5 if deep else 0.02
            # drawn on the CPU, then copied: the same weights on every device
            parameter.copy_(torch.empty(parameter.shape, device="cpu").normal_(0.0, std, generator=generator))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        if tokens.dim() != 2 or tokens.shape[1] > self.config.length:
            raise ValueError(
                f"tokens has shape {tuple(tokens.shape)}: it must be (batch, length), "
                f"length at most {self.config.length}"
            )
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        # in float32 whatever computed the logits: in 16 bits a loss of 5.5 is a multiple of 1/32
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
