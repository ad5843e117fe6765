"""A player for recorded steps: what each rank holds of each block, moment by moment.

    ShardLifecycle(film)                 # one step
    ShardLifecycle(film_a, film_b)       # two, side by side, one set of controls

It draws what it is given and knows nothing of how it came about: see ``check`` for what a film is.
"""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from d2l_utils.figure import described, png
from d2l_utils.filmstrip import Film, check, filmstrip
from d2l_utils.widgets.stored import stored

__all__ = ["ShardLifecycle", "aligned"]


class ShardLifecycle(anywidget.AnyWidget):
    """Plays the frames of one or two films in the browser, without asking the kernel for anything.

    Arguments:
        films: one or two, each a film (see ``d2l_utils.filmstrip.Film``) or an object whose ``data()`` is one.
        step: the frame to begin with. Setting ``player.step`` moves the player; where the reader is then is the
            browser's own business.
    Raises:
        ValueError: none or more than two films, one without frames, or a step that does not exist.
    """

    _esm = Path(__file__).with_name("lifecycle.js")
    films: Any = traitlets.List().tag(sync=True)
    steps: Any = traitlets.List().tag(sync=True)
    step: Any = traitlets.Int(0).tag(sync=True)

    def __init__(self, *films: Any, step: int = 0) -> None:
        if len(films) not in (1, 2):
            raise ValueError(f"{len(films)} films given: one, or two to lay side by side")
        shown = [check(film.data() if hasattr(film, "data") else film) for film in films]
        steps = aligned(shown)
        if step not in range(len(steps)):
            raise ValueError(f"step is {step!r}: it must be from 0 to {len(steps) - 1}")
        super().__init__(films=shown, steps=steps, step=step)

    def text(self) -> str:
        """The player in words, without any value that could differ between machines."""
        lines = []
        for film in self.films:
            lines.append(f"[shard lifecycle: {film['title']}; columns: {', '.join(film['columns'])}]")
            for when, at in (("at the start", 0), ("at the end", -1)):
                lines.append(f"{when}: {_held(film, at)}")
        return "\n".join(lines)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        made = super()._repr_mimebundle_(**options)
        data, metadata = made if isinstance(made, tuple) else (made or {}, {})
        picture, text = filmstrip(*self.films), self.text()
        data = {**data, "text/plain": text, "image/png": base64.b64encode(png(picture)).decode("ascii")}
        alone = stored("lifecycle.js", films=self.films, steps=self.steps, step=self.step)
        return data, {**metadata, **alone, "image/png": {"alt": described(picture, text)}}


def aligned(films: Sequence[Film]) -> list[list[int]]:
    """The frames to show together, one a film in each step: all are in the same phase, none leaves a frame out.

    Films of different length wait for each other inside each phase.
    """
    if len(films) == 1:
        return [[number] for number in range(len(films[0]["frames"]))]
    phases = list(dict.fromkeys(frame["phase"] for film in films for frame in film["frames"]))
    steps, latest = [], [0] * len(films)
    for phase in phases:
        numbers = [[i for i, frame in enumerate(film["frames"]) if frame["phase"] == phase] for film in films]
        longest = max(map(len, numbers))
        for step in range(longest):
            for film, own in enumerate(numbers):
                if own:
                    latest[film] = own[step * len(own) // longest]
            steps.append(list(latest))
    return steps


def _held(film: Mapping[str, Any], at: int) -> str:
    """The states of one frame, by kind; those that not all ranks and columns share are all named."""
    states = film["frames"][at]["states"]
    words = []
    for k, kind in enumerate(film["kinds"]):
        found = list(dict.fromkeys(kind["states"][code][0] for code in states[k::4]))
        words.append(f"{kind['letter']} {' or '.join(found)}")
    return ", ".join(words)
