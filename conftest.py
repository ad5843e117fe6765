"""Says at once what is wrong when pytest runs in another environment than the chapter's."""

import importlib.util

import pytest

missing = [name for name in ("torch", "dnnlpy", "nbval", "d2l_utils") if importlib.util.find_spec(name) is None]
if missing:
    # Here and not in a hook: hooks come after pytest has stumbled over the options of missing plugins.
    pytest.exit(
        f"This Python lacks {', '.join(missing)}. Run `make test`, or use .venv/bin/python -m pytest.",
        returncode=4,
    )
