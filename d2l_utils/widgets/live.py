"""A lesson's run behind knobs: release one, the run repeats on real ranks and the figure redraws."""

import contextlib
import inspect
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets
from matplotlib.figure import Figure

from d2l_utils.garbage import collected_later
from d2l_utils.launching.turns import alone
from d2l_utils.widgets import parts
from d2l_utils.widgets.capture import printed_here

SETTLE = 0.1  # seconds of quiet after a release: a run of arrow keys is one released value
SHOW_LOG_EVERY = 0.25
LOG_LINES = 500  # the last ones; a run's whole output is in its own files


class LivePanel:
    """Knobs, a figure, a Stop button, and the error beside them.

    Arguments:
        run: `run(world_size=..., **knobs)` does the work, usually `launch(..., output="quiet")`, and returns
            anything. When it takes an argument `stop`, it gets a threading.Event to pass on to `launch`.
        draw: `draw(result)` returns a Figure. Called in the run's own thread: no pyplot.
        controls: {argument: allowed} beside the world size; see :func:`d2l_utils.widgets.parts.knob`.
        world_sizes: choices of the world size, or None for a panel without that knob.
        start: first values by argument; the world size starts at `device.default_world_size()`.
        title: names the panel in its text form.
        describe: `describe(result)` gives lines for the text form; they must be the same on every machine.

    The first run happens at once, in the calling thread, and its error is raised: a stored notebook holds
    a real figure. Later runs have their own thread, one per released value; while one runs the knobs are off.
    A later run waits while a launch of a cell or of another panel is on, and says so.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        draw: Callable[[Any], Figure],
        controls: Mapping[str, Any] | None = None,
        *,
        world_sizes: Sequence[int] | None = (1, 2, 3, 4, 8),
        start: Mapping[str, Any] | None = None,
        title: str = "live panel",
        describe: Callable[[Any], str] | None = None,
    ) -> None:
        self._run, self._draw, self._describe, self.title = run, draw, describe, title
        self._takes_stop = _takes(run, "stop")
        self.knobs = _knobs(controls or {}, world_sizes, dict(start or {}))
        self.again = ipywidgets.Button(description="Run again", tooltip="run once more with these values")
        self.stop_button = ipywidgets.Button(description="Stop", tooltip="end the running ranks", disabled=True)
        self.status = ipywidgets.HTML()
        self.picture = ipywidgets.HTML()
        self.log = ipywidgets.HTML()
        self.slots = {name: ipywidgets.HTML() for name in self.knobs}
        cells = [ipywidgets.VBox([control, self.slots[name]]) for name, control in self.knobs.items()]
        bar = ipywidgets.HBox(
            [*cells, self.again, self.stop_button],
            layout={"flex_flow": "row wrap", "align_items": "flex-start"},
        )
        # The status stands right under the knobs; an error that begins with a knob's name, under that knob.
        self.view = ipywidgets.VBox([bar, self.status, self.picture, self.log])

        self.result: Any = None
        self.figure: Figure | None = None
        self.error: BaseException | None = None
        self.runs = 0
        self.seconds: dict[str, float] = {}
        self._shown: dict[str, Any] = {}
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._busy = self._closed = False
        self._timer: threading.Timer | None = None
        self._idle = threading.Event()
        self._idle.set()

        self._begin()
        self._work(time.perf_counter(), contextlib.nullcontext())
        if self.error is not None:
            raise self.error
        for control in self.knobs.values():
            control.observe(lambda change: self.release(), "value")
        self.again.on_click(lambda button: self.release(settle=0))
        self.stop_button.on_click(lambda button: self.stop())

    @property
    def values(self) -> dict[str, Any]:
        """What the knobs say now."""
        return {name: control.value for name, control in self.knobs.items()}

    def release(self, settle: float | None = None) -> None:
        """Run with the knobs' values once SETTLE seconds pass without another release; not during a run."""
        with self._lock:
            if self._busy or self._closed:
                return
            if self._timer is not None:
                self._timer.cancel()
            self._idle.clear()
            self._timer = threading.Timer(SETTLE if settle is None else settle, self._start, [time.perf_counter()])
            self._timer.daemon = True
            self._timer.start()

    def show(self, figure: Figure) -> None:
        """Show another figure of the same run."""
        self.figure, self.picture.value = figure, parts.image(figure)

    def stop(self) -> None:
        """End the run that is on, if any."""
        self._stop.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until nothing runs or is about to; False when `timeout` seconds pass first."""
        return self._idle.wait(timeout)

    def close(self) -> None:
        """Stop, run nothing that was just released, and take the widgets away."""
        with self._lock:
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
                self._idle.set()
        self.stop()
        for widget in (
            *self.knobs.values(),
            *self.slots.values(),
            self.again,
            self.stop_button,
            self.status,
            self.picture,
            self.log,
        ):
            widget.close()
        self.view.close()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> parts.Bundle:
        return parts.bundle(self.view, self.figure, self.text())

    def text(self) -> str:
        """The panel in words, without any value that could differ between machines."""
        names = ", ".join(name.replace("_", " ") for name in self.knobs)
        lines = [f"[{self.title}; knobs: {names}]"]
        if self.figure is not None:
            lines.append(getattr(self.figure, "alt", "[figure]"))
        if self._describe is not None:
            lines.append(self._describe(self.result))
        return "\n".join(lines)

    def _start(self, released: float) -> None:
        if self._begin():
            self._work(released, alone(self._stop, self._say_waiting))

    def _begin(self) -> bool:
        with self._lock:
            if self._busy or self._closed:
                return False
            self._busy, self._timer, self._stop = True, None, threading.Event()
            self._idle.clear()
            return True

    def _work(self, released: float, turn: contextlib.AbstractContextManager[None]) -> None:
        """One run in its turn, from the knobs' values to the redrawn figure; an error is shown and kept, not raised."""
        values = self.values
        extra = {"stop": self._stop} if self._takes_stop else {}
        self._switch(running=True)
        for slot in self.slots.values():
            slot.value = ""
        self.error, printed = None, _Printed(self.log)
        try:
            with printed_here(printed.write):
                with turn:
                    self._switch(running=True)
                    self.status.value = parts.running(f"running: {parts.told(values)}" if values else "running")
                    began = time.perf_counter()
                    result = self._run(**values, **extra)
                    ran = time.perf_counter() - began
                with collected_later():
                    figure = self._draw(result)
                    drawn = parts.image(figure)
        except Exception as error:
            self.error = error
            self._show_failure(error, values)
            printed.show(getattr(error, "output", None))
        else:
            self.result, self.figure, self._shown = result, figure, values
            self.picture.value = drawn
            self.status.value = parts.said(f"showing: {parts.told(values)}" if values else "")
            self.runs += 1
            self.seconds = {"run": ran, "total": time.perf_counter() - released}
            printed.show(getattr(result, "output", None))
        finally:
            # A value that slipped in before the knobs were off was not run: the knob goes back to what was.
            for name, value in values.items():
                self.knobs[name].value = value
            self._switch(running=False)
            with self._lock:
                self._busy = False
            self._idle.set()

    def _say_waiting(self) -> None:
        what = f": {parts.told(self.values)}" if self.knobs else ""
        self.status.value = parts.running(f"waiting for the end of another launch{what}")
        self.stop_button.disabled = False

    def _switch(self, running: bool) -> None:
        for control in (*self.knobs.values(), self.again):
            control.disabled = running
        self.stop_button.disabled = not (running and self._takes_stop)

    def _show_failure(self, error: Exception, values: Mapping[str, Any]) -> None:
        still = ""
        if self.figure is not None:
            self.picture.value = f'<div style="opacity:0.45">{parts.image(self.figure)}</div>'
            still = f"The picture still shows {parts.told(self._shown)}." if self._shown else "The picture is older."
        if self._stop.is_set():
            self.status.value = parts.said(f"stopped: {parts.told(values)}. {still}")
        elif name := next((name for name in self.knobs if re.match(rf"{name}\b", str(error))), None):
            self.slots[name].value = parts.beside(str(error))
            self.status.value = parts.said(still)
        else:
            self.status.value = parts.failure(error, still)


