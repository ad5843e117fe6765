"""The glossary: each of its terms is used in the chapter, and where it is first used a link leads to it.

A use is a mention in running text: not in code, formulas, headings, tables' link rows, or a question in bold. A term
that is written with a capital letter is one only so; of the others all forms count (shard, shards, sharded).
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from d2l_utils.book.pages import anchor
from d2l_utils.notebooks.builder import read_section, sections

SECTIONS = sections(Path(__file__).parents[2] / "chapter19_9" / "sections")
(GLOSSARY,) = (path for path in SECTIONS if path.stem.endswith("glossary"))
LESSONS = [path for path in SECTIONS if path != GLOSSARY]
TEXT = GLOSSARY.read_text(encoding="utf-8")
TERMS = re.findall(r"^## (.+)$", TEXT, re.MULTILINE)
TO_GLOSSARY = re.compile(rf"\[([^\]]*)\]\({GLOSSARY.stem}\.ipynb#([^)]*)\)")
NO_USE = re.compile(
    r"^```.*?^```|^#.*?$|^\| \[.*?$|\$\$.*?\$\$|\$[^$\n]*\$|`[^`\n]*`|\[[^\]]*\]\([^)]*\)"
    r"|^\*\*[^*\n]{15,}\*\*|\*\*(?=[^*\n]{15})[^*\n]* [^*\n]*\*\*",
    re.MULTILINE | re.DOTALL,
)


class Use(NamedTuple):
    """A mention of a term: in which file, from where to where in its `plain` text."""

    path: Path
    start: int
    end: int


def form(term: str) -> re.Pattern[str]:
    """What counts as a mention of a term."""
    words = re.escape(term).replace(r"\ ", r"[ \n-]").replace(r"\-", "[ -]")
    if re.search("[A-Z]", term):
        return re.compile(rf"(?<![\w-]){words}(?![\w])")
    stem = words.removesuffix("s")
    return re.compile(rf"(?<![\w-]){stem}(s|es|d|ed|ing|r)?(?![\w-])", re.IGNORECASE)


def plain(path: Path) -> str:
    """A section with each link to the glossary written as ⟦its words⟧."""
    return TO_GLOSSARY.sub(r"⟦\1⟧", path.read_text(encoding="utf-8"))


def first_use(term: str) -> Use | None:
    """The first mention of a term, in reading order."""
    for path in LESSONS:
        text = plain(path)
        head = text.index("\n# ") if text.startswith("---") else 0
        blank = NO_USE.sub(lambda found: " " * len(found.group()), text)
        for longer in TERMS:  # local rank is no use of rank
            if longer != term and form(term).search(longer):
                blank = form(longer).sub(lambda found: " " * len(found.group()), blank)
        if found := form(term).search(blank, head):
            return Use(path, *found.span())
    return None


def links() -> Iterator[tuple[Path, re.Match[str]]]:
    """Every link to the glossary."""
    for path in LESSONS:
        for found in TO_GLOSSARY.finditer(path.read_text(encoding="utf-8")):
            yield path, found


def test_terms_are_in_order_and_none_is_twice() -> None:
    assert len(TERMS) > 30
    assert sorted(TERMS, key=lambda term: term.lower()) == TERMS
    assert len({anchor(term) for term in TERMS}) == len(TERMS)


def test_each_term_has_a_chinese_name_and_a_sentence() -> None:
    for part in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]:
        term, _, rest = part.partition("\n\n")
        assert re.match(r"\*\*[^*]*[\u4e00-\u9fff][^*]*\*\* · [A-Z*`][^\n]{20,}\.( \(\[|$|\n)", rest), term


@pytest.mark.parametrize("term", TERMS)
def test_a_term_is_linked_where_it_is_first_used(term: str) -> None:
    use = first_use(term)
    assert use is not None, "the chapter does not use it"
    text = plain(use.path)
    where = f"{use.path.name}: {text[use.start - 30 : use.end + 30]!r}"
    assert text[use.start - 1] == "⟦" and text[use.end] == "⟧", f"link it to #{anchor(term)}: {where}"
    link = [found for path, found in links() if path == use.path][text.count("⟦", 0, use.start) - 1]
    assert link[2] == anchor(term), where


def test_no_link_leads_nowhere_and_none_is_said_twice() -> None:
    places = [found[2] for _, found in links()]
    assert set(places) == {anchor(term) for term in TERMS}
    assert len(places) == len(set(places)), "first use only"


def test_links_inside_the_glossary_lead_to_terms() -> None:
    inside = set(re.findall(r"\]\(#([^)]*)\)", TEXT))
    assert inside and inside <= {anchor(term) for term in TERMS}


def test_what_counts_as_a_use() -> None:
    assert [bool(form("shard").search(text)) for text in ("shards", "Sharded", "hard", "sharding strategy")] == [
        True, True, False, True,
    ]  # fmt: skip
    assert form("DDP").search("under DDP,") and not form("DDP").search("ddp")
    assert form("all-reduce").search("All-reduces") and not form("rank").search("crank")
    assert read_section(GLOSSARY).cells, "it is a section like the others"
