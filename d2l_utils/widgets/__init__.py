"""Panels for lessons; each is a widget, and a PNG with stable text wherever widgets do not run."""

from d2l_utils.widgets.bars import MemorySlider
from d2l_utils.widgets.batch import BatchPanel
from d2l_utils.widgets.collectives import CollectiveExplorer
from d2l_utils.widgets.form import FormPanel
from d2l_utils.widgets.lifecycle import ShardLifecycle
from d2l_utils.widgets.live import LivePanel

__all__ = ["BatchPanel", "CollectiveExplorer", "FormPanel", "LivePanel", "MemorySlider", "ShardLifecycle"]
