"""No number stands in a lesson's prose that nothing there produces.

A number in a sentence must have the same value as one that the cells under the same heading printed, or that
their code sets. What is left is listed in `COVERED`, each sentence with what stands behind it; the list holds
nothing that is not needed. Proportions in words (half, twice, four times ...) are never read off an output, so
each of them is listed.

Not numbers of this kind: names (ZeRO-3, FSDP2, 19.9.4, rank 0, 32 bits, 2-norm), ordinals of lists, code, and
single digits in formulas. Sums written out in a formula are computed.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from d2l_utils.notebooks.builder import read_notebook
from d2l_utils.notebooks.form import tags, texts
from tests.unit.numbers_covered import COVERED

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))

NAMES = re.compile(
    r"19\.9(\.\d+)?|ZeRO-\d|FSDP\d|(stages?|style) \d( (and|to) \d)?|ranks? [01]\b|epoch 0|arXiv [\d.]+|2-norm"
    r"|\b(16|32)[- ]bits?\b|\*\*\d\.\*\*|^\s*\d\.(?=\s)|(GPT-|Llama )\d",
    re.MULTILINE,
)
NUMBER = re.compile(r"(?<![\w.])(\d[\d,_]*(?:\.\d+)?(?:e-?\d+)?)(\s?%)?(?!\w)")
PROPORTION = re.compile(
    r"\b(half|halves|halved|twice|doubled?|doubles|two thirds|a (third|quarter)|(two|three|four|five|six|eight|ten) times)\b"
)
SUM = re.compile(r"[\d.+*/() ]+")


def numbers(text: str) -> set[float]:
    """The values of the numbers in a text; of 5 % both 5 and 0.05."""
    found = set()
    for digits, percent in NUMBER.findall(text):
        value = float(digits.rstrip(",_").replace(",", "").replace("_", ""))
        found |= {value, value / 100} if percent else {value}
    return found


def math(formula: str) -> str:
    """What of a formula has to be produced by a cell: numbers of more than one digit, if no sum gives them."""
    plain = re.sub(r"10\^\{(-\d+)\}", r"1e\1", formula).replace(r"\times", "*").replace(r"\,", "")
    sides = [side.strip(" .$") for side in plain.split("=")]
    sums = [side for side in sides if re.search(r"\d", side) and SUM.fullmatch(side)]
    if len(sums) > 1 and len({round(eval(side), 9) for side in sums}) == 1:
        return ""
    return " ".join(number for number, _ in NUMBER.findall(plain) if len(number) > 1)


def sentences(prose: str) -> Iterator[str]:
    """The sentences, list items and table cells of a Markdown text, without code, link targets and names."""
    prose = re.sub(r"^\| \[.*$", "", prose, flags=re.MULTILINE)  # the start page's rows: test_map
    prose = re.sub(r"\]\([^)]*\)|`[^`\n]*`", "]", prose)
    prose = re.sub(r"\$\$.*?\$\$|\$[^$]*\$", lambda found: math(found.group().strip("$")), prose, flags=re.DOTALL)
    prose = NAMES.sub("", prose)
    yield from (s.strip() for s in re.split(r"(?<=[.?!:])\s+|\n\n|\n(?=\s*[-|#\d])|\|", prose) if s.strip())


def parts(notebook: Any) -> Iterator[list[Any]]:
    """The cells under each heading."""
    part: list[Any] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and re.match(r"#+ ", cell.source) and part:
            yield part
            part = []
        part.append(cell)
    yield part


def unproduced(notebook: Any) -> list[str]:
    """Sentences with a number that nothing under the same heading prints or sets, or with a proportion."""
    found = []
    for part in parts(notebook):
        code = [cell for cell in part if cell.cell_type == "code"]
        shown = [cell.source for cell in code if "solution" not in tags(cell)]
        shown += [text for cell in code for out in cell.outputs for kind, text in texts(out) if "image" not in kind]
        produced = numbers("\n".join(shown))
        for sentence in (s for cell in part if cell.cell_type == "markdown" for s in sentences(cell.source)):
            missing = {float(d.replace(",", "").rstrip(".")) for d, _ in NUMBER.findall(sentence)} - produced
            if (numbers(sentence) - produced and missing) or PROPORTION.search(sentence):
                found.append(" ".join(sentence.split()))
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_each_number_in_prose_is_produced_or_covered(path: Path) -> None:
    covered = COVERED.get(path.stem[:2], {})
    found = unproduced(read_notebook(path))
    new = [sentence for sentence in found if not any(fragment in sentence for fragment in covered)]
    assert not new, "no cell under the same heading produces:\n" + "\n".join(new)
    stale = [fragment for fragment in covered if not any(fragment in sentence for sentence in found)]
    assert not stale, f"listed in COVERED, and not needed: {stale}"


@pytest.mark.parametrize(
    "invented",
    [
        "It saves 37 % of them.",
        "Together 1,234,567 B.",
        "That is $1.73 M_P$.",
        "$(1 + 1) / 3 = 0.7$",
        "It is half of it.",
    ],
)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_an_invented_figure_is_found(path: Path, invented: str) -> None:
    notebook = read_notebook(path)
    before = len(unproduced(notebook))
    cell = [cell for cell in notebook.cells if cell.cell_type == "markdown"][-2]
    cell.source += f"\n\n{invented}"
    assert len(unproduced(notebook)) == before + 1


def test_what_a_cell_prints_is_no_invention() -> None:
    notebook = read_notebook(next(path for path in NOTEBOOKS if path.stem.startswith("03")))
    cell = next(cell for cell in notebook.cells if "The all-reduces are the buckets" in cell.source)
    before = unproduced(notebook)
    cell.source += "\n\nThat is 944,640 B, and $2 \\times 3 + 4 = 10$."
    assert unproduced(notebook) == before


def test_what_libraries_do_by_default() -> None:
    """19.9.1's learning rate, 19.9.2's time limits, 19.9.4's bucket sizes."""
    import torch.distributed as dist
    from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
    from torch.nn.parallel import DistributedDataParallel

    from chapter19_9.train import train
    from d2l_utils import launch

    def default(function: Any, name: str) -> Any:
        return inspect.signature(function).parameters[name].default

    assert default(train, "lr") == 0.001
    assert default(launch, "timeout") == 120
    assert default_pg_timeout.total_seconds() == 30 * 60
    assert default_pg_nccl_timeout is None or default_pg_nccl_timeout.total_seconds() == 10 * 60
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == 2**20
    assert "a default size of 25 MiB" in " ".join(str(DistributedDataParallel.__doc__).split())


def test_proportions_of_optimizer_states() -> None:
    """19.9.5: O is twice P in 32-bit numbers, six times in mixed precision, where it takes 12 bytes a parameter."""
    from chapter19_9.theory import adamw_states, mixed_precision_states
    from d2l_utils.transformer import TransformerConfig

    plain, mixed = adamw_states(TransformerConfig()), mixed_precision_states(1e9)
    assert round(plain.optimizer / plain.parameters, 3) == 2 and plain.gradients == plain.parameters
    assert mixed.optimizer == 12e9 == 6 * mixed.parameters == 6 * mixed.gradients
