"""The script that launch writes: what is accepted, what it holds, and what is refused before any process starts (L31)."""

import ast
import importlib
import math
import subprocess
import sys
from dataclasses import InitVar, dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from d2l_utils import launch
from d2l_utils.launching import definitions, source
from d2l_utils.launching.definitions import definition_of
from d2l_utils.launching.names import global_names


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


def test_with_future_annotations_a_base_comes_before_what_names_it_the_other_way():
    """Two classes may name each other, one as its base and one in an annotation; what is only named there comes before too."""
    texts = {"Node": "class Node:\n    next: Leaf", "Leaf": "class Leaf(Node): pass"}
    assert source.in_order(texts, future_annotations=True) == ["Node", "Leaf"]
    texts = {"f": "def f(x: Kind) -> Other: pass", "Kind": "class Kind: pass", "Other": "class Other: pass"}
    assert source.in_order(texts, future_annotations=True) == ["Kind", "Other", "f"]


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


@pytest.mark.parametrize("name", ["world_size", "nodes", "device", "restarts", "timeout", "uses", "output", "stop"])
@pytest.mark.parametrize("parameter", ["{}", "{}=None", "*, {}=3"])
def test_a_parameter_with_the_name_of_launchs_own_keyword_is_named(tmp_path, name, parameter):
    """X17: launch kept the argument, and the function never saw it."""
    scope = defined(tmp_path, f"def needs({parameter.format(name)}): return 1")
    with pytest.raises(
        TypeError, match=f"needs has a parameter '{name}', and {name} is a keyword of launch itself.*: rename"
    ):
        launch(scope["needs"], **{"world_size": 1, "timeout": 30, name: 2})


def test_a_parameter_called_function_is_the_readers(tmp_path):
    scope = defined(tmp_path, "def needs(function, other): return function")
    with pytest.raises(TypeError, match=r"needs\(function, other\) cannot be called with \['function'\]"):
        launch(scope["needs"], world_size=1, function=3)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.int64(3), "3"),
        (np.float32(0.5), "0.5"),
        (np.bool_(True), "True"),
        (np.str_("a"), "'a'"),
        (np.float64("nan"), "float('nan')"),
        ([np.int8(1), {np.int64(2): (np.float64(3),)}], "[1, {2: (3.0,)}]"),
    ],
)
def test_numpy_scalars_are_taken_as_their_value(value, text):
    """X42"""
    assert source.literal(value, set(), "argument 'x'") == text


def test_a_list_that_holds_itself_is_refused():
    """X42: it was a RecursionError."""
    itself: list = []
    itself.extend([itself, {"a": itself}])
    with pytest.raises(TypeError, match="argument 'scale' holds itself, or is nested more than 50 deep"):
        launch(plain, world_size=1, scale=itself)


def test_a_notebook_is_no_script(tmp_path):
    """X42: it was run, and failed at its first `null`."""
    (tmp_path / "lesson.ipynb").write_text("{}")
    with pytest.raises(TypeError, match=r"lesson\.ipynb', a notebook: launch takes a script"):
        launch(tmp_path / "lesson.ipynb", world_size=1)


def test_names_of_the_script_itself_mean_one_thing(tmp_path):
    scope = defined(tmp_path, "def run_rank(): return 1\n\nclass Config: pass\n\ndef f(c): return c\n")
    with pytest.raises(TypeError, match="run_rank is what the script itself calls"):
        source.script_for(scope["run_rank"], [], {}, "torchrun f.py")
    cell = "def Config(): return 1\n\ndef g(c): return c\n"
    scope = defined(tmp_path, cell)
    with pytest.raises(
        TypeError, match=f"Config would mean two things .*a definition of the notebook, and from {__name__}"
    ):
        source.script_for(scope["g"], [scope["Config"]], {"c": Config()}, "torchrun g.py")


