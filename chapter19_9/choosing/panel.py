"""The advisor behind fields: a model and machines in, the flow, the bars and the words out, at once."""

from __future__ import annotations

from typing import Any

import ipywidgets
from matplotlib.figure import Figure

from chapter19_9.choosing.advisor import Answer, Question, advise
from chapter19_9.choosing.cost import PRECISIONS
from chapter19_9.choosing.presets import PRESETS, own
from chapter19_9.choosing.text import brief
from chapter19_9.choosing.view import bars_of, flow_of
from d2l_utils.widgets.form import FormPanel

OWN = "own sizes"
SIZES = ("layers", "width", "heads", "vocabulary", "length")
_SPLIT = {"description_width": "initial"}


class AdvisorPanel(FormPanel):
    """``start``: first values of ``Question``'s fields, those without a field here for good. Choosing a preset fills in
    its sizes; "own sizes" frees them.
    toy: a picture that stays under every answer: the model that was just run, predicted and measured."""

    def __init__(self, *, toy: Figure | None = None, **start: Any) -> None:
        question = Question(**start)
        sizes = {name: getattr(question.sizes, name) for name in SIZES}
        sizes["length"] = question.length or sizes["length"]
        self._models, model = dict(PRESETS), question.model
        if not isinstance(model, str):
            is_own = question.sizes == own(**sizes | {"length": question.sizes.length})
            model = OWN if is_own else f"{model.name}{'*' * (model != PRESETS.get(model.name, model))}"
            self._models |= {} if is_own else {model: question.sizes}  # of a shape that these fields cannot give
        fields: dict[str, Any] = {
            "model": ipywidgets.Dropdown(
                options=[*self._models, OWN], value=model, description="model", style=_SPLIT, layout={"width": "16em"}
            )
        }
        fields |= {name: _whole(name, value) for name, value in sizes.items()}
        fields["micro_batch"] = _whole("micro_batch", question.micro_batch)
        fields["precision"] = ipywidgets.Dropdown(
            options=list(PRECISIONS), value=question.precision, description="precision", style=_SPLIT,
            layout={"width": "11em"},
        )  # fmt: skip
        fields["checkpointing"] = question.checkpointing
        fields |= {
            "memory": _number("memory", question.memory, "memory, GB"),
            "devices": _whole("devices", question.devices, "devices a node"),
            "nodes": _whole("nodes", question.nodes),
            "inside": _number("inside", question.inside, "inside a node, GB/s"),
            "between": _number("between", question.between, "between nodes, GB/s"),
        }
        self._fixed: dict[str, Any] = {"reserve": question.reserve, "teraflops": question.teraflops}
        last = [] if toy is None else [toy]
        super().__init__(
            self._advised, lambda answer: [flow_of(answer), bars_of(answer), *last], fields,
            title="advisor", describe=brief,
        )  # fmt: skip
        self._free()
        self.fields["model"].observe(lambda change: self._free(), "value")

    def _advised(self, model: str, **values: Any) -> Answer:
        sizes = {name: values.pop(name) for name in SIZES if name != "length"}
        if model == OWN:
            length = values["length"] if isinstance(values["length"], int) and values["length"] > 0 else 1
            return advise(Question(own(**sizes, length=length), **self._fixed, **values))
        known = model if model in PRESETS else self._models[model]
        return advise(Question(known, **self._fixed, **values))

    def refresh(self) -> None:
        # the sizes of a preset are its own: they change with it, and are answered with it
        model = self.fields["model"].value
        if model != OWN and not self._quiet and self._stale(model):
            with self.together():
                for name in SIZES:
                    self.fields[name].value = getattr(self._models[model], name)
            return
        super().refresh()

    def _stale(self, model: str) -> bool:
        return any(self.fields[name].value != getattr(self._models[model], name) for name in SIZES if name != "length")

    def _free(self) -> None:
        for name in SIZES[:-1]:
            self.fields[name].disabled = self.fields["model"].value != OWN


def _whole(name: str, value: int, words: str = "") -> ipywidgets.IntText:
    return ipywidgets.IntText(
        value=value, description=words or name.replace("_", " "), style=_SPLIT, layout=_width(words or name)
    )


def _number(name: str, value: float, words: str) -> ipywidgets.FloatText:
    return ipywidgets.FloatText(value=value, description=words, style=_SPLIT, layout=_width(words))


def _width(words: str) -> dict[str, str]:
    return {"width": f"{7.5 + 0.5 * len(words)}em"}
