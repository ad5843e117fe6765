"""The cockpit without a browser: formulas met, the run before kept, errors beside their knobs, the run as a script."""

from types import SimpleNamespace

import pytest

from chapter19_9.cockpit import Cockpit, fly

WAIT = 60


@pytest.fixture(scope="module")
def panel():
    made = Cockpit(world_size=2, strategy="zero1", blocks=2, width=32, knobs=["strategy", "batch", "accumulation"])
    yield made
    made.close()


def change(panel, **values):
    for name, value in values.items():
        panel.knobs[name].value = value
    assert panel.wait(WAIT)
    assert panel.error is None, panel.error


def test_a_change_is_one_run_beside_the_one_before(panel):
    runs, first = panel.runs, panel.result
    change(panel, strategy="fsdp2")
    assert panel.runs == runs + 1
    assert panel.before is first and panel.result.name(first) == "fsdp2, N = 2"
    assert panel.result.held == panel.result.held_formula
    assert panel.result.sent == pytest.approx(panel.result.sent_formula)
    [player] = panel.player.children
    assert [film["title"].partition(",")[0] for film in player.films] == ["ZeRO-1 by hand", "FSDP2"]
    assert panel.text().splitlines()[-1] == "fsdp2: states at rest equal the formula: True, bytes sent: True"


def test_what_is_no_lifecycle_says_so_and_comes_back(panel):
    change(panel, strategy="zero3", accumulation=2)
    assert panel.result.name(panel.before).splitlines() == ["zero3, N = 2", "accumulation 2"]
    assert panel.result.sent == pytest.approx(panel.result.sent_formula), "every pass gathers"
    [words] = panel.player.children
    assert "No lifecycle" in words.value
    change(panel, accumulation=1)
    assert len(panel.player.children[0].films) == 1


def test_a_value_that_does_not_go_stands_beside_its_knob(panel):
    change(panel, accumulation=1)
    picture = panel.picture.value
    panel.knobs["batch"].value = 8
    panel.knobs["accumulation"].value = 6
    assert panel.wait(WAIT)
    assert 'role="alert"' in panel.slots["batch"].value and "2 x 6 = 12" in panel.slots["batch"].value
    assert picture in panel.picture.value, "the last good one, paled"
    change(panel, batch=24)
    assert panel.slots["batch"].value == ""
    change(panel, accumulation=1)


def test_a_run_is_a_plain_script_with_its_command(panel, tmp_path):
    text = panel.save(tmp_path / "train.py").read_text()
    assert "from chapter19_9.train import train" in text and "run_rank(train, strategy=" in text
    assert "--nproc-per-node=2" in panel.script.value and "run_rank(train" in panel.script.value


def test_large_type_redraws_and_runs_nothing(panel):
    runs, size = panel.runs, tuple(panel.figure.get_size_inches())
    panel.large.value = True
    assert panel.runs == runs
    assert panel.figure.get_figwidth() < size[0] and panel.figure.get_figheight() > size[1]
    assert "d2l-large" in panel.view._dom_classes
    panel.large.value = False
    assert "d2l-large" not in panel.view._dom_classes


def test_a_lesson_takes_its_own_knobs_and_pictures():
    panel = Cockpit(
        knobs=["bandwidth"], shows=["peak", "sent"], strategy="zero3", world_size=2, blocks=1, width=32,
        bandwidth="80 MB/s",
    )  # fmt: skip
    try:
        assert list(panel.knobs) == ["world_size", "bandwidth"]
        assert panel.text().count("panels") == 2 and "timeline" not in panel.text()
        assert panel.player.children == () and panel.result.run.results[0].lifecycle is None
        assert panel.result.values["strategy"] == "zero3" and 0 < panel.result.saved < panel.result.peak
    finally:
        panel.close()


def test_a_knob_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="colour: the knobs are world_size, strategy, batch"):
        Cockpit(colour="red")
    with pytest.raises(ValueError, match=r"shows is \['colour'\]: it must be some of memory, peak, time"):
        Cockpit(shows=["colour"])
    with pytest.raises(ValueError, match=r"start\['blocks'\] is 3"):
        Cockpit(blocks=3)
    with pytest.raises(ValueError, match="bandwidth is '7 MB/s': it must be one of none, 320 MB/s"):
        Cockpit(knobs=["strategy"], bandwidth="7 MB/s")
    with pytest.raises(ValueError, match="checkpointing is 'no': it must be True or False"):
        Cockpit(checkpointing="no")


def test_behind_a_link_ranks_are_on_the_cpu_and_a_run_beside_one_on_gpus_says_so(monkeypatch):
    """Where there are GPUs; a link is pretended for CPU ranks only."""
    monkeypatch.setattr(
        "chapter19_9.cockpit.launch",
        lambda function, *, device, **_: SimpleNamespace(device=device or "cuda", world_size=2),
    )
    values = {"strategy": "ddp", "batch": 24, "accumulation": 1, "blocks": 2, "width": 64, "precision": "fp32"}
    free, slow = (fly(2, **values, checkpointing=False, bandwidth=name) for name in ("none", "20 MB/s"))
    assert (free.run.device, slow.run.device) == ("cuda", "cpu")
    assert slow.name(free) == "ddp, N = 2\nbandwidth 20 MB/s\non the CPU"
    assert free.name(slow) == "ddp, N = 2\nbandwidth none\non the GPU"
    assert free.name(free) == "ddp, N = 2"