def test_a_text_that_is_not_the_functions_own_is_refused(tmp_path):
    """The file was edited after it ran: by its line another function would have been taken."""
    cell = "import math\n\ndef first(): return 1\n\ndef step(x=2): return math.floor(x) * 1\n"
    scope = defined(tmp_path, cell)
    assert definition_of(scope["step"]).text == "def step(x=2): return math.floor(x) * 1"
    file = tmp_path / "cell0.py"
    file.write_text("# moved\n\n" + cell)
    assert definition_of(scope["step"]).text == "def step(x=2): return math.floor(x) * 1"
    for text, words in [
        (cell.replace("floor", "ceil"), "its code is another"),
        (cell.replace("* 1", "* 1.0"), "its code is another"),
        (cell.replace("* 1", "* True"), "its code is another"),
        (cell.replace("x=2", "x=3"), "the default of x is 2, and the text says 3"),
        (cell.replace("x=2", "x=2.0"), "the default of x is 2, and the text says 2.0"),
        (cell.replace("x=2", "x"), "other parameters have a default"),
        (cell.replace("def step", "async def step"), "its code is another"),
        (cell.replace("def step", "if False:\n  def step"), "it stands where nothing runs"),
    ]:
        file.write_text(text)
        with pytest.raises(TypeError, match=f"is not the step that the notebook has: {words}"):
            definition_of(scope["step"])
    file.write_text("def other(): pass")
    with pytest.raises(TypeError, match="the source of step cannot be found"):
        definition_of(scope["step"])


CLASSES = """
import abc, enum, functools, torch
from dataclasses import dataclass, field
from typing import ClassVar, Generic, NamedTuple, Protocol, TypedDict, TypeVar
T = TypeVar("T")
class Base: pass
class Meta(type): pass
class Plain:
    "Says what it is."
    width: int = 2 * 4
    names = ["a", {"b": (1, -2.5)}]
    __secret = 3
    kind = enum.Enum
    made = [n for n in range(3)]
    if width: other = 1
    def size(self, scale=width, *, unit=None): return self.__secret, __class__
    @property
    def area(self): return self.width
    @area.setter
    def area(self, value): pass
    @staticmethod
    def fixed(x=1): return x
    @functools.cached_property
    def kept(self): return lambda: 1
    class Inner:
        depth = 1
        def down(self): return 1
class Explicit(object): pass
class Derived(Plain, metaclass=Meta): x = 1
class Slots: __slots__ = ("a", "b")
@dataclass(frozen=True, slots=True)
class Fields:
    a: int
    b: float = 0.5
    c: list = field(default_factory=list)
    d: ClassVar[int] = 3
class Tuple(NamedTuple):
    x: int
    y: int = 2
class Dict(TypedDict, total=False):
    a: int
class Colour(enum.Enum):
    RED = 1
    BLUE = enum.auto()
    def shown(self): return 1
class Number(float, enum.Enum):
    ONE = 1
class Planet(enum.Enum):
    EARTH = (1, 2)
    def __init__(self, mass, radius): self.mass = mass
class Abstract(abc.ABC):
    @abc.abstractmethod
    def f(self): ...
class Shape(Protocol):
    side: int
class Old(Generic[T]): x = 1
class New[S](Base): x: S = 1
class Net(torch.nn.Module):
    depth = 2
    @torch.no_grad()
    def forward(self, x=torch.float32): return super().forward(x)
class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x
class Error(ValueError): code = 3
"""


