"""What errors of torch mean that do not say it: a rank that ends with one says so under it.

The table is of torch's own messages, as torch 2.14 has them.
"""

from __future__ import annotations

import re
import traceback

# (what the message says, or functions that raised it say; what it means)
_MEANINGS = (
    (
        "mixed torch.Tensor and DTensor",
        "a part of a sharded model was called by itself: its weights are gathered when the module that fully_shard was "
        "applied to is called. Call that one. A plain state dict goes in with set_model_state_dict",
    ),
    (
        "shared with a parameter already managed|shared/tied parameters",
        "a tied weight is in two units: leave both its users in the root, or shard them together with "
        "fully_shard([one, other])",
    ),
    (
        r"data is not allocated yet|storage of size 0|size of tensor a \(0\)|expected size for first two dimensions"
        "|expected to be in states .*FORWARD_BACKWARD",
        "the weights were freed and not gathered again: a sharded unit has them only inside its own forward and "
        "backward. With retain_graph, or with a view that the unit returned and that was changed in place, its backward "
        "may begin unseen",
    ),
    (
        r"value was None when it should not be(?s:.*)\b_init_sharding_spec\b",
        "a module was sharded after one that contains it, so its weights are in shards already. Shard the children first, "
        "and the root last",
    ),
    (
        r"Operator c10d\.\S+ does not have a sharding strategy",
        "a collective was given a DTensor. If a model was being wrapped or sharded: this model is already sharded, so make "
        "a new one. Else give the collective the tensor's to_local()",
    ),
    (
        "non-CPU accelerator",
        "on CPU ranks FullyShardedDataParallel has to be told: device_id=rank_device()",
    ),
)


def explained(error: BaseException) -> str | None:
    """What an error of torch means, in a sentence or two; None when it is not one of these."""
    raised_in = " ".join(frame.name for frame in traceback.extract_tb(error.__traceback__))
    text = f"{error}\n{raised_in}"
    return next((meaning for pattern, meaning in _MEANINGS if re.search(pattern, text, re.IGNORECASE)), None)
