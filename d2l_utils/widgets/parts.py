"""What panels are made of: knobs from plain values, and escaped HTML for status, errors, figures and logs."""

import base64
import html
from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets
from matplotlib.figure import Figure

from d2l_utils.figure import described, png


def knob(name: str, allowed: Any, start: Any = None) -> ipywidgets.Widget:
    """A labelled control for the argument `name`.

    `allowed` is a range (a whole number between its ends), a sequence or {label: value} of choices, a bool (a
    check box that starts so), or a finished ipywidgets control with a `value`. Raises ValueError for a start
    that is not allowed, TypeError for anything else.
    """
    label = name.replace("_", " ")
    if isinstance(allowed, ipywidgets.Widget):
        control = allowed
        if control.has_trait("continuous_update"):
            control.continuous_update = False  # one value per release
        if start is not None:
            control.value = start
        return control
    style = {"description": label, "style": {"description_width": "initial"}}
    if isinstance(allowed, bool):
        return ipywidgets.Checkbox(value=allowed if start is None else start, indent=False, **style)
    if isinstance(allowed, range):
        start = allowed[0] if start is None else start
        _check(name, start, allowed)
        # A number field, not a slider: a slider's handle has no name for a screen reader.
        return ipywidgets.BoundedIntText(
            value=start, min=allowed[0], max=allowed[-1], step=allowed.step, continuous_update=False,
            layout={"width": f"{2.2 + 0.55 * len(label) + 4}em"}, **style,
        )  # fmt: skip
    if isinstance(allowed, Mapping | Sequence) and not isinstance(allowed, str) and len(allowed):
        pairs = list(allowed.items()) if isinstance(allowed, Mapping) else [(str(v), v) for v in allowed]
        values = [value for _, value in pairs]
        start = values[0] if start is None else start
        _check(name, start, values)
        longest = max(len(text) for text, _ in pairs)
        width = f"{3.4 + 0.55 * (len(label) + longest)}em"
        return ipywidgets.Dropdown(options=pairs, value=start, layout={"width": width}, **style)
    raise TypeError(
        f"controls[{name!r}] is {allowed!r}; allowed: a range, a list or dict of choices, a bool, a control"
    )


def image(figure: Figure, dpi: float | None = None) -> str:
    """The figure as an HTML image with a text alternative, drawn at ``dpi`` dots an inch (default: its own)."""
    data = base64.b64encode(png(figure, dpi, quick=True)).decode("ascii")
    alt = html.escape(described(figure), quote=True)
    width = round(figure.get_figwidth() * 100)
    return f'<img alt="{alt}" width="{width}" style="max-width:100%" src="data:image/png;base64,{data}">'


def running(words: str) -> str:
    """A moving bar and what runs; screen readers hear the words."""
    escaped = html.escape(words)
    return f'<span role="status"><progress aria-label="running"></progress> {escaped}</span>'


def said(words: str) -> str:
    return f'<span role="status">{html.escape(words)}</span>'


def failure(error: BaseException, still: str = "") -> str:
    """The error's first line at once, the rest behind a fold; `still` says what the old picture shows."""
    text = str(error).strip() or type(error).__name__
    first, _, rest = text.partition("\n")
    more = (
        "<details><summary>where</summary>"
        f'<pre style="white-space:pre-wrap">{html.escape(rest.strip())}</pre></details>'
        if rest.strip()
        else ""
    )
    return (
        '<div role="alert" style="border-left:4px solid #D55E00;padding:0 0.6em;line-height:1.5">'
        f"<b>{html.escape(type(error).__name__)}</b>: {html.escape(first)}{more}"
        f"{f'<div>{html.escape(still)}</div>' if still else ''}</div>"
    )


def beside(message: str) -> str:
    """An error beside the control that caused it."""
    return (
        '<div role="alert" style="border-left:4px solid #D55E00;padding:0 0.5em;max-width:17em;line-height:1.3;'
        f'white-space:normal">{html.escape(message)}</div>'
    )


def log(text: str) -> str:
    """What the ranks printed, folded away."""
    if not text.strip():
        return ""
    return (
        "<details><summary>output of the ranks</summary>"
        f'<pre style="max-height:16em;overflow:auto;line-height:1.35">{html.escape(text)}</pre></details>'
    )


def told(values: Mapping[str, Any]) -> str:
    """'world size = 4, bucket MB = 1' for a status line."""
    return ", ".join(f"{name.replace('_', ' ')} = {value}" for name, value in values.items())


Bundle = tuple[dict[str, Any], dict[str, Any]]  # an output's data and its metadata


def bundle(view: ipywidgets.Widget, figure: Figure | None, text: str) -> Bundle:
    """The widget, and beside it a PNG and stable text: stored notebooks keep only those two."""
    data: dict[str, Any] = dict(view._repr_mimebundle_())
    data["text/plain"] = text
    if figure is None:
        return data, {}
    data["image/png"] = base64.b64encode(png(figure)).decode("ascii")
    return data, {"image/png": {"alt": described(figure, text)}}


def _check(name: str, value: Any, allowed: Any) -> None:
    if value not in allowed:
        raise ValueError(f"start[{name!r}] is {value!r}; allowed: {list(allowed)!r}")
