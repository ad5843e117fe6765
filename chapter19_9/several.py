"""Several trainings in one launch.

runs = launch(train_each, world_size=2, ways={"ddp": {}, "zero3": {}}, steps=3).results[0]
runs["zero3"].losses
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chapter19_9.train import Result, train

__all__ = ["train_each"]


def train_each(ways: Mapping[str, Mapping[str, Any]], **settings: Any) -> dict[str, Result]:
    """One training after the other on the same ranks, results by label; a launch takes longer than a short training.

    ways: by label, what differs: arguments of ``train``. The label is the strategy where they name none. settings: what
    they share. Raises what ``train`` raises.
    """
    return {label: train(**{"strategy": label, **settings, **way}) for label, way in ways.items()}
