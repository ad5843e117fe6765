"""ZeRO stage 3 by hand: everything is sharded, and a unit has its weights only while it computes.

Shards parameters, gradients and optimizer states, unit by unit: a unit is one block, or all that is in no block.
Hooks around each unit all-gather its weights before forward and free them after it, all-gather them again
before its backward, and after it free them; then its gradients are reduced to their owners (a reduce-scatter,
then / N). The optimizer is an ordinary one: it sees shards only. Costs (M_P + M_G + M_O) / N on every rank at
rest, and (N-1)/N (2 M_P + M_G) sent by each rank in every forward and backward.
API: ``torch.distributed``. Paper: ZeRO (arXiv 1910.02054), P_os+g+p.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from chapter19_9.strategies import outputs, shards
from chapter19_9.strategies.ring import How, reduce_scatter
from chapter19_9.strategies.shards import Flat, full_state_dict, gathered, gradient_parts, load_full, optimizer

__all__ = ["full_state_dict", "gathered", "gradient_parts", "load_full", "optimizer", "shard"]


class Gathered(torch.autograd.Function):
    """Shard in, whole flat vector out; backward is its counterpart: whole gradient in, averaged shard out."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, flat: FreedFlat) -> Tensor:
        ctx.flat = flat
        return flat.whole.data  # the same memory, but autograd must not mind that it is filled again

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        flat = ctx.flat
        flat.computed()
        part = gradient.new_empty(flat.layout.shard)
        reduce_scatter(part, gradient.contiguous(), flat.how)
        return part.div_(flat.layout.n).to(flat.shard.dtype), None


class FreedFlat(Flat):
    """A flat vector whose whole has no memory, except between ``fetch`` and ``free``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.work: Any = None
        self.computed: Any = self.free
        self.whole = self.shard.new_empty(self.layout.n * self.layout.shard, dtype=self.dtype)
        self.free()
        for entry in self.entries:  # from here on only the shard is a parameter
            for module, name in entry.places:
                delattr(module, name)

    @torch.no_grad()
    def fetch(self) -> None:
        """Begin to all-gather, unless the whole is there or on its way."""
        storage = self.whole.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.whole.numel() * self.whole.element_size())
            self.work = shards.all_gather(self.whole, self.layout.own(self.whole).copy_(self.shard), async_op=True)

    def wait(self) -> None:
        if self.work:
            self.work.wait()
        self.work = None

    def use(self) -> None:
        """Put views of the whole where the modules look for their weights; tied places get the same one."""
        whole = Gathered.apply(self.shard, self) if self.trained else self.whole.data
        for entry, view in zip(self.entries, self.layout.unpack(whole), strict=True):
            for module, name in entry.places:
                setattr(module, name, view)

    def free(self) -> None:
        self.wait()
        self.whole.untyped_storage().resize_(0)


class Unit:
    """A module and its flat vectors: fetched before it computes, freed after."""

    then: Unit | None = None  # what to fetch ahead in forward
    before: Unit | None = None  # the same in backward

    def __init__(self, module: nn.Module, flats: list[FreedFlat]) -> None:
        self.flats, self.busy = flats, 0
        for i, flat in enumerate(flats):
            module.register_parameter(f"shard{i}", flat.shard)
            flat.computed = partial(self.computed, flat)
        # around hooks of the reader's own, such as spectral_norm's, which use the weights
        module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self.after_forward, with_kwargs=True, always_call=True)

    def fetch(self, ahead: Unit | None) -> None:
        for flat in [*self.flats, *(ahead.flats if ahead else [])]:
            flat.fetch()
        for flat in self.flats:
            flat.wait()

    def before_forward(self, module: nn.Module, inputs: Any, named: Any) -> None:
        self.given = outputs.versions(inputs, named)
        self.fetch(self.then)
        for flat in self.flats:
            flat.use()

    def after_forward(self, module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
        self.free()
        # a block may put what it made into a list or dict that it was given
        returned = [output, *filter(outputs.is_container, [*inputs, *named.values()])]
        for tensor in outputs.made_by(self.flats[0].unit, returned, self.given) if self.flats else ():
            tensor.register_hook(self.before_backward)

    def before_backward(self, gradient: Tensor) -> None:
        self.busy = sum(flat.trained for flat in self.flats)
        self.fetch(self.before)
        # whatever backward does not come to, such as a unit that is all frozen, is freed at its end
        torch.autograd.Variable._execution_engine.queue_callback(self.free)

    def computed(self, flat: FreedFlat) -> None:
        """Backward is done with this flat vector; frozen ones go with the last."""
        flat.free()
        self.busy -= 1
        if not self.busy:
            self.free()

    def free(self) -> None:
        for flat in self.flats:
            flat.free()


def shard(
    model: nn.Module,
    device: torch.device,
    *,
    dtype: torch.dtype | str = torch.float32,
    group: shards.Group | None = None,
    reduce_scatter: How = "auto",
    prefetch: bool = False,
) -> nn.Module:
    """Keep this rank's shard of each unit. The model stays itself; call the model, not a block of it.

    prefetch: all-gather the next block while this one computes. The others as in ``zero1.shard``.
    """
    shards.broadcast(model.to(device))
    make = partial(FreedFlat, dtype=shards.element_type(dtype), how=reduce_scatter)
    names = shards.blocks(model)
    flats: list[Any] = shards.flatten(model, make, names, group, frozen=True)
    units = [Unit(model.get_submodule(name), [flat for flat in flats if flat.unit == name]) for name in ["", *names]]
    for i, unit in enumerate(units if prefetch else []):
        unit.then, unit.before = [*units, None][i + 1], units[i - 1] if i != 1 else None
    return model
