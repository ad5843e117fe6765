"""CPU tensors in the default group of ranks that run on GPUs; gloo stands in for NCCL."""

from d2l_utils import launch
from tests.ranks.group_functions import cpu_tensors


def test_cpu_tensors_travel_over_gloo_beside_a_backend_for_the_device():
    for rank, found in enumerate(launch(cpu_tensors, world_size=2, backend="cpu:gloo,cuda:gloo").results):
        assert found == {
            "all_reduce": [1.0, 1.0],
            "ring": 2.0 * rank,
            "auto": 2.0 * rank,
            "DDP": 0.5,
            "objects": [0, 1],
            "agree": True,
            "nothing agrees": True,
            "difference": 1.0,
        }


def test_a_group_for_the_device_alone_takes_none_of_them():
    """What the group was before. The test above would not see a group that takes everything."""
    for found in launch(cpu_tensors, world_size=2, backend="cuda:gloo").results:
        assert "No backend type associated with device type cpu" in found["all_reduce"]
        assert "No backend type associated with device type cpu" in found["DDP"]
