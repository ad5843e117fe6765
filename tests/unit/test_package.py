"""Importing d2l_utils is cheap, and its names are these."""

import subprocess
import sys

import d2l_utils


def test_import_costs_no_torch():
    code = (
        "import sys, d2l_utils\nfrom d2l_utils import launch, warm_up, LaunchError\n"
        "print([m for m in ('torch', 'dnnlpy', 'matplotlib', 'numpy') if m in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_exported_names():
    assert dir(d2l_utils) == ["LaunchError", "LaunchStopped", "LaunchTimeout", "Run", "launch", "warm_up"]
    assert all(getattr(d2l_utils, name).__name__ == name for name in dir(d2l_utils))
