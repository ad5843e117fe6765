"""What the ranks of test_fsdp_cases run. Each function is one thing that people meet with FSDP, and its cure."""

import warnings
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor

from chapter19_9 import strategies
from chapter19_9.checks import check_gradients
from chapter19_9.strategies import fsdp1, fsdp2, zero3
from chapter19_9.strategies.shards import flats_of, global_norm
from d2l_utils.launching.meanings import explained
from d2l_utils.memory import held
from d2l_utils.text import sequences
from d2l_utils.transformer import Transformer, TransformerConfig

CONFIG = TransformerConfig(layers=2, width=16, heads=2, length=8)
TIED = TransformerConfig(layers=2, width=16, heads=2, length=8, tied=True)
CPU = torch.device("cpu")


def said(function, *arguments):
    """(the error that a call raised, what it means), as text."""
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}", explained(error)
    return "", None


def text(count=1):
    rows = sequences(CONFIG.length, count)
    return rows[:, :-1], rows[:, 1:]


def without_a_device():
    """FSDP1 as documentation shows it, and with the device said."""
    bare = said(FullyShardedDataParallel, Transformer(CONFIG))[0]
    model = fsdp1.shard(Transformer(CONFIG), CPU)
    model(*text()).backward()
    return bare, global_norm(fsdp1.gradient_parts(model))


def tied_in_two_units():
    """Embeddings wrapped alone while the head has the same weight; then both in the root."""
    wrong = said(lambda: fsdp1.shard(Transformer(TIED), CPU, wrap=[nn.Embedding]))[0]
    model = fsdp1.shard(Transformer(TIED), CPU)
    optimizer = fsdp1.optimizer(model, 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(*text()).backward()
        optimizer.step()
    state = fsdp1.full_state_dict(model)
    return wrong, [bool(state["tokens.weight"].equal(state["head.weight"]))] if state else []


def saved(everywhere):
    """Names in the full state dict by rank; with ``everywhere`` False the mistake: only rank 0 asks for it."""
    model = fsdp1.shard(Transformer(CONFIG), CPU)
    names = []
    if everywhere or dist.get_rank() == 0:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            how = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
            with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, how):
                names = list(model.state_dict())
        old = [str(warning.message) for warning in caught]
    else:
        old = []
        dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = list(fsdp1.full_state_dict(model))
    return names, ours, old, [str(warning.message) for warning in caught]


def warned(names):
    """Warnings of a whole training with each strategy."""
    from chapter19_9.train import train

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for strategy in names:
            train(strategy, CONFIG, steps=2, batch=6)
    return [f"{warning.category.__name__}: {warning.message}" for warning in caught]


def old_names():
    """What the names that torch has replaced say; [] where they are the only ones."""
    if not hasattr(dist, "all_gather_single"):
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.all_gather_into_tensor(torch.empty(dist.get_world_size()), torch.ones(1))
    return [warning.category.__name__ for warning in caught]


def tied_groups():
    """What fully_shard makes of a weight that the embedding and the head share, sharded in four ways."""

    def loss_after(*steps):
        model = Transformer(TIED)
        for step in steps:
            step(model)
        return model(*text()).item()

    root = loss_after(fully_shard)
    apart = said(loss_after, lambda m: fully_shard(m.tokens), lambda m: fully_shard(m.head), fully_shard)
    only_one = said(loss_after, lambda m: fully_shard(m.tokens), fully_shard)
    together = loss_after(lambda m: fully_shard([m.tokens, m.head]), fully_shard)
    ours = fsdp2.shard(Transformer(TIED), CPU)(*text()).item()
    return Transformer(TIED)(*text()).item(), root, apart, only_one, together, ours


def uneven_rows():
    """Two layers whose rows do not divide by three ranks: local shapes, bytes, and a clipped step."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
    model = fsdp2.shard(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1)), CPU)
    fsdp2.load_full(model, plain.state_dict())
    x = torch.ones(2, 3)
    for each, parts in ((plain, None), (model, fsdp2.gradient_parts)):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        each(x).sum().backward()
        own = [p.grad for p in each.parameters()] if parts is None else parts(each)
        global_norm(own, 0.5, alone=parts is None)
        optimizer.step()
    whole = dict(fsdp2.gathered(model))
    apart = max((whole[name] - p).abs().max().item() for name, p in plain.named_parameters())
    now = held(model, optimizer)
    return [list(p.to_local().shape) for p in model.parameters()], now.parameters, now.needed.parameters, apart


def called_inside():
    """A child of a module that was sharded as a whole, called by itself."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model)
    return said(model[0], torch.ones(1, 4))


