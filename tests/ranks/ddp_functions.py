"""What the ranks of test_ddp_cases run. Each function is one mistake that people make with DDP, and its cure."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from chapter19_9.checks import check_gradients, check_optimizer, check_same
from chapter19_9.sampling import check_sampler, distinct_mean
from chapter19_9.train import average_gradients
from d2l_utils.agree import largest_difference, ranks_agree


def one_weight():
    return nn.Linear(1, 1, bias=False)


def past_ddp(through_ddp):
    """Rank k's input is k + 1, so that is its own gradient. Calling model.module goes past DDP."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(one_weight())
    x = torch.tensor([[dist.get_rank() + 1.0]])
    (ddp if through_ddp else ddp.module)(x).sum().backward()
    torch.optim.SGD(ddp.parameters(), lr=0.1).step()
    return ddp.module.weight.grad.item(), ranks_agree(ddp), largest_difference(ddp)


def gradient_storages():
    """(gradients, distinct storages behind them, memory that one more backward takes, parameter bytes)."""
    from chapter19_9.strategies import ddp
    from d2l_utils.memory import PeakMemory

    model = ddp.shard(nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)]), torch.device("cpu"))
    x = torch.ones(1, 256)
    for _ in range(2):
        model(x).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    with PeakMemory("cpu") as peak:
        model(x).sum().backward()
    pointers = {gradient.untyped_storage().data_ptr() for gradient in gradients}
    return len(gradients), len(pointers), peak.bytes, sum(p.nbytes for p in model.parameters())


class Branches(nn.Module):
    """Only the first of its layers is used."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = one_weight(), one_weight()

    def forward(self, x):
        return self.used(x)


def unused_layer(find):
    """Two steps; returns the step that failed, its error, and what check_gradients said after the first."""
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=find)
    said = ""
    for step in range(2):
        try:
            ddp(torch.ones(1, 1)).sum().backward()
        except RuntimeError as error:
            return step, str(error), said
        if step == 0:
            try:
                check_gradients(ddp.module)
            except ValueError as error:
                said = str(error)
    return None, "", said


def uneven_batches(how):
    """Rank k has 3 + k batches."""
    from torch.distributed.algorithms.join import Join

    torch.manual_seed(0)
    ddp = DistributedDataParallel(one_weight())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    mine = 3 + dist.get_rank()

    def steps(count):
        for step in range(count):
            optimizer.zero_grad()
            ddp(torch.full((1, 1), 1.0 + step)).sum().backward()
            optimizer.step()

    if how == "check":
        steps(check_same(mine, "batches"))
    elif how == "join":
        with Join([ddp]):
            steps(mine)
    else:
        steps(mine)
        return None
    return mine, ranks_agree(ddp)


def sampled(size, epochs, set_epoch, shuffle, drop_last=False):
    """Indices that this rank draws in each epoch, and the mean of them with and without repeats over all ranks."""
    from torch.utils.data.distributed import DistributedSampler

    sampler = check_sampler(DistributedSampler(range(size), shuffle=shuffle, drop_last=drop_last))
    drawn = []
    for epoch in range(epochs):
        if set_epoch:
            sampler.set_epoch(epoch)
        drawn.append(list(sampler))
    sums = torch.tensor([float(sum(drawn[0])), float(len(drawn[0]))])
    dist.all_reduce(sums)
    return drawn, (sums[0] / sums[1]).item(), distinct_mean(drawn[0], drawn[0])


def loss_of(reduction, scale=1.0):
    """The gradient of a loss over this rank's part of 4 samples."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(one_weight())
    x = torch.arange(1.0, 5.0).reshape(4, 1).chunk(dist.get_world_size())[dist.get_rank()]
    (nn.functional.mse_loss(ddp(x), x, reduction=reduction) * scale).backward()
    return ddp.module.weight.grad.item()


def buffers():
    """Rank k feeds k + 1. BatchNorm's running mean after one and after two training forwards."""
    ddp = DistributedDataParallel(nn.BatchNorm1d(1))
    x = torch.full((4, 1), dist.get_rank() + 1.0)
    seen = []
    for _ in range(2):
        ddp(x)
        agree = ranks_agree(ddp.module.buffers()), ranks_agree(ddp.parameters()), ranks_agree(ddp)
        seen.append((ddp.module.running_mean.item(), *agree))
    return seen


def stale_optimizer():
    """The optimizer was made for weights that the model no longer has."""
    model = one_weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.weight = nn.Parameter(model.weight.detach().clone())
    check_optimizer(DistributedDataParallel(model), optimizer)


def one_without_gradient():
    """Only rank 0 used its weight before averaging by hand."""
    model = one_weight()
    if dist.get_rank() == 0:
        model(torch.ones(1, 1)).sum().backward()
    average_gradients(model)


def differences(values):
    """largest_difference, ranks_agree of this rank's own values, given for each rank."""
    tensors = [torch.tensor(part) for part in values[dist.get_rank()]]
    return largest_difference(tensors), ranks_agree(tensors)
