"""The numbers of ranks that a lesson launches with: what is trained by as many as there are can be divided by them, and
``warm_up`` knows the most, so that all of a lesson runs on one kind of device."""

import ast
import re
from pathlib import Path

import pytest

from chapter19_9.exercises import EXERCISES

SECTIONS = sorted((Path(__file__).resolve().parents[2] / "chapter19_9" / "sections").glob("*.md"))
DIVIDES = 24  # any default number of ranks does
PANELS = {"LivePanel": (1, 2, 3, 4, 8), "CollectiveExplorer": (1, 2, 3, 4, 8), "Cockpit": (1, 2, 3, 4)}


def cells(section):
    """The syntax trees of a lesson's code."""
    text = section.read_text(encoding="utf-8")
    for body in re.findall(r"^```\{code-cell\} python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield ast.parse("\n".join(line for line in body.splitlines() if not line.startswith(":tags:")))


def literal(node):
    try:
        return ast.literal_eval(node)
    except ValueError:
        return node


class Launches(ast.NodeVisitor):
    """{keyword: value} of each launch in the order of the text, with what ``**name`` stands for."""

    def __init__(self, section):
        self.names, self.found, self.panels, self.largest = {}, [], [], 0
        for tree in cells(section):
            self.visit(tree)

    def keywords(self, pairs):
        found = {}
        for key, value in pairs:
            if key is None:
                found |= self.names.get(getattr(value, "id", ""), {})
            else:
                found[key] = literal(value)
        return found

    def visit_Assign(self, node):
        if isinstance(node.value, ast.Dict):
            pairs = [
                (key and literal(key), value) for key, value in zip(node.value.keys, node.value.values, strict=True)
            ]
            self.names[getattr(node.targets[0], "id", "")] = self.keywords(pairs)
        self.generic_visit(node)

    def visit_Call(self, node):
        name = getattr(node.func, "id", "")
        given = self.keywords([(keyword.arg, keyword.value) for keyword in node.keywords])
        if name == "launch":
            self.found.append(given)
        elif name in PANELS:
            self.panels.append(given.get("world_sizes", PANELS[name]))
        elif name == "warm_up":
            self.largest = given.get("largest", 0)
        elif name == "check" and node.args and isinstance(literal(node.args[0]), str):
            self.panels.append(EXERCISES[literal(node.args[0])].world_sizes)
        self.generic_visit(node)


def test_the_reader_of_launches_sees_what_is_meant(tmp_path):
    file = tmp_path / "x.md"
    file.write_text(
        "```{code-cell} python\n:tags: [a]\nwarm_up(largest=5)\no = {'batch': 12, 'n': 1}\np = {**o, 'n': 2}\n```\n"
        "```{code-cell} python\nlaunch(f, **p)\ncheck('shift', f)\nLivePanel(f, world_sizes=(1, 2))\n```\n"
    )
    seen = Launches(file)
    assert (seen.largest, seen.found) == (5, [{"batch": 12, "n": 2}])
    assert seen.panels == [(2, 3, 4), (1, 2)]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.stem)
def test_what_as_many_ranks_as_there_are_train_can_be_divided_by_them(section):
    for given in Launches(section).found:
        batch = given.get("batch", DIVIDES)
        if "world_size" not in given and isinstance(batch, int):
            assert batch % DIVIDES == 0, f"batch={batch} does not divide by 8 ranks"


@pytest.mark.parametrize("section", SECTIONS[:-1], ids=lambda section: section.stem)
def test_warm_up_knows_the_most_ranks_of_the_lesson(section):
    """Launches whose number is in a variable are not seen; those on the CPU or on simulated nodes do not count."""
    seen = Launches(section)
    sizes = [given.get("world_size") for given in seen.found if given.get("device") != "cpu" and "nodes" not in given]
    most = max(
        size for size in [*sizes, *(size for panel in seen.panels for size in panel), 1] if isinstance(size, int)
    )
    assert seen.largest >= most


@pytest.mark.parametrize(("name", "marks"), [("10-one-picture", {"record_step", "links"}), ("12-choosing", {"names"})])
def test_what_looks_into_gloo_or_foretells_its_buffers_asks_for_cpu_ranks(name, marks):
    (section,) = (section for section in SECTIONS if section.stem == name)
    found = [given for given in Launches(section).found if marks & given.keys()]
    assert len(found) > 1
    assert [given.get("device") for given in found] == ["cpu"] * len(found)
    assert all('device="cpu")' in line for line in section.read_text().splitlines() if "compare(" in line)
