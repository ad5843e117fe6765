"""What a widget that plays without a kernel leaves in the notebook, for pages that have none (see ``d2l_utils.book``)."""

import json
from typing import Any

from d2l_utils.notebooks.form import PLAYER

__all__ = ["stored"]


def stored(module: str, **state: Any) -> dict[str, Any]:
    """Output metadata, which no front end shows and nbval does not compare.

    Arguments:
        module: the widget's script, a file of this folder.
        state: what its model answers, by name; JSON-able. Stored as one line, floats to 5 digits.
    """
    return {PLAYER: {"module": module, "state": json.dumps(_short(state), separators=(",", ":"))}}


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    return [_short(one) for one in value] if isinstance(value, list | tuple) else value
