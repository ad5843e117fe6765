"""A Sphinx extension: formulas as MathML, which a browser draws by itself, without script, font or request."""

from typing import Any

__all__ = ["mathml", "setup"]


def mathml(formula: str, display: str) -> str:
    """A TeX formula as MathML; it keeps the TeX as the text that a screen reader without MathML reads.

    Args:
        formula: TeX, without dollars.
        display: "inline" or "block".

    Raises:
        ValueError: a command in it is unknown, which latex2mathml would write out as a word.
    """
    from latex2mathml.converter import convert

    made = str(convert(formula, display=display))
    if "\\" in made:
        raise ValueError(f"{formula!r} holds a command that latex2mathml does not know")
    return made.replace("<mo>&#x022A4;</mo>", "<mi>&#x022A4;</mi>")  # the transpose is no operator: no space around it


def _inline(translator: Any, node: Any) -> None:
    from docutils.nodes import SkipNode

    translator.body.append(mathml(node.astext(), "inline"))
    raise SkipNode


def _block(translator: Any, node: Any) -> None:
    from docutils.nodes import SkipNode

    translator.body.append(f'<div class="formula" tabindex="0">{mathml(node.astext(), "block")}</div>\n')
    raise SkipNode


def setup(app: Any) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
