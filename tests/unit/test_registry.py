"""The registry against the files; imports run one way; the exported names."""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import chapter19_9.strategies as registry
import d2l_utils
from chapter19_9.compare import compare, main
from chapter19_9.strategies import OPTIONAL, STRATEGIES, Exchange, Strategy, get
from chapter19_9.train import train

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(registry.__file__).parent
ALL = {**STRATEGIES, **OPTIONAL}


def test_every_file_is_registered_and_every_entry_has_its_file():
    files = {file.stem for file in FOLDER.glob("*.py")} - {
        "__init__",
        "facts",
        "shards",
        "ring",
        "outputs",
        "deepspeed",
    }
    assert files == set(ALL)
    assert all(name == strategy.name for name, strategy in ALL.items())
    # what needs an extra is in no list that a lesson goes through, installed or not
    assert [strategy.extra for strategy in STRATEGIES.values()] == [""] * len(STRATEGIES)
    assert [strategy.extra for strategy in OPTIONAL.values()] == ["deepspeed"] * 4


@pytest.mark.parametrize("strategy", ALL.values(), ids=lambda strategy: strategy.name)
def test_each_strategy_says_what_it_is_and_does_what_train_asks_of_it(strategy):
    module = importlib.import_module(strategy.module)  # without its extra, too
    assert list(inspect.signature(module.shard).parameters)[:2] == ["model", "device"]
    others = list(inspect.signature(module.shard).parameters.values())[2:]
    names = list(inspect.signature(module.optimizer).parameters.values())
    assert [parameter.name for parameter in names[:2]] == ["model", "lr"]
    optional = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    assert all(p.default is not p.empty or p.kind in optional for p in [*others, *names[2:]])
    ends_in_parts = strategy.gradients == "sharded" or strategy.cut == "flat"
    assert hasattr(module, "gradient_parts") == hasattr(module, "gathered") == ends_in_parts
    for word in ("Shards", "communicat" if not strategy.communicates else "reduced", "Costs", "API:"):
        assert word in module.__doc__, word
    assert strategy.api.rpartition(".")[2] in module.__doc__ + inspect.getsource(module)
    assert strategy.title
    assert strategy.source
    if not strategy.extra:  # importing that would take seconds, and it may not be there
        parts = strategy.api.split(".")
        found = torch
        for part in parts[1:]:
            found = getattr(found, part)
        assert inspect.isclass(found) or inspect.isfunction(found) or found is torch.distributed
    assert len(inspect.getsource(module).splitlines()) <= 155  # short enough to read in a lesson


@pytest.mark.parametrize("strategy", ALL.values(), ids=lambda strategy: strategy.name)
def test_facts_fit_together(strategy):
    sharded = [state for state in ("parameters", "gradients", "optimizer") if getattr(strategy, state) == "sharded"]
    assert (strategy.cut == "none") == (not sharded)
    assert "optimizer" in sharded or not sharded
    # what is sharded has to be brought together, what is averaged has to be sent
    moved = {(exchange.collective, exchange.of) for exchange in strategy.communicates}
    gathers = {("all_gather", "parameters"), ("broadcast", "parameters")}
    assert bool(moved & gathers) == bool(sharded)
    reduces = {("reduce_scatter", "gradients"), ("all_reduce", "gradients")}
    assert bool(moved & reduces) == (strategy.name != "single")


def test_the_optimizer_holds_what_it_is_given():
    module = get("single").load()
    model = module.shard(nn.Linear(3, 5), torch.device("cpu"))
    optimizer = module.optimizer(model, 0.5)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="strategy is 'zero9': it must be one of single, ddp"):
        get("zero9")


@pytest.fixture
def without_deepspeed(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "deepspeed" else real(name, *rest)
    )


@pytest.mark.usefixtures("without_deepspeed")
def test_without_its_extra_a_strategy_says_what_to_install(monkeypatch, capsys):
    message = "strategy 'deepspeed2' needs the extra 'deepspeed', which is not installed here"
    monkeypatch.setattr("d2l_utils.launch", lambda *_, **__: pytest.fail("a process was started"))
    for use in (get("deepspeed2").load, lambda: compare(["ddp", "deepspeed2"]), lambda: train("deepspeed2", steps=1)):
        with pytest.raises(ValueError, match=message):
            use()
    with pytest.raises(SystemExit) as end:
        main(["--strategies", "deepspeed2"])
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.endswith("python -m pip install --no-build-isolation -e '.[deepspeed]'\n")
    assert get("deepspeed2").title == "DeepSpeed stage 2"  # its facts need nothing


def test_the_comparison_has_what_is_installed(monkeypatch):
    asked = []
    monkeypatch.setattr("chapter19_9.compare.compare", lambda strategies, *_, **__: asked.append(strategies) or [])
    monkeypatch.setattr(Strategy, "installed", property(lambda self: True))
    main([])
    monkeypatch.setattr(Strategy, "installed", property(lambda self: not self.extra))
    main([])
    assert asked == [list(ALL), list(STRATEGIES)]


def test_facts_are_frozen_and_read_well():
    with pytest.raises(dataclasses.FrozenInstanceError):
        get("ddp").name = "x"
    assert str(get("ddp").communicates[0]) == "all_reduce of gradients in backward"
    assert Strategy("x", "x", "", "").parameters == "replicated"
    assert Exchange("all_gather", "parameters", "forward") == Exchange("all_gather", "parameters", "forward")


def test_reading_the_registry_needs_no_torch():
    code = "import sys, chapter19_9.strategies as s; s.get('ddp'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def imported(file):
    """The top-level packages that a Python file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            yield node.module.partition(".")[0]


def test_the_reader_of_imports_sees_them_all(tmp_path):
    file = tmp_path / "x.py"
    file.write_text("import a.b, c\nfrom d.e import f\ndef g():\n    import h\n    from i import j\n")
    assert list(imported(file)) == ["a", "c", "d", "h", "i"]


ALLOWED = {"d2l_utils": {"d2l_utils"}, "chapter19_9": {"d2l_utils", "chapter19_9"}}


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_run_one_way(package):
    ours = {"d2l_utils", "chapter19_9", "notebooks", "tests"}
    files = sorted((ROOT / package).rglob("*.py"))
    assert len(files) > 5
    for file in files:
        wrong = (set(imported(file)) & ours) - ALLOWED[package]
        assert not wrong, f"{file.relative_to(ROOT)} imports {wrong}"


def test_what_ranks_import_never_imports_dnnlpy():
    for package in ALLOWED:
        for file in sorted((ROOT / package).rglob("*.py")):
            assert "dnnlpy" not in set(imported(file)), file


def test_d2l_utils_knows_nothing_of_zero():
    for file in sorted((ROOT / "d2l_utils").rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        words = ("ZeRO", "ZeroRedundancy", "fully_shard", "deepspeed")
        if file.name == "meanings.py":  # it says what torch's errors mean, and names torch's functions
            words = ("ZeRO", "chapter19_9", "deepspeed")
        assert not any(word in text for word in words), file


def test_exported_names():
    assert sorted(d2l_utils.__all__) == ["LaunchError", "LaunchStopped", "LaunchTimeout", "Run", "launch", "warm_up"]
    for name in d2l_utils.__all__:
        assert getattr(d2l_utils, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        d2l_utils.nothing  # noqa: B018
    assert dir(d2l_utils) == sorted(d2l_utils.__all__)


def test_importing_d2l_utils_imports_no_torch():
    code = "import sys, d2l_utils; assert 'torch' not in sys.modules; assert 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
