"""A lesson as its readers meet it: opened in JupyterLab, run from top to bottom, changed through its panel."""

import ipaddress
import shutil
import socket

import psutil
import pytest

from .conftest import ROOT

LESSON = ROOT / "notebooks" / "01-one-device-to-data-parallel.ipynb"


def running(lab) -> set[int]:
    return {process.pid for process in lab.family() if process.status() != psutil.STATUS_ZOMBIE}


def outside(lab) -> set[str]:
    """Addresses beyond this machine that the server, its kernels or its ranks are connected to.

    Not the machine's own name server: whenever libtorch connects to a store, here by loopback, it asks for the name of
    127.0.0.1, which a short look sees now and then.
    """
    found = set()
    for process in lab.family():
        try:
            connections = process.net_connections("inet")
        except psutil.NoSuchProcess:
            continue
        connections = [one for one in connections if one.raddr]
        found |= {one.raddr.ip for one in connections if (one.type, one.raddr.port) != (socket.SOCK_DGRAM, 53)}
    return {text for text in found if not is_loopback(text)}


def is_loopback(text: str) -> bool:
    address = ipaddress.ip_address(text)
    return address.is_loopback or bool(getattr(address, "ipv4_mapped", None) and address.ipv4_mapped.is_loopback)


@pytest.mark.timeout(600)
def test_the_first_lesson_runs_and_answers_to_its_knob(lab, page):
    shutil.copy(LESSON, lab.root / LESSON.name)
    page.open(lab, LESSON.name)
    page.run_all(timeout=150)
    assert page.failures() == []
    before = running(lab)

    cell = page.page.locator(".jp-CodeCell").filter(has=page.page.get_by_role("button", name="Stop")).first
    knob = cell.get_by_label("world size", exact=True)
    knob.scroll_into_view_if_needed()
    knob.select_option("1")
    cell.get_by_text("showing: world size = 1").wait_for()
    [one] = cell.locator("img").evaluate_all("images => images.map(image => image.src)")
    knob.select_option("3")
    cell.get_by_text("showing: world size = 3").wait_for()
    [three] = cell.locator("img").evaluate_all("images => images.map(image => image.src)")
    assert one != three, "the figure follows the knob"

    knob.select_option("8")
    page.until(lambda: len(running(lab) - before) >= 8, why="eight ranks run")
    assert outside(lab) == set()
    cell.get_by_role("button", name="Stop").click()
    cell.get_by_text("stopped: world size = 8").wait_for()
    page.until(lambda: running(lab) <= before, 5, "no rank is left")
    assert page.failures() == []


def test_a_word_leads_to_its_place_in_the_glossary(lab, page):
    """From the second time on: JupyterLab opens a notebook at its top."""
    for name in (LESSON.name, "15-glossary.ipynb"):
        shutil.copy(ROOT / "notebooks" / name, lab.root / name)
    page.open(lab, LESSON.name)
    for word in ("throughput", "micro-batch"):
        page.page.locator(".lm-TabBar-tab", has_text=LESSON.stem[:6]).first.click()
        page.page.get_by_role("link", name=word, exact=True).click()
        place = page.page.locator(f'.jp-Notebook h2[data-jupyter-id="{word}"]')
        place.wait_for(state="attached")
    page.until(lambda: 0 < place.bounding_box()["y"] < 1000, 20, "its heading is in the window")
