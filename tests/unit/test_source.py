"""The script that launch writes: what is accepted, what it holds, and what is refused before any process starts (L31)."""

import ast
import math
import subprocess
import sys
from dataclasses import dataclass

import pytest

from d2l_utils import launch
from d2l_utils.launching import source


@dataclass(frozen=True)
class Config:
    width: int = 4
    names: tuple = ("a",)


def helper():
    return 1


def plain(scale, config=None):
    """A reader's function."""
    return scale


def test_a_function_of_a_module_is_imported():
    text = source.script_for(plain, [], {"scale": 1.5}, "torchrun plain.py")
    assert f"from {__name__} import plain" in text and text.rstrip().endswith("run_rank(plain, scale=1.5)")
    assert ast.get_docstring(ast.parse(text)).endswith("torchrun plain.py")


def test_a_local_function_brings_its_source_and_imports():
    def local(n):
        return math.sqrt(n) + helper() + Config().width

    text = source.script_for(local, [], {"n": 4}, "torchrun local.py")
    assert (
        "import math\n" in text
        and f"from {__name__} import helper" in text
        and f"from {__name__} import Config" in text
    )
    assert "if True:\n    def local(n):\n        return math.sqrt(n)" in text


@pytest.mark.parametrize("value", [1, -2.5, "a'b\"\n", True, None, b"x", [1, (2,), {"k": [None]}], (), 1e-300])
def test_literals_come_back(value):
    assert ast.literal_eval(source.literal(value, set(), "argument 'x'")) == value


def test_not_finite_numbers_and_dataclasses():
    imports = set()
    assert (
        math.isnan(eval(source.literal(float("nan"), imports, "x")))
        and eval(source.literal(-math.inf, imports, "x")) == -math.inf
    )
    assert source.literal(Config(8), imports, "x") == "Config(width=8, names=('a',))"
    assert imports == {f"from {__name__} import Config"}


@pytest.mark.parametrize("value", [object(), {1, 2}, plain, Config, 1j])
def test_what_cannot_be_written_is_named(value):
    with pytest.raises(TypeError, match=r"argument 'x' is a .*numbers, strings"):
        source.literal(value, set(), "argument 'x'")


def test_what_a_definition_needs_at_once_comes_before_it():
    """The order in `uses` does not matter; a body may name what follows, and two that name each other stay as they are."""

    box = "class Box(Base, unit=UNIT()):\n    sizes = [one(1)]\n    def show(self, how=one):\n        return last(self)"
    texts = {"Box": box, "last": "def last(x):\n    return Box()", "Base": "class Base: pass"}
    texts |= {"UNIT": "def UNIT(): pass", "one": "@again\ndef one(x: Base): pass", "again": "def again(f): return one"}
    assert source.in_order(texts) == ["Base", "UNIT", "again", "one", "Box", "last"]
    assert source.in_order({"a": "class a(b): pass", "b": "class b(a): pass"}) == ["b", "a"]
    # a decorator runs at once, and so does what it calls
    texts = {"f": "@mark\ndef f(): pass", "mark": "def mark(f): return note(f)", "note": "def note(f): return f"}
    assert source.in_order(texts) == ["mark", "note", "f"] or source.in_order(texts) == ["note", "mark", "f"]
    # save for what needs the very definition at once
    texts = {"Box": "class Box(Base): pass", "Base": "class Base:\n    def last(self): return last()"}
    assert source.in_order(texts | {"last": "def last(x=Box()): pass"}) == ["Base", "Box", "last"]


def defined(tmp_path, *cells):
    """Names of cells that were run one after the other."""
    scope = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        file = tmp_path / f"cell{number}.py"
        file.write_text(cell)
        exec(compile(cell, str(file), "exec"), scope)
    return scope


def test_a_name_is_what_the_notebook_means_by_it(tmp_path):
    """A helper's older self, another name for it and two of one name would be another function in the script, or none."""
    cell = "def scale(): return 1\n\nfirst = other = scale\n"
    scope = defined(tmp_path, cell, "def scale(): return 2\n\ndef f(): return scale()\n\ndef g(): return other()\n")
    f, g, scale, first = (scope[name] for name in ("f", "g", "scale", "first"))
    assert "return 2" in source.script_for(f, [scale], {}, "torchrun f.py")
    with pytest.raises(TypeError, match="f names scale, which the notebook has defined anew"):
        source.script_for(f, [first], {}, "torchrun f.py")
    with pytest.raises(TypeError, match="g names other, which was defined as scale"):
        source.script_for(g, [first], {}, "torchrun g.py")
    with pytest.raises(TypeError, match="two different things are called scale"):
        source.script_for(f, [scale, first], {}, "torchrun f.py")