def loaded():
    """A plain state dict: with load_state_dict, then as it must be."""
    plain = Transformer(CONFIG)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2)
    expected = plain(*text()).item()
    model = fsdp2.shard(Transformer(CONFIG), CPU)
    wrong = said(model.load_state_dict, plain.state_dict())
    fsdp2.load_full(model, plain.state_dict())
    old = fsdp1.shard(Transformer(CONFIG), CPU)
    fsdp1.load_full(old, plain.state_dict())
    back = fsdp2.full_state_dict(model)
    same = all(back[name].equal(tensor) for name, tensor in plain.state_dict().items()) if back else None
    return wrong, expected, model(*text()).item(), old(*text()).item(), same


def after_forward(root):
    """Which parameters are whole after forward, by unit, and which after backward."""
    model = fsdp2.shard(Transformer(CONFIG), CPU, root=root)

    def whole():
        return sorted({name.split(".")[0] for name, p in model.named_parameters() if not isinstance(p, DTensor)})

    before = whole()
    loss = model(*text())
    between = whole()
    loss.backward()
    return before, between, whole()


def sharded_twice(strategy):
    """What a strategy's shard says of a model that it has sharded, and of one that has a sharded module in it."""
    module = strategies.get(strategy).load()
    model = module.shard(Transformer(CONFIG), CPU)
    outer = nn.Sequential(nn.Linear(2, 2), model)
    return said(module.shard, model, CPU)[0], said(module.shard, outer, CPU)[0]


def root_before_child():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model)
    fully_shard(model[0])


def sharded_then_wrapped():
    nn.parallel.DistributedDataParallel(fully_shard(nn.Linear(4, 4)))


def gathered_once():
    """A second backward of one graph, with weights that went after the first."""
    model = zero3.shard(Transformer(CONFIG), CPU)
    loss = model(*text())
    for flat in flats_of(model):
        flat.fetch = lambda: None
    loss.backward()


def without_its_device():
    FullyShardedDataParallel(Transformer(CONFIG))


def waiting(strategy):
    """(what check_gradients says after two passes that wait, after one more that does not, bytes of the whole gradient)."""
    module = strategies.get(strategy).load()
    plain = nn.Linear(6, 5)
    whole, model = sum(p.nbytes for p in plain.parameters()), module.shard(plain, CPU)
    with module.accumulating(model):
        for _ in range(2):
            model(torch.ones(2, 6)).sum().backward()
        inside = said(check_gradients, model)[0]
    model(torch.ones(2, 6)).sum().backward()
    return inside, said(check_gradients, model)[0], whole


def trained_waiting():
    """A training whose every backward waits."""
    from chapter19_9.train import train

    class Stuck:
        def __getattr__(self, name):
            return getattr(fsdp2, name)

        def shard(self, model, device):
            model = fsdp2.shard(model, device)
            model.set_requires_gradient_sync(False)
            return model

    with mock.patch.object(strategies.Strategy, "load", return_value=Stuck()):
        train("fsdp2", CONFIG, steps=2, batch=2)


def sums(collective):
    """Train where a collective gives the sum when it is asked for the average, and then see what came of it."""
    from chapter19_9.train import train

    name = {"reduce_scatter": "reduce_scatter_single", "all_reduce": "all_reduce"}[collective]
    right = getattr(dist, name)

    def wrong(*tensors, op=dist.ReduceOp.SUM, **more):
        return right(*tensors, op=dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op, **more)

    steps = []
    with mock.patch.object(dist, name, wrong), mock.patch("chapter19_9.train.forward_backward", steps.append):
        return said(lambda: train("fsdp2", CONFIG, steps=1, batch=dist.get_world_size()))[0], steps


def recorded_first_step():
    """Collectives of the first step that this process trains, and of one of a later training."""
    from chapter19_9.train import train

    def step():
        events = train("fsdp2", CONFIG, steps=1, batch=4, record_step=0).recording.events
        return [(event.name, event.bytes, event.sent_bytes) for event in events if event.kind == "collective"]

    return step(), step()


def norms(parts=2):
    """{call: this rank's answer} for the norm of the gradient of one batch, of which each rank has its part."""
    x, y = text(2 * parts)
    mine = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    found = {}
    for name in ("ddp", "fsdp1", "fsdp2"):
        model = strategies.get(name).load().shard(Transformer(CONFIG), CPU)
        model(x[mine], y[mine]).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        found[f"nn.utils, {name}"] = getattr(norm, "full_tensor", lambda norm=norm: norm)().item()
        if name == "fsdp1":
            found["model's, fsdp1"] = model.clip_grad_norm_(1e9).item()
    return found
