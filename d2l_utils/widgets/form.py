"""Fields that are answered at once: change one, the answer and its pictures follow, an error stands beside its field."""

import contextlib
import html
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ipywidgets
from matplotlib.figure import Figure

from d2l_utils.widgets import parts

SCREEN_DPI = 110  # drawn anew at each change: fewer dots than a stored picture


class FormPanel:
    """Fields, their answer in words, and its pictures.

    Arguments:
        answer: ``answer(**values)`` computes at once (it launches nothing). A ValueError that begins with the name of a
            field is shown beside that field, any other under all.
        draw: ``draw(result)`` returns the figures, one under the other.
        fields: {name: allowed}; see :func:`d2l_utils.widgets.parts.knob`.
        title: names the panel in its text form.
        describe: ``describe(result)`` gives the answer's words, the same on every machine.

    The first answer's error is raised. Later, while a field is wrong, the older pictures stay, paled.
    """

    def __init__(
        self,
        answer: Callable[..., Any],
        draw: Callable[[Any], Sequence[Figure]],
        fields: Mapping[str, Any],
        *,
        title: str,
        describe: Callable[[Any], str],
    ) -> None:
        self._answer, self._draw, self._describe, self.title = answer, draw, describe, title
        self.fields = {name: parts.knob(name, allowed) for name, allowed in fields.items()}
        self.errors = {name: ipywidgets.HTML() for name in fields}
        self.status, self.words = ipywidgets.HTML(), ipywidgets.HTML()
        self.pictures = ipywidgets.HTML()
        cells = [
            ipywidgets.VBox([self.fields[name], self.errors[name]], layout={"margin": "0 0.8em 0 0"}) for name in fields
        ]
        bar = ipywidgets.HBox(cells, layout={"flex_flow": "row wrap", "align_items": "flex-start"})
        self.view = ipywidgets.VBox([bar, self.status, self.pictures, self.words])
        self.result: Any = None
        self.figures: list[Figure] = []
        self.error: ValueError | None = None
        self._lock, self._quiet, self._drawn = threading.RLock(), False, ""
        self.refresh()
        if self.error is not None:
            raise self.error
        for control in self.fields.values():
            control.observe(lambda change: self.refresh(), "value")

    @property
    def values(self) -> dict[str, Any]:
        """What the fields say now."""
        return {name: control.value for name, control in self.fields.items()}

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Set several fields inside it: they are answered once, at its end."""
        with self._lock:
            self._quiet = True
            try:
                yield
            finally:
                self._quiet = False
            self.refresh()

    def refresh(self) -> None:
        """Answer what the fields say now."""
        with self._lock:
            if self._quiet:
                return
            try:
                result = self._answer(**self.values)
                figures = list(self._draw(result))
            except ValueError as error:
                self.error = error
                self._refuse(error)
                return
            self.error, self.result, self.figures = None, result, figures
            for slot in (self.status, *self.errors.values()):
                slot.value = ""
            self._drawn = "".join(f"<div>{parts.image(figure, SCREEN_DPI)}</div>" for figure in figures)
            self.pictures.value = self._drawn
            self.words.value = _told(self._describe(result))

    def text(self) -> str:
        """The panel in words."""
        names = ", ".join(name.replace("_", " ") for name in self.fields)
        told = "" if self.result is None else self._describe(self.result)
        return f"[{self.title}; fields: {names}]\n{told}"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> parts.Bundle:
        return parts.bundle(self.view, self.figures[0] if self.figures else None, self.text())

    def _refuse(self, error: ValueError) -> None:
        message = str(error)
        name = next((name for name in self.fields if re.match(rf"{name}\b", message)), None)
        for field, slot in self.errors.items():
            slot.value = parts.beside(message) if field == name else ""
        self.status.value = "" if name else parts.failure(error)
        if self.figures:
            self.pictures.value = f'<div style="opacity:0.45">{self._drawn}</div>'
            self.words.value = ""


def _told(words: str) -> str:
    return f'<pre role="status" style="white-space:pre-wrap;line-height:1.4">{html.escape(words)}</pre>'
