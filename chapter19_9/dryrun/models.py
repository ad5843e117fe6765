"""A Transformer of any published shape, for tensors that have no data: the sizes of ``choosing.presets`` as modules.

What it computes with and keeps are what ``choosing.cost`` says in its docstring: pre-norm blocks, fused attention, no
dropout, the loss in 32 bits. Rotary positions have no parameters, save nothing for backward, and are left out. The
fields of the chapter's own Transformer are its names here too.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from chapter19_9.choosing.presets import Model


class Norm(nn.Module):
    """Stands for RMSNorm: LayerNorm's operation without a bias. On a CPU torch takes RMSNorm apart and keeps 32-bit copies
    of its input, which a GPU's fused one does not; this one keeps 4 bytes a token more than that."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight)


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to its input. (batch, length, width) -> the same shape."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        width, kv, inner, bias = model.width, model.kv_width, model.inner, not model.gated
        qkv_bias = bias and model.qkv_bias
        self.features, self.gated = width // model.heads, model.gated
        norm = Norm if model.gated else nn.LayerNorm
        self.norm1 = norm(width)
        self.q = nn.Linear(width, width, bias=qkv_bias)
        self.k, self.v = (nn.Linear(width, kv, bias=qkv_bias) for _ in range(2))
        self.out = nn.Linear(width, width, bias=bias)
        self.norm2 = norm(width)
        if model.gated:
            self.gate = nn.Linear(width, inner, bias=bias)
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.attention(self.norm1(x)))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y) if self.gated else F.gelu(self.up(y)))

    def attention(self, x: Tensor) -> Tensor:
        """Queries of several heads share keys and values where there are fewer of them."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.features)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return mixed.transpose(1, 2).flatten(2)


class Shaped(nn.Module):
    """``model(tokens, targets)``: (batch, length) int64 each -> the mean loss, a scalar."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocabulary, model.width)
        self.positions = nn.Embedding(model.length, model.width) if model.positions else None
        block = Block(
            model
        )  # one to copy: of eighty, torch's first weights take a second even where they have no memory
        self.blocks = nn.ModuleList(deepcopy(block) for _ in range(model.layers))
        self.norm = (Norm if model.gated else nn.LayerNorm)(model.width)
        self.head = nn.Linear(model.width, model.vocabulary, bias=False)
        if model.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
