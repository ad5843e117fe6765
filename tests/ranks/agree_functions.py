"""What the ranks of test_agree run: tensors of many kinds, alike on all ranks or not, compared."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from d2l_utils.agree import largest_difference, ranks_agree, relative_difference


def pairs():
    """Kind of tensor -> (agree, largest difference), once alike on all ranks and once apart on the last one."""
    last = dist.get_rank() == dist.get_world_size() - 1

    def made(apart):
        odd = apart and last
        eye = torch.eye(4)
        eye[1, 2] = 2.0 * odd  # another number of non-zeros, too
        return {
            "coo": eye.to_sparse(),
            "csr": eye.to_sparse_csr(),
            "complex": torch.tensor([1 + 1j, 4 + 5j if odd else 1 + 1j]),
            "bool": torch.tensor([True, odd]),
            "integer": torch.tensor([2**24 + odd, 2**60]),
            "large integer": torch.tensor([2**60 + odd]),
            "ends": torch.tensor([torch.iinfo(torch.int64).max if odd else torch.iinfo(torch.int64).min]),
            "double": torch.tensor([1 + odd * 2**-40], dtype=torch.float64),
            "bfloat16": torch.tensor([1.0 + odd]).bfloat16(),
            "float8": torch.tensor([1.0 + odd]).to(torch.float8_e4m3fn),
            "quantised": torch.quantize_per_tensor(torch.tensor([1.0 + odd]), 0.5, 0, torch.quint8),
            "empty": torch.empty(0),
        }

    return {
        kind: tuple((ranks_agree([tensor]), largest_difference([tensor])) for tensor in (one, other))
        for (kind, one), other in zip(made(False).items(), made(True).values(), strict=True)
    }


def sharded(rows):
    """Placement -> (agree, largest difference, relative difference) of a DTensor of so many rows, as it should be made."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    whole, rank = torch.arange(3.0 * rows).reshape(rows, 3), dist.get_rank()
    tensors = {
        "shard": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "partial": DTensor.from_local(whole * (rank == 0), mesh, [Partial()]),
        "replicas": DTensor.from_local(whole.clone(), mesh, [Replicate()]),
        "other replicas": DTensor.from_local(whole + rank, mesh, [Replicate()], run_check=False),
    }
    return {
        name: (ranks_agree([t]), largest_difference([t]), relative_difference({"a": t}, {"a": whole}))
        for name, t in tensors.items()
    }


def unlike(what):
    """The error of each rank where only the last one's tensors cannot be compared, or are of another shape or type."""
    last = dist.get_rank() == dist.get_world_size() - 1
    tensors = {
        "lazy": nn.LazyLinear(2) if last else nn.Linear(2, 2),
        "meta": [torch.ones(1, device="meta" if last else "cpu")],
        "type": [torch.ones(1, dtype=torch.float64 if last else torch.float32)],
        "shape": [torch.ones(2 if last else 1)],
    }[what]
    errors = []
    for ask in (ranks_agree, largest_difference):
        try:
            errors.append(str(ask(tensors)))
        except ValueError as error:
            errors.append(str(error))
    return errors


def in_two_backends():
    """A group that serves two types of devices, as GPU ranks have it: what it says of its backend, and the answers."""
    group = dist.new_group(backend="cpu:gloo,cuda:gloo")
    ones = [torch.ones(2)]
    answers = [ranks_agree([], group), ranks_agree(ones, group), largest_difference(ones, group)]
    return [*answers, ranks_agree(parameter for parameter in ones)]
