"""What ranks say of the accelerator's driver, for test_driver.py."""


def driver():
    import os

    import torch

    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK", "D2L_RESTORE")
    return {
        "bad fork": torch._C._cuda_isInBadFork(),
        "available": torch.cuda.is_available(),
        "count": torch.cuda.device_count(),
        "environment": {name: os.environ[name] for name in names if name in os.environ},
    }


def trains_on_the_cpu(folder):
    """What torch itself does on the first device that it sees: AdamW, a default mesh, a checkpoint."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.AdamW([weight]).step()
    model = fully_shard(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    dcp.save({"weight": weight.detach()}, checkpoint_id=folder)
    return next(model.parameters()).device.type, torch.cuda.is_initialized()