def test_unchanged_classes_are_accepted_and_changed_ones_are_not(tmp_path, monkeypatch):
    """Every kind of class is compared with its own text, so that none is refused for what its metaclass or decorator adds."""
    (tmp_path / "cell.py").write_text(CLASSES)
    scope = {"__name__": "cell_of_classes"}
    module = type(sys)("cell_of_classes")
    module.__file__ = str(tmp_path / "cell.py")
    monkeypatch.setitem(sys.modules, "cell_of_classes", module)
    scope = vars(module)
    exec(compile(CLASSES, module.__file__, "exec"), scope)
    classes = [v for v in scope.values() if isinstance(v, type) and v.__module__ == "cell_of_classes"]
    assert len(classes) == 19
    for cls in classes:
        assert definition_of(cls).text.partition("class ")[2].startswith(cls.__name__)
    for name, old, new in [
        ("Plain", "2 * 4", "2 * 5"),
        ("Plain", "-2.5", "2.5"),
        ("Plain", "__secret = 3", "__secret = 4"),
        ("Plain", "return self.width", "return 2 * self.width"),
        ("Plain", "fixed(x=1)", "fixed(x=2)"),
        ("Plain", "depth = 1", "depth = 2"),
        ("Plain", "down(self): return 1", "down(self): return 2"),
        ("Plain", "kind = enum.Enum", "kind = enum.Flag"),
        ("Plain", "lambda: 1", "lambda: 2"),
        ("Plain", "width: int", "width: int = 8; height: int"),
        ("Derived", "class Derived(Plain,", "class Derived(Base,"),
        ("Derived", "class Derived(Plain, ", "class Derived(Plain, Base, "),
        ("Slots", '("a", "b")', '("a", "c")'),
        ("Fields", "0.5", "0.25"),
        ("Fields", "a: int\n    b", "z: int\n    b"),
        ("Tuple", "y: int = 2", "y: int = 3"),
        ("Colour", "RED = 1", "RED = 2"),
        ("Number", "ONE = 1", "ONE = 2"),
        ("Net", "depth = 2", "depth = 3"),
        ("Net", "x=torch.float32", "x=torch.float64"),
        ("Net", "super().forward(x)", "super().forward()"),
        ("New", "x: S = 1", "x: S = 2"),
        ("Error", "code = 3", "code = 4"),
    ]:
        assert CLASSES.count(old), old
        (tmp_path / "cell.py").write_text(CLASSES.replace(old, new))
        with pytest.raises(TypeError, match=f"is not the {name} that the notebook has"):
            definition_of(scope[name])


def test_two_definitions_that_look_alike_are_refused(tmp_path, monkeypatch):
    """Nothing in a class without functions says which of them ran, where only calls differ."""
    text = "if FAST:\n    class A: x = sorted([])\nelse:\n    class A: x = sorted(())\n"
    module = type(sys)("cell_of_two")
    module.__file__, module.FAST = str(tmp_path / "cell.py"), True
    monkeypatch.setitem(sys.modules, "cell_of_two", module)
    (tmp_path / "cell.py").write_text(text)
    exec(compile(text, module.__file__, "exec"), vars(module))
    if sys.version_info >= (3, 13):  # a class knows its line
        assert "[]" in definition_of(module.A).text
    else:
        with pytest.raises(TypeError, match="2 definitions of A in one cell look alike"):
            definition_of(module.A)


def test_names_that_a_text_reads():
    assert global_names("def f():\n    global n, made\n    n += 1\n    made = 2") == {"n"}
    assert global_names("def f(x: A = B) -> C:\n    y: D = 1") == {"A", "B", "C", "D"}
    assert global_names("def f(x: A = B) -> C:\n    y: D = 1", future_annotations=True) == {"B"}


def test_a_look_at_the_text_takes_no_time(tmp_path):
    """Most launches import their function; a cell's is compiled once more."""
    import time

    cell = "import math\n" + "".join(f"def f{n}(x={n}): return math.floor(x) + {n}\n" for n in range(100))
    scope = defined(tmp_path, cell)
    times = []
    for _ in range(5):
        begun = time.process_time()
        definition_of(scope["f50"])
        times.append(time.process_time() - begun)
    assert min(times) < 0.02


def test_names_that_were_imported_under_another_name(tmp_path):
    cell = "from math import floor as down\nfrom os import path, getcwd as here\nfrom torch import nn as layers, tensor, relu as r\n"
    cell += "def f(): return down, path, here, layers, tensor, r, __name__\n"
    text = source.script_for(defined(tmp_path, cell)["f"], [], {}, "torchrun f.py")
    for line in ("from math import floor as down", "import posixpath as path", "from torch import tensor"):
        assert f"\n{line}\n" in text
    assert "import getcwd as here" in text and "import torch.nn as layers" in text and "import relu as r" in text


