"""Each collective on real ranks, drawn as boxes before and after."""

import threading
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from d2l_utils.collectives import FINDINGS, NAMES, check, exchange
from d2l_utils.plots import boxes
from d2l_utils.widgets.live import LivePanel


class CollectiveExplorer(LivePanel):
    """Choose a collective and a world size; each release launches ranks and draws what they returned."""

    def __init__(
        self,
        collective: str = "all_reduce",
        *,
        world_size: int | None = None,
        world_sizes: Sequence[int] = (1, 2, 3, 4, 8),
    ) -> None:
        check(collective)
        start: dict[str, Any] = {"collective": collective}
        if world_size is not None:
            start["world_size"] = world_size
        super().__init__(
            _run,
            _draw,
            {"collective": NAMES},
            world_sizes=world_sizes,
            start=start,
            title="collective explorer",
        )


def _run(world_size: int, collective: str, stop: threading.Event) -> dict[str, Any]:
    from d2l_utils import launch

    run = launch(exchange, world_size=world_size, output="quiet", stop=stop, collective=collective)
    return {
        "collective": collective,
        "before": [result["before"] for result in run.results],
        "after": [result["after"] for result in run.results],
    }


def _draw(result: dict[str, Any]) -> Figure:
    name = result["collective"]
    return boxes(result["before"], result["after"], operation=name, title=FINDINGS[name])
