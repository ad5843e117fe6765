"""The alternative text of a picture: the sentences that a screen reader says in its place."""

import re

__all__ = ["alternative_text", "is_sentence"]


def alternative_text(words: str, *titles: str) -> str:
    """What a notebook shows as text in place of a picture, as sentences; the titles of the picture follow.

    Args:
        words: the picture's ``text/plain``. Its first paragraph counts: what follows is no description.
        titles: what stands over the picture, if anything.
    """
    paragraph = words.strip().split("\n\n")[0]
    lines = [re.sub(r"^\[(.*)\]$", r"\1", line.strip()) for line in paragraph.splitlines()]
    lines += [" ".join(title.split()) for title in titles]
    return " ".join(_closed(line) for line in lines if line)


def is_sentence(text: object) -> bool:
    """Whether a text can be read out: words that end as a sentence does, and no object's ``repr``."""
    return isinstance(text, str) and bool(re.search(r"\w\W*[.!?:]$", text)) and not re.search(r"<\w[^<>]*>", text)


def _closed(line: str) -> str:
    return line[0].upper() + line[1:] + ("" if line[-1] in ".!?:" else ".")
