"""What the ranks of test_zero_cases run: a model of awkward sizes trained by hand-written ZeRO, and ZeRO's known traps."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from chapter19_9 import strategies
from chapter19_9.checks import check_optimizer
from chapter19_9.strategies import shards
from d2l_utils.agree import ranks_agree
from d2l_utils.memory import held

BY_HAND = ("zero1", "zero2", "zero3")
CPU = torch.device("cpu")


class Scale(nn.Module):
    """A scalar and three numbers: fewer elements than ranks."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.1, -0.2, 0.3]))

    def forward(self, x):
        return x * self.scale + self.shift


class Mix(nn.Module):
    """Its second matrix is another block's as well; its first is frozen in one of them."""

    def __init__(self, shared):
        super().__init__()
        self.inner = nn.Linear(3, 5)
        self.outer = nn.Linear(5, 3, bias=False)
        self.outer.weight = shared

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(x)))


class Awkward(nn.Module):
    """Scalars, sizes that no number of ranks divides, ties in the root and across blocks, a frozen block, a buffer."""

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(7, 3)
            shared = nn.Parameter(torch.randn(3, 5) * 0.3)
            self.blocks = nn.ModuleList([Scale(), Mix(shared), nn.Sequential(nn.Linear(3, 3)), Mix(shared)])
            self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.tokens.weight
        self.blocks[2].requires_grad_(False)
        self.blocks[3].inner.weight.requires_grad_(False)
        self.register_buffer("temperature", torch.tensor(0.7))

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) / self.temperature


def matrices_and_others(name, parameter):
    return "matrices" if parameter.dim() > 1 else "others"


MAKERS = {"adamw": (torch.optim.AdamW, {"weight_decay": 0.3}), "sgd": (torch.optim.SGD, {"momentum": 0.9})}
OTHERS = {"weight_decay": 0.0, "lr": 0.02}


def data(step):
    """12 samples for all ranks together: (tokens, targets)."""
    tokens = torch.arange(12) * 5 + step
    return tokens % 7, (tokens * 3 + 1) % 7


def plain(kind, steps=4):
    """The same training in one process, in plain torch: (losses, norms, gradients, weights)."""
    model = Awkward()
    make, common = MAKERS[kind]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = {"matrices": [], "others": []}
    for name, parameter in trained.items():
        groups[matrices_and_others(name, parameter)].append(parameter)
    settings = [{"params": groups["matrices"]}, {"params": groups["others"], **OTHERS}]
    optimizer = make(settings, lr=0.05, **common)
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        tokens, targets = data(step)
        loss = F.cross_entropy(model(tokens), targets)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.4).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: p.grad for name, p in trained.items()}, dict(model.state_dict())


def awkward(kinds=tuple(MAKERS), steps=4, prefetch=False):
    """{(strategy, optimizer): what ``plain`` returns, the state dict's names elsewhere, whether ranks agree}."""
    rank, n = shards.place()
    results = {}
    for name in BY_HAND:
        for kind in kinds:
            module, (make, common) = strategies.get(name).load(), MAKERS[kind]
            options = {"prefetch": True} if prefetch and name == "zero3" else {}
            model = module.shard(Awkward(seed=rank), CPU, group=matrices_and_others, **options)
            optimizer = module.optimizer(model, 0.05, make=make, options={"others": OTHERS}, **common)
            check_optimizer(model, optimizer)
            losses, norms = [], []
            for step in range(steps):
                optimizer.zero_grad()
                tokens, targets = (part.chunk(n)[rank] for part in data(step))
                loss = F.cross_entropy(model(tokens), targets)
                loss.backward()
                norms.append(shards.global_norm(module.gradient_parts(model), 0.4))
                optimizer.step()
                mean = loss.detach() / n
                dist.all_reduce(mean)
                losses.append(mean.item())
            gradients = {key: tensor.clone() for key, tensor in module.gathered(model, gradients=True)}
            state = module.full_state_dict(model, to=n - 1)
            agree = ranks_agree([tensor for _, tensor in module.gathered(model)])
            results[f"{name} {kind}"] = (losses, norms, gradients, state, agree)
    return results


