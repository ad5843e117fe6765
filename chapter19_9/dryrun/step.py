"""One step of a pretended rank: the strategy's own ``shard`` and ``optimizer``, the training loop's own forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from chapter19_9.dryrun.accounts import Accounts
from chapter19_9.dryrun.models import Shaped
from chapter19_9.dryrun.outcome import Collective, Moment
from chapter19_9.dryrun.plan import Plan
from chapter19_9.precision import Mixed, checkpoint_blocks
from chapter19_9.strategies import get, shards
from chapter19_9.theory import STATES, States
from chapter19_9.train import forward_backward
from d2l_utils.transformer import Transformer

Tell = Callable[[str, float], None]  # what begins, and what part of the whole is done


def pretend(plan: Plan, tell: Tell) -> tuple[int, States, tuple[Moment, ...], tuple[Collective, ...]]:
    """(parameters, rest, curve, collectives) of ``DryRun``. Needs a process without a process group of its own."""
    facts, cpu = get(plan.strategy), torch.device("cpu")
    module, mixed = facts.load(), Mixed(plan.precision, facts, cpu)
    settings = {**mixed.settings, **plan.options}
    with pretended_group(plan.rank, plan.world_size):
        tell("model", 0.0)
        with torch.device("meta"):
            model: nn.Module = Transformer(plan.model) if plan.is_toy else Shaped(plan.sizes)  # type: ignore[arg-type]
        count = sum(parameter.numel() for parameter in model.parameters())
        if plan.checkpointing:
            checkpoint_blocks(model)
        tell("shard", 0.05)
        accounts = Accounts()
        rows = facts.cut == "rows"
        if rows:  # as FSDP2 has it for models that fit nowhere: first cut, then give memory to what is kept
            with cutting_one():
                model = module.shard(model, cpu, **settings)
        with accounts:
            materialize(model)
            if not rows:
                with converting_in_place():
                    model = module.shard(model, cpu, **settings)
            optimizer = module.optimizer(model, 1e-3)
            step(plan, accounts, model, optimizer, mixed, module, tell)
            rest = States(*(accounts.held(state) for state in STATES))
    return count, rest, accounts.curve(), accounts.collectives


@contextmanager
def pretended_group(rank: int, n: int) -> Iterator[None]:
    """A process group whose collectives reach nobody."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=n, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Chunks:
    """What ``torch.chunk`` makes, and empty ones behind it, each when it is asked for."""

    def __init__(self, tensor: Tensor, n: int, dim: int) -> None:
        self.tensor, self.dim, self.rows = tensor, dim, tensor.size(dim)
        self.each = -(-self.rows // n)

    def __getitem__(self, number: int) -> Tensor:
        first = number * self.each
        if first >= self.rows:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, first, min(self.each, self.rows - first))


@contextmanager
def cutting_one() -> Iterator[None]:
    """FSDP2 cuts a view of each parameter for every rank, and keeps one of them: of a thousand that takes its time."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    plain = getattr(_fsdp_param, "_chunk_with_empty", None)
    if plain is not None:  # a private name: where there is none, it takes longer
        _fsdp_param._chunk_with_empty = Chunks  # type: ignore[assignment]
    try:
        yield
    finally:
        if plain is not None:
            _fsdp_param._chunk_with_empty = plain


def materialize(model: nn.Module) -> None:
    """From the meta device to fake memory; tied weights stay tied, which ``to_empty`` alone would undo."""
    entries = [entry for _, entry in shards.entries(model)]
    if isinstance(entries[0].parameter, DTensor):
        model.to_empty(device="cpu")
    for entry in entries:
        (first, name), kept = entry.places[0], entry.parameter
        sharded = isinstance(kept, DTensor)
        own = getattr(first, name) if sharded else nn.Parameter(torch.empty(kept.shape), kept.requires_grad)
        for module, other in entry.places:
            setattr(module, other, own)


@contextmanager
def converting_in_place() -> Iterator[None]:
    """``model.to`` gives fake parameters other memory. nn.Module's own way swaps the tensors, which fake mode forbids."""
    plain = nn.Module._apply

    def apply(module: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.data = convert(tensor.data)
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = plain  # type: ignore[method-assign]


def step(
    plan: Plan, accounts: Accounts, model: nn.Module, optimizer: Any, mixed: Mixed, strategy: Any, tell: Tell
) -> None:
    """Forward, backward, optimizer, each mark of which ``tell`` hears of."""
    tokens, targets = (torch.zeros(plan.micro_batch, plan.tokens, dtype=torch.long) for _ in range(2))
    blocks = [model.get_submodule(name) for name in shards.blocks(model)]
    stretches = 2 * len(blocks) + 5

    def mark(name: str, phase: str) -> None:
        accounts.mark(name, phase)
        tell(name, 0.2 + 0.8 * len(accounts.marks) / stretches)

    for i, block in enumerate(blocks):
        # before the strategy's own hooks, so that what they gather belongs to the block
        block.register_forward_pre_hook(_entering(mark, i), prepend=True)
        block.register_forward_hook(_leaving(mark, i, last=i == len(blocks) - 1), prepend=True)

    def backward(loss: Tensor) -> None:
        mark("backward of the loss", "backward")
        loss.backward()

    with accounts.watch([tokens, targets]):
        accounts.mark("start", "forward")
        accounts.label("parameters", model.parameters())
        accounts.label("gradients", standing(model))
        accounts.label("optimizer", states_of(optimizer))
        mark("forward of the root", "forward")
        forward_backward(model, tokens, targets, [plan.micro_batch], mixed=mixed, backward=backward)
        mark("optimizer", "optimizer")
        mixed.step(optimizer)
        accounts.label("parameters", model.parameters())  # FSDP2's first forward pads uneven shards
        accounts.label("gradients", strategy.gradient_parts(model))
        accounts.label("optimizer", states_of(optimizer))


def standing(model: nn.Module) -> list[Tensor]:
    """Gradients that have memory before backward."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def states_of(optimizer: Any) -> list[Tensor]:
    """Tensors of the optimizer's state, its 32-bit weights among them where they are a copy."""
    found: list[Tensor] = []
    for state in optimizer.state.values():
        found += [state] if isinstance(state, Tensor) else [each for each in state.values() if isinstance(each, Tensor)]
    return found


def _entering(mark: Callable[[str, str], None], number: int) -> Callable[..., None]:
    def enters(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        mark(f"forward of block {number}", "forward")
        if number == 0 and inputs[0].requires_grad:
            inputs[0].register_hook(lambda _: mark("backward of the root", "backward"))

    return enters


def _leaving(mark: Callable[[str, str], None], number: int, last: bool) -> Callable[..., None]:
    def leaves(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda _: mark(f"backward of block {number}", "backward"))
        if last:
            mark("loss", "forward")

    return leaves
