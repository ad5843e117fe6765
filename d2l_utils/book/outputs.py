"""A cell's outputs as a page can show them: pictures with their words, HTML that is safe, and text.

A notebook that comes back from Colab or VS Code brings kinds that no page knows. What has a readable companion
is left out without a word; what was readable and would be lost is told with the kind that it came in.
"""

import base64
import html
import re
from collections.abc import Callable
from typing import Any

from d2l_utils.alt_text import is_sentence
from d2l_utils.notebooks.form import ALT, PLAYER, is_picture, joined
from d2l_utils.notebooks.rules import fetches, unsafe

__all__ = ["make_showable"]

_ACTION = "javascript"  # kinds that do something, and say nothing
_COPIES = "application/vnd.google.colaboratory."  # Colab's own, beside the same as text
_REPR = re.compile(r"\s*<[\w.]+ .*>\s*")  # the text of an object that shows itself in another kind only


def make_showable(cell: Any, latex_is_known: Callable[[str], bool]) -> tuple[list[str], list[str]]:
    """Leaves in each output one kind that a page shows.

    Args:
        cell: a code cell in normal form, changed in place.
        latex_is_known: whether a formula, without its dollars, can be drawn.

    Returns:
        (lost, left out): what was readable and cannot be shown; what is no loss, such as a script, or what is
        shown as its text.
    """
    lost: list[str] = []
    left_out: list[str] = []
    for output in [output for output in cell.outputs if "data" in output]:
        shown = _shown(cell, output, latex_is_known)
        others = sorted(kind for kind in output.data if kind != "text/plain" and not kind.startswith(_COPIES))
        text = shown.get("text/plain")
        if text and not (others and _REPR.fullmatch(text)):
            left_out += [f"shows the text of {kind}" for kind in others if not kind.startswith("text/")]
        elif text or not shown:
            readable = [kind for kind in output.data if kind != "text/plain" and _ACTION not in kind]
            what = ", ".join(others or readable) or "a widget without picture or text"
            (lost if readable else left_out).append(f"cannot show {what}")
            cell.outputs.remove(output)
        output.data, output.metadata = type(output.data)(shown), type(output.metadata)()
    return lost, left_out


def _shown(cell: Any, output: Any, latex_is_known: Callable[[str], bool]) -> dict[str, str]:
    """The kind that the page shows of an output, and its content; empty if it can show none."""
    data = {kind: joined(content) for kind, content in output.data.items()}
    if PLAYER in output.metadata and "image/png" in data:
        return {"text/html": _player(output.metadata[PLAYER], _image(cell, output, "image/png"))}
    if (markup := data.get("text/html")) and not unsafe(markup) and not fetches(markup):
        return {"text/html": markup}
    if pictures := sorted(filter(is_picture, data)):
        kind = "image/png" if "image/png" in pictures else pictures[0]
        return {"text/html": _figure(_image(cell, output, kind), data.get("text/plain", ""))}
    if (words := data.get("text/markdown")) and not unsafe(words) and not fetches(words):
        return {"text/markdown": words}
    if (formula := data.get("text/latex")) and latex_is_known(formula.strip().strip("$")):
        return {"text/latex": formula}
    return {"text/plain": data["text/plain"]} if "text/plain" in data else {}


def _image(cell: Any, output: Any, kind: str) -> str:
    """The picture as HTML, with its alternative text; where it has none, the line of code that begins its cell."""
    content = joined(output.data[kind])
    encoded = base64.b64encode(content.encode()).decode() if kind.endswith("+xml") else "".join(content.split())
    words = output.metadata.get(kind, {}).get(ALT)
    if not is_sentence(words):
        words = f"A picture drawn by the cell that begins with: {(cell.source.strip().splitlines() or [''])[0]}"
    return f'<img alt="{html.escape(words)}" src="data:{kind};base64,{encoded}">'


def _figure(image: str, text: str) -> str:
    fields = re.match(r"\[[^;\]]*; ((?:knobs|fields): [^\]]*)\]", text)
    if not fields:
        return image
    told = html.escape(f"In JupyterLab this panel is live. {fields[1].capitalize()}.")
    return f"<figure>{image}<figcaption>{told}</figcaption></figure>"


def _player(stored: Any, image: str) -> str:
    """The widget's place: its picture, and what `players.js` needs to put the widget there."""
    state = stored["state"].replace("</", "<\\/")
    return (
        f'<div class="player" data-module="{html.escape(stored["module"])}">'
        f'{image}<script type="application/json">{state}</script></div>'
    )