def test_a_helper_may_call_the_function_itself(tmp_path):
    cell = "def even(n=2): return n == 0 or odd(n - 1)\n\ndef odd(n): return n != 0 and even(n - 1)\n"
    scope = defined(tmp_path, cell)
    exec(source.script_for(scope["even"], [scope["odd"]], {}, "torchrun f.py").partition("if __name__")[0], made := {})
    assert made["even"]() and not made["even"](3)


def test_helpers_in_any_order(tmp_path):
    scope, file = {"__name__": "__main__"}, str(tmp_path / "cell.py")
    cell = "def double(f):\n    return f\n\n@double\ndef first(): return 1\n\nclass Big: pass\n\nclass Small(Big): pass\n\n"
    cell += "def f():\n    return first(), Small()\n"
    (tmp_path / "cell.py").write_text(cell)
    exec(compile(cell, file, "exec"), scope)
    uses = [scope[name] for name in ("Small", "first", "Big", "double")]
    try:
        sys.modules["__main__"].__dict__.setdefault("In", []).append(cell)  # where a kernel keeps its cells
        text = source.script_for(scope["f"], uses, {}, "torchrun f.py").partition("if __name__")[0]
    finally:
        sys.modules["__main__"].__dict__["In"].remove(cell)
    exec(text, made := {})
    assert made["f"]()[0] == 1


def closure():
    n = 3

    def inner():
        return n

    return inner


def test_the_source_is_untouched():
    """An indented definition is not shifted: that would change the strings in it."""

    def local():
        return """
        x

        """

    scope = {}
    text = source.script_for(local, [], {}, "torchrun local.py").partition("if __name__")[0]
    exec(text, scope)
    assert scope["local"]() == local()


def decorate(function):
    import functools

    return functools.wraps(function)(lambda: function())


@decorate
def decorated():
    return 1


async def coroutine():
    pass


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda: 1, "lambda"),
        (closure(), "closure over n"),
        (print, "builtin"),
        (Config, "type"),
        (Config(), "Config"),
        ("".join, "builtin"),
        (coroutine, "coroutine"),
        (decorated, "wrapped by a decorator"),
        (3, "int"),
        (None, "NoneType"),
    ],
)
def test_L31_what_is_not_accepted(function, words):
    with pytest.raises(TypeError, match=words) as caught:
        launch(function, world_size=1)
    assert "launch takes a function of an installed module" in str(caught.value)


def test_arguments_must_fit():
    with pytest.raises(TypeError, match=r"plain\(scale, config=None\) cannot be called with \['size'\]"):
        launch(plain, world_size=1, size=3)


@pytest.mark.parametrize("uses", [["helper"], [3], 3])
def test_uses_takes_functions_and_classes(uses):
    with pytest.raises(TypeError, match="uses has"):
        launch(plain, world_size=1, uses=uses, scale=1)


def test_no_such_script():
    with pytest.raises(FileNotFoundError, match=r"nowhere\.py"):
        launch("nowhere.py", world_size=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": "5"}, "timeout is '5'"),
        ({"timeout": True}, "timeout is True"),
        ({"timeout": math.inf}, "timeout is inf"),
        ({"nodes": 3}, "nodes is 3"),
        ({"nodes": 0}, "nodes is 0"),
        ({"output": "loud"}, "output is 'loud'"),
        ({"world_size": 0}, "world_size is 0"),
        ({"world_size": -1}, "world_size is -1"),
        ({"world_size": 1.5}, "world_size is 1.5"),
        ({"world_size": "2"}, "world_size is '2'"),
        ({"world_size": True}, "world_size is True"),
        ({"world_size": 500}, "world_size is 500"),
    ],
)
def test_L23_L24_bad_arguments_before_any_process(arguments, words, monkeypatch):
    import subprocess

    def started(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", started)
    with pytest.raises(ValueError, match=words):
        launch(plain, **({"world_size": 4} | arguments), scale=1)


def test_a_launch_while_python_ends(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(
        "import atexit\nfrom d2l_utils import launch\nfrom d2l_utils.collectives import exchange\n"
        "def late():\n    try:\n        launch(exchange, world_size=1)\n    except RuntimeError as e:\n        print(e)\n"
        "atexit.register(late)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Python is ending") and done.stderr == ""