def reloaded(dtype="float32", stale=False):
    """{strategy: (loss after loading other weights, loss after one step from there)}, and of plain torch the same.

    stale: load with the mutant that forgets the shards.
    """
    from tests.ranks.mutants import stale_load

    tokens, targets = data(0)
    other = Awkward(seed=99)
    results = {}
    for name in BY_HAND:
        module = strategies.get(name).load()
        model = module.shard(Awkward(seed=1), CPU, dtype=dtype)
        optimizer = module.optimizer(model, 0.05)
        F.cross_entropy(model(tokens).float(), targets).backward()  # it has computed with its first weights
        optimizer.zero_grad()
        (stale_load if stale else module.load_full)(model, other.state_dict())
        loss = F.cross_entropy(model(tokens).float(), targets)
        loss.backward()
        optimizer.step()
        again = F.cross_entropy(model(tokens).float(), targets)
        results[name] = (loss.item(), again.item())
    expected = F.cross_entropy(other(tokens), targets)
    expected.backward()
    torch.optim.AdamW([p for p in other.parameters() if p.requires_grad], lr=0.05).step()
    results["plain"] = (expected.item(), F.cross_entropy(other(tokens), targets).item())
    return results


def consolidated():
    """ZeroRedundancyOptimizer's state dict, before and after consolidating it on rank 1: errors, or numbers of states."""
    from chapter19_9.strategies import zero_redundancy

    model = zero_redundancy.shard(nn.Linear(4, 3), CPU)
    optimizer = zero_redundancy.optimizer(model, 0.1)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()

    def ask():
        try:
            return len(optimizer.state_dict()["state"])
        except RuntimeError as error:
            return str(error)

    before = ask()
    optimizer.consolidate_state_dict(to=1)
    return before, ask()


def shares(rows, columns, others):
    """Bytes of optimizer states on this rank by ZeroRedundancyOptimizer and by zero1, for one weight and some others."""
    found = []
    for name in ("zero_redundancy", "zero1"):
        module = strategies.get(name).load()
        layers = [nn.Embedding(rows, columns), *(nn.Linear(columns, columns, bias=False) for _ in range(others))]
        model = module.shard(nn.Sequential(*layers), CPU)
        optimizer = module.optimizer(model, 0.1)
        for _ in range(2):
            model(torch.arange(2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        now = held(model, optimizer)
        found.append((now.optimizer, now.parameters))
    return found


def new_names_only():
    """Warnings of the collectives of hand-written ZeRO, with the backend's own reduce-scatter."""
    from chapter19_9.strategies.ring import reduce_scatter

    n = dist.get_world_size()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for how in ("ring", "direct", "backend"):
            reduce_scatter(torch.empty(2), torch.ones(2 * n), how)
        shards.all_gather(torch.empty(2 * n), torch.ones(2))
    return [str(warning.message) for warning in caught]


def scattered(n_elements):
    """This rank's part of the sum over ranks of (rank + 1) x (0, 1, 2, ...), each way, in place as well."""
    from chapter19_9.strategies.ring import reduce_scatter

    rank, n = shards.place()
    parts = {}
    for how in ("ring", "direct", "backend", "auto"):
        whole = (rank + 1.0) * torch.arange(float(n_elements * n))
        before, part = whole.clone(), torch.empty(n_elements)
        reduce_scatter(part, whole, how)
        untouched = whole.equal(before)
        own = whole.narrow(0, rank * n_elements, n_elements)
        reduce_scatter(own, whole, how)
        parts[how] = (part.tolist(), own.tolist(), untouched)
    return parts


def unused(strategy):
    """A block that forward leaves out."""

    class Skips(Awkward):
        def forward(self, tokens):
            return self.head(self.blocks[0](self.tokens(tokens)))

    module = strategies.get(strategy).load()
    model = module.shard(Skips(), CPU)
    optimizer = module.optimizer(model, 0.1)
    model(torch.arange(3)).sum().backward()
    optimizer.step()


def too_early(strategy):
    """The optimizer was made from the model before it was sharded."""
    model = Awkward()
    optimizer = torch.optim.AdamW(model.parameters())
    check_optimizer(strategies.get(strategy).load().shard(model, CPU), optimizer)
