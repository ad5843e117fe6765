"""What a chapter about many processes needs: launching, devices, records, a toy model, pictures.

Names are imported when first used (PEP 562), so that `import d2l_utils` costs neither torch nor a tenth of a second.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d2l_utils.launching.errors import LaunchError, LaunchStopped, LaunchTimeout
    from d2l_utils.launching.launcher import Run, launch, warm_up

_WHERE = {
    "launch": "launching.launcher",
    "Run": "launching.launcher",
    "warm_up": "launching.launcher",
    "LaunchError": "launching.errors",
    "LaunchStopped": "launching.errors",
    "LaunchTimeout": "launching.errors",
}

__all__ = ["LaunchError", "LaunchStopped", "LaunchTimeout", "Run", "launch", "warm_up"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'd2l_utils' has no attribute {name!r}")
    module = importlib.import_module(f"d2l_utils.{_WHERE[name]}")
    # All names of the module at once: one import serves them all.
    globals().update({key: getattr(module, key) for key, where in _WHERE.items() if where == _WHERE[name]})
    return globals()[name]


def __dir__() -> list[str]:
    return __all__
