"""The chapter's site, made once from the stored notebooks and opened from disk, as a reader without a server does."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from .conftest import ROOT, SCREENSHOTS, watched

PHONE, TABLET, DESK = 390, 820, 1440
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# What reaches beyond the window, and does not lie in something that scrolls by itself or is drawn out of sight.
BEYOND = """() => [...document.querySelectorAll("article *")]
    .filter((one) => one.getBoundingClientRect().right > innerWidth + 1)
    .filter((one) => !one.closest(".table-wrapper, pre, .formula, .cell_output"))
    .map((one) => one.outerHTML.slice(0, 100))"""


def make(notebooks: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """What `make book` runs; a process of its own, since Sphinx's own warnings about itself are no errors of ours."""
    command = [sys.executable, "-m", "d2l_utils.book", "--notebooks", str(notebooks), "--target", str(site)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if any(importlib.util.find_spec(name) is None for name in ("myst_nb", "furo", "latex2mathml")):
        message = "the book's tools are not installed: `make book` installs them"
        if os.environ.get("D2L_CI"):
            pytest.fail(message)
        pytest.skip(message)
    site = tmp_path_factory.mktemp("第 19 章 book") / "site"
    done = make(ROOT / "notebooks", site)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"Open {(site / 'index.html').as_uri()}"
    return site


@pytest.fixture(scope="module")
def reader(browser) -> Iterator[object]:
    """One page for all tests of this file; nothing may fail, leave this machine or stand on the console."""
    with watched(browser) as page:
        failed: list[str] = []
        page.page.on("requestfailed", lambda request: failed.append(request.url))
        yield page
    page.check()
    assert failed == []


@pytest.fixture
def at(book, reader):
    """at(name, width) -> the page of that name, open at that width."""

    def show(name: str, width: int = DESK):
        reader.page.set_viewport_size({"width": width, "height": 900})
        reader.page.goto((book / f"{name}.html").as_uri())
        return reader.page

    yield show
    reader.check()


def names(book: Path) -> list[str]:
    return sorted(path.stem for path in book.glob("*.html"))


def test_there_is_a_page_for_each_notebook(book: Path) -> None:
    assert set(names(book)) == {"index", "search"} | {path.stem for path in NOTEBOOKS[1:]}


def test_every_page_fits_a_phone_a_tablet_and_a_desk(book: Path, at) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    for name in names(book):
        page = at(name)
        for width in (DESK, TABLET, PHONE):
            page.set_viewport_size({"width": width, "height": 900})
            inside = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
            assert inside[0] <= inside[1] == width, name
            assert page.evaluate(BEYOND) == [], (name, width)
            if name in ("index", "06-zero-3", "12-choosing"):
                page.screenshot(path=SCREENSHOTS / f"book_{name}_{width}.png")
        pictures = page.locator("article img").evaluate_all("all => all.map(one => [one.naturalWidth > 0, !!one.alt])")
        assert all(drawn and told for drawn, told in pictures), name


def test_links_lead_to_pages_and_places(book: Path) -> None:
    pages = {name: (book / f"{name}.html").read_text(encoding="utf-8") for name in names(book)}
    places = {name: set(re.findall(r'\bid="([^"]+)"', text)) for name, text in pages.items()}
    to_lessons = 0
    for name, text in pages.items():
        for href in re.findall(r'<a[^>]*\bhref="([^"]+)"', text):
            parts = urlsplit(href)
            if parts.scheme:
                continue
            target = Path(unquote(parts.path)).stem or name
            assert parts.path in ("", f"{target}.html") and target in pages, f"{name}: {href}"
            assert name == "search" or parts.fragment in ("", *places[target]), f"{name}: {href}"
            to_lessons += target != name
    assert to_lessons > 100


def test_the_player_plays_without_a_kernel(at) -> None:
    for name, films in (("06-zero-3", 1), ("09-fsdp2", 2)):
        page = at(name)
        assert page.locator(".player .film").count() == films
        assert page.locator(".player img").count() == 0
        frame = page.get_by_label("frame", exact=True)
        page.get_by_role("button", name="one frame on").click()
        assert frame.input_value() == "1"
        page.get_by_label("speed").select_option("4")
        page.get_by_role("button", name="play", exact=True).click()
        page.wait_for_function(
            "Number(document.querySelector('.player div').shadowRoot.querySelector('input').value) > 5"
        )
        page.get_by_role("button", name="pause").click()


def test_the_sliders_move_without_a_kernel(at) -> None:
    page = at("05-zero")
    totals = page.locator(".player .total")
    before = totals.all_inner_texts()
    page.get_by_label("ranks", exact=True).fill("6")
    after = totals.all_inner_texts()
    assert after[0] == before[0] and all(one != other for one, other in zip(after[1:], before[1:], strict=True))


def test_without_its_script_a_widget_is_a_picture_with_words(book: Path, browser) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((book / "06-zero-3.html").as_uri())
    picture = page.locator(".player img")
    assert picture.is_visible() and picture.get_attribute("alt").startswith("Shard lifecycle: ZeRO-3")
    context.close()


def test_search_finds_a_term_from_disk(at) -> None:
    page = at("index")
    page.get_by_role("textbox", name="Search").first.fill("prefetch")
    page.keyboard.press("Enter")
    found = page.locator("#search-results li a")
    found.and_(page.locator('[href*="06-zero-3"]')).first.wait_for()  # results come one by one
    found.first.click()
    page.locator("article h1").wait_for()
    assert "prefetch" in page.locator("article").inner_text().lower()


def test_light_dark_solutions_and_formulas(at) -> None:
    page = at("05-zero")
    background = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="light")
    light = page.evaluate(background)
    page.emulate_media(color_scheme="dark")
    assert light != page.evaluate(background)
    solution = page.get_by_text("One solution")
    assert not solution.is_visible()
    page.get_by_text("Show the solution").click()
    assert solution.is_visible()
    assert page.locator("article math").count() > 10
    assert not any("$" in text for text in page.locator("article p").all_inner_texts())


def test_a_dead_link_makes_no_book(book: Path, tmp_path: Path) -> None:
    (tmp_path / "notebooks").mkdir()
    lesson = tmp_path / "notebooks" / "00-start.ipynb"
    shutil.copy(NOTEBOOKS[0], lesson)
    text = lesson.read_text(encoding="utf-8").replace("14-cockpit.ipynb", "15-nowhere.ipynb")
    lesson.write_text(re.sub(r"\((0[1-9]|1[0-4])-[\w-]+\.ipynb\)", "(#this-machine)", text), encoding="utf-8")
    done = make(tmp_path / "notebooks", tmp_path / "site")
    assert done.returncode == 1 and "15-nowhere.ipynb" in done.stderr
    assert not (tmp_path / "site").exists()


def test_an_unknown_command_in_a_formula_is_refused(book: Path) -> None:
    from d2l_utils.book.maths import mathml

    assert "<msub>" in mathml(r"\frac{N-1}{N} M_P", "inline")
    with pytest.raises(ValueError, match="nonsense"):
        mathml(r"\nonsense{N}", "inline")