def test_a_reloaded_wrapper_is_told_by_what_it_wraps(tmp_path, monkeypatch):
    """All functions under one decorator have the wrapper's code."""
    file = tmp_path / "wrapped_steps.py"
    file.write_text("import torch\n\n@torch.no_grad()\ndef step(): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module = importlib.import_module("wrapped_steps")
    older = module.step
    importlib.reload(module)
    assert source.importable(older)
    file.write_text("import torch\n\n@torch.no_grad()\ndef step(): return 2\n")
    importlib.reload(module)
    assert not source.importable(older)


@dataclass
class Doubled:
    """Its constructor changes what it is given; `heads` is no argument of it."""

    width: int = 4
    heads: int = field(default=1, init=False)

    def __post_init__(self):
        self.width *= 2


@dataclass
class Derived:
    """Its constructor computes a field of the others, and the same again."""

    width: int = 4
    half: int = field(init=False)

    def __post_init__(self):
        self.half = self.width // 2


@dataclass
class Scaled:
    width: int = 4
    by: InitVar[int] = 2

    def __post_init__(self, by):
        self.width *= by


def changed(value, **attributes):
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
    return value


def test_a_dataclass_is_written_only_where_its_constructor_makes_it_again():
    """The rank got 12 where the notebook had 6, and the default of a field that no constructor takes."""
    assert source.literal(Derived(6), set(), "argument 'c'") == "Derived(width=6)"
    for value, words in (
        (Doubled(3), "argument 'c' is a Doubled whose width is 6; made again of its fields it would be 12"),
        (Scaled(3, 5), "argument 'c' is a Scaled whose width is 15; made again of its fields it would be 30"),
        (
            changed(Doubled(0), heads=9),
            "argument 'c' is a Doubled whose heads is 9; made again of its fields it would be 1",
        ),
        (
            changed(Derived(6), half=5),
            "argument 'c' is a Derived whose half is 5; made again of its fields it would be 3",
        ),
        (
            changed(Derived(6), lr=0.1),
            "argument 'c' has lr, which was added to it and which no Derived of a rank would have",
        ),
    ):
        with pytest.raises(TypeError, match=f"{words}: make the {type(value).__name__} inside the function"):
            source.literal(value, set(), "argument 'c'")


def test_launchs_own_numbers_may_be_numpys():
    """world_size did so already; `nodes is np.int64(2): allowed is a whole number` says nothing."""
    with pytest.raises(TypeError, match="cannot be called"):  # what is looked at next
        launch(plain, world_size=np.int64(2), nodes=np.int64(2), restarts=np.int64(0), wrong=1)


COMPUTED = """
import random, time
def draws(seed=random.randint(0, 10**9), *, at=time.time(), plain=3): return seed, at, plain
class Settings:
    lr = random.random()
    steps = 3
    def method(self): return self.lr
def uses_it(): return draws(), Settings.lr, Settings().method(), Settings.steps
"""


def test_what_a_call_computed_in_the_notebook_is_the_ranks_value(tmp_path):
    scope = defined(tmp_path, COMPUTED)
    text = source.script_for(scope["uses_it"], [scope["draws"], scope["Settings"]], {}, "torchrun")
    again = {"__name__": "script"}
    exec(compile(text, "script", "exec"), again)
    assert again["uses_it"]() == scope["uses_it"]()
    assert "Settings.steps =" not in text and text.count("# as in the notebook") == 3


def test_a_default_that_has_no_literal_is_computed_anew(tmp_path):
    scope = defined(tmp_path, "def keeps(lock=object(), n=int('3')): return n")
    text = source.script_for(scope["keeps"], [], {}, "torchrun")
    assert "as in the notebook" not in text


def test_strings_of_a_cell_that_are_no_code_are_passed_over(monkeypatch):
    shell = SimpleNamespace(transform_cell=TransformerManager().transform_cell)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    cell = 'note = "f is\\n    no\\n  code"\nrun("def f(): pass")'
    assert list(definitions._inner_texts(cell, "f")) == ["def f(): pass\n"]


@pytest.mark.parametrize("value", [3, [1, 2], ["other", None]])
def test_a_variable_called_In_is_the_readers(monkeypatch, value):
    monkeypatch.setattr(sys.modules["__main__"], "In", value, raising=False)
    assert "def plain" in definition_of(plain).text and list(definitions._texts(plain))