class _Printed:
    """What a run prints, shown in the panel's own log while it comes."""

    def __init__(self, area: ipywidgets.HTML) -> None:
        self._area, self._lines, self._shown = area, [""], 0.0

    def write(self, text: str) -> None:
        head, *rest = text.split("\n")
        self._lines[-1] = (self._lines[-1] + head).rpartition("\r")[2] if "\r" in head else self._lines[-1] + head
        self._lines += [line.rpartition("\r")[2] for line in rest]
        del self._lines[:-LOG_LINES]
        if time.perf_counter() - self._shown > SHOW_LOG_EVERY:
            self.show()

    def show(self, output: Any = None) -> None:
        """Show what was printed; if nothing was, the ranks' own texts."""
        self._shown = time.perf_counter()
        text = "\n".join(self._lines)
        if not text.strip() and isinstance(output, Sequence) and all(isinstance(part, str) for part in output):
            text = "\n".join(f"[rank {rank}] {line}" for rank, part in enumerate(output) for line in part.splitlines())
        if (shown := parts.log(text)) != self._area.value:
            self._area.value = shown


def _takes(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)


def _knobs(
    controls: Mapping[str, Any], world_sizes: Sequence[int] | None, start: dict[str, Any]
) -> dict[str, ipywidgets.Widget]:
    allowed = dict(controls)
    if world_sizes is not None and "world_size" not in allowed:
        from d2l_utils.device import default_world_size

        first = start.setdefault("world_size", default_world_size())
        allowed = {"world_size": sorted({*world_sizes, first}), **allowed}
    if unknown := set(start) - set(allowed):
        raise ValueError(f"start names {sorted(unknown)!r}; the knobs are {list(allowed)!r}")
    return {name: parts.knob(name, choices, start.get(name)) for name, choices in allowed.items()}
