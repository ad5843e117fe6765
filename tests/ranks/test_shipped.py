"""In a real kernel: the ranks run what the notebook has, or the launch is refused in plain words before any process (issue 9)."""

import os

import pytest

from tests.ranks.test_kernel import Kernel

SETUP = """
import dataclasses, enum, functools, subprocess, sys, time, typing
from dataclasses import dataclass
from d2l_utils import launch
from d2l_utils.launching import source
STUB = "import runpy, sys, types; worker = sys.modules['d2l_utils.launching.worker'] = types.ModuleType('worker'); " \\
    "worker.run_rank = lambda f, **k: print(ascii(f(**k))); runpy.run_path(sys.argv[1], run_name='__main__')"
def in_plain_python(function, uses=()):
    'What a plain Python gets from the script: what a rank would, in a tenth of the time.'
    file = f"{folder}/{function.__name__}.py"
    with open(file, "w", encoding="utf-8") as script:
        script.write(source.script_for(function, uses, {}, ""))
    env = {"PYTHONPATH": ":".join(sys.path)}
    return subprocess.run([sys.executable, "-c", STUB, file], capture_output=True, text=True, check=True, env=env).stdout
def ranks(function, uses=(), **arguments):
    return launch(function, uses=uses, world_size=1, output="quiet", **arguments).results[0]
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    opened = Kernel(PYTHONDONTWRITEBYTECODE="")
    try:
        assert opened.run(f"folder = {str(tmp_path_factory.mktemp('scripts'))!r}" + SETUP)[1] is None
        yield opened
    finally:
        opened.end()


def both(kernel, call, *cells, uses="[]"):
    """What the notebook and the script get from `call`, a function's name; the cells run before."""
    for cell in cells:
        _, name, error = kernel.run(cell)
        assert name is None, error
    text, name, error = kernel.run(f"print('[', ascii({call}()), ',', in_plain_python({call}, {uses}), ']', sep='')")
    assert name is None, error
    return eval(text)


def refused(kernel, launch, *cells):
    """The words of the TypeError with which `launch` is refused."""
    for cell in cells:
        _, name, error = kernel.run(cell)
        assert name is None, error
    _, name, error = kernel.run(launch)
    assert name == "TypeError" and error.startswith("TypeError: ") and "launcher.py" not in error, error
    return error


def test_builtins_are_pythons_own_whatever_the_notebook_has_under_their_names(kernel):
    """X01: IPython puts an `open`, `exit` and `quit` of its own into the notebook."""
    cell = "def reads():\n    def inner():\n        return open(dataclasses.__file__).readline()\n    return inner()"
    notebook, rank = both(kernel, "reads", cell)
    assert notebook == rank and rank
    assert kernel.run("print(ranks(reads) == reads())")[0] == "True\n"
    assert both(kernel, "leaves", "def leaves(): return exit is not None and quit is not None") == [True, True]
    assert both(kernel, "own", "def open_(): return 4\ndef own(): return open_()", uses="[open_]") == [4, 4]


@pytest.mark.parametrize("name", ["get_ipython()", "In", "Out", "_", "_i", "_dh", "display", "display(3)"])
def test_what_only_ipython_has_is_refused(kernel, name):
    error = refused(kernel, "ranks(asks)", f"def asks():\n    return {name}")
    assert f"asks names {name.partition('(')[0]}, which only IPython has" in error


@pytest.mark.parametrize("line", ["!ls", "%time 3", "x = !ls", "print?"])
def test_lines_that_only_ipython_knows_are_refused(kernel, line):
    assert "asks names get_ipython, which only IPython has" in refused(
        kernel, "ranks(asks)", f"def asks():\n    {line}"
    )


MAGICS = ["%%time\n", "%%capture\n", "%%prun -q\n", "%%time\n%%capture\n", "%%time\n# a comment\n\n"]


@pytest.mark.parametrize("magic", MAGICS, ids=repr)
def test_cells_of_magics_are_shipped(kernel, magic):
    """X02: the older class of a plain cell went to the ranks, and functions of such cells were not found."""
    plain = "class Config:\n    lr = 0.1\ndef rate(x=0.1):\n    return x"
    later = magic + "class Config:\n    lr = 0.5\ndef rate(x=0.5):\n    return x"
    assert both(kernel, "asks", plain, later, "def asks(): return [Config.lr, rate()]", uses="[Config, rate]") == [
        [0.5, 0.5],
        [0.5, 0.5],
    ]
    assert both(kernel, "rate") == [0.5, 0.5]


def test_cells_that_no_history_has(kernel):
    cells = ["get_ipython().run_cell('class Hidden:\\n    width = 4')", "def asks(): return Hidden.width"]
    assert both(kernel, "asks", *cells, uses="[Hidden]") == [4, 4]
    made = "text = 'def ' + 'made(): return 1'\nexec(text)"
    assert "the source of made cannot be found" in refused(kernel, "ranks(made)", made)
    assert both(kernel, "said", "exec('def said(): return 5')") == [5, 5]


def test_the_branch_that_ran_is_shipped(kernel):
    """X03: the last class of that name in the cell went to the ranks."""
    for fast, width in ((True, 8), (False, 64)):
        cell = f"if {fast}:\n    class Net: width = 8\nelse:\n    class Net: width = 64\ndef asks(): return Net.width"
        assert both(kernel, "asks", cell, uses="[Net]") == [width, width]
        cell = f"if {fast}:\n    def size(x=8): return x\nelse:\n    def size(x=64): return x"
        assert both(kernel, "size", cell) == [width, width]
    cell = "def outer():\n    class Net: width = 1\n    return Net\nclass Net: width = 100\nclass Box:\n    class Net: width = 2"
    assert both(kernel, "asks", cell, "def asks(): return Net.width", uses="[Net]") == [100, 100]


CHANGED = {
    "attribute": ("class A:\n    x = 1", "A.x = 2", "x is 2, and the text says 1"),
    "method": ("class A:\n    def f(self): return 1", "A.f = lambda self: 2", "its f is another"),
    "added": ("class A: pass", "A.y = 2", "y was added to it"),
    "removed": ("class A:\n    x = 1\n    z = 5", "del A.x", "it has no x any more"),
    "base": ("class B: pass\nclass A(B): pass", "class B: x = 1", "its base B was defined anew"),
    "default": ("def A(x=1): return x", "A.__defaults__ = (2,)", "the default of x is 2, and the text says 1"),
    "code": ("def A(): return 1\ndef B(): return 2", "A.__code__ = B.__code__", "its code is another"),
    "wrapped": ("def A(): return 1", "A = functools.wraps(A)(lambda: 2)", "it was wrapped after it was defined"),
    "nested": ("class A:\n    class In: x = 1", "A.In.x = 2", "its In is another"),
    "property": (
        "class A:\n    @property\n    def x(self): return 1",
        "A.x = property(lambda self: 2)",
        "its x is another",
    ),
    "field": ("@dataclass\nclass A:\n    x: int = 1", "A.x = 2", "x is 2, and the text says 1"),
    "member": ("class A(enum.Enum):\n    x = 1", "A.x._value_ = 2", "x is 2, and the text says 1"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_was_changed_after_its_definition_is_refused(kernel, name):
    """The rank would have it as the text says, and the notebook as it is now."""
    cell, change, words = CHANGED[name]
    cells = [cell, change, "def asks(): return A"]
    uses = "[A, B]" if name in ("base", "code") else "[A]"
    error = refused(kernel, f"ranks(asks, {uses})", *cells)
    assert "the text that was found for A is not the A that the notebook has" in error and words in error
    assert "Run its definition again" in error


OBJECTS = {
    "instance": "class C: pass\nthing = C()",
    "member": "class C(enum.Enum):\n    RED = 1\nthing = C.RED",
    "type variable": "thing = typing.TypeVar('thing')",
    "new type": "thing = typing.NewType('thing', int)",
    "callable": "class C:\n    def __call__(self): pass\nthing = C()",
    "number": "thing = 3",
    "method": "class C:\n    def f(self): pass\nthing = C().f",
    "the notebook": "import __main__ as thing",
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_of_the_notebook_are_refused_by_name(kernel, name):
    """X08: whatever says that it is of `__main__` was imported from there, which failed in the rank."""
    error = refused(kernel, "ranks(asks)", OBJECTS[name], "def asks(): return thing")
    assert ("asks reads the notebook's variable 'thing': pass it as a keyword argument instead" in error) == (
        name != "the notebook"
    )
    assert "thing" in error


def test_decorated_helpers_are_their_own_text_and_names(kernel):
    """Their globals are the notebook's, and not those of the module in which the wrapper was defined."""
    cells = [
        "import math\n@functools.cache\ndef slow(n): return math.floor(n)",
        "def more(f):\n    @functools.wraps(f)\n    def inner(): return f() + 1\n    return inner\n"
        "@more\ndef two(): return math.floor(1.5)",
        "def asks(): return [slow(2.5), two()]",
    ]
    assert "asks names slow, which is defined in the notebook: pass uses=[slow]" in refused(
        kernel, "ranks(asks)", *cells
    )
    assert both(kernel, "asks", uses="[slow, two, more]") == [[2, 2], [2, 2]]
    again = cells[1].partition("@more")[0].replace("+ 1", "+ 2")
    assert "two is decorated by more, which the notebook has defined anew" in refused(
        kernel, "ranks(asks, [slow, two, more])", again
    )


def test_older_definitions_are_refused(kernel):
    cells = ["def fact(n=3): return n and n * fact(n - 1) or 1", "older = fact\ndef fact(n=3): return 5"]
    assert "fact names fact, which the notebook has defined anew" in refused(kernel, "ranks(older)", *cells)
    cells = ["RATE = 3\ndef asks(x=RATE): return x"]
    assert "asks reads the notebook's variable 'RATE'" in refused(kernel, "ranks(asks)", *cells)
    assert "asks needs RATE where it is defined, and the notebook has no RATE" in refused(
        kernel, "ranks(asks)", "del RATE"
    )
    assert "counts reads the notebook's variable 'count'" in refused(
        kernel, "ranks(counts)", "count = 0\ndef counts():\n    global count\n    count += 1"
    )


def test_dataclasses_of_the_notebook_as_arguments(kernel):
    kernel.run(
        "@dataclass\nclass Config:\n    width: int = 4\ndef asks(config): return config.width\nolder = Config(5)"
    )
    assert "argument 'config' is a Config, which is defined in the notebook: pass uses=[Config]" in refused(
        kernel, "ranks(asks, config=older)"
    )
    assert kernel.run("print(ranks(asks, [Config], config=older))")[0] == "5\n"
    kernel.run("@dataclass\nclass Config:\n    width: int = 6")
    assert "argument 'config' is a Config of an earlier definition" in refused(
        kernel, "ranks(asks, [Config], config=older)"
    )


def test_text_that_editors_break(kernel):
    assert (
        both(kernel, "asks", "def asks():\n\treturn 'a\x0cb\\\nc', '\u2028', '\x1c'")
        == [("a\x0cbc", "\u2028", "\x1c")] * 2
    )
    assert both(kernel, "asks", "await __import__('asyncio').sleep(0)\n\x0cdef asks(): return 1") == [1, 1]
    assert both(kernel, "asks", "if True:\n  def asks():\n    return '''\n x'''") == ["\n x", "\n x"]


def write(path, text, seconds):
    path.write_text(text)
    os.utime(path, (0, seconds))


def test_functions_of_a_reloaded_module(kernel, tmp_path):
    """X05: the text that stands now at the function's old line went to the ranks."""
    module = tmp_path / "steps_of_x05.py"
    write(module, "def first(): return 'an older helper'\n\ndef step(): return 'the function'\n", 1_700_000_000)
    kernel.run(f"sys.path.insert(0, {str(tmp_path)!r})\nimport steps_of_x05, importlib\nfrom steps_of_x05 import step")
    assert both(kernel, "step") == ["the function", "the function"]
    text = "def step(): return 'newer'\n\ndef first(): return 'an older helper'\n"
    write(module, text, 1_700_000_010)
    kernel.run("importlib.reload(steps_of_x05)")
    error = refused(kernel, "ranks(step)")
    assert "step is not the step that steps_of_x05 has now: the module was reloaded" in error
    assert "Import step again" in error
    for call in ("ranks(asks)", "ranks(asks, [step])"):
        assert "step is not the step that steps_of_x05 has now" in refused(kernel, call, "def asks(): return step()")
    kernel.run("from steps_of_x05 import step")
    assert both(kernel, "step") == ["newer", "newer"]
    write(module, "# a comment that changes no function\n" + text, 1_700_000_020)
    kernel.run("importlib.reload(steps_of_x05)")
    assert both(kernel, "step") == ["newer", "newer"]


def test_a_module_that_was_rewritten_within_a_second_is_new_in_the_ranks(kernel, tmp_path):
    """X32: a launch takes 0.3 s, so cells that write a module and launch meet Python's one-second stamps."""
    module = tmp_path / "rewritten_x32.py"
    module.write_text("def answer(): return 1")
    kernel.run(f"sys.path.insert(0, {str(tmp_path)!r})\nimport rewritten_x32")
    assert list(tmp_path.rglob("*.pyc")), "the kernel keeps bytecode of the first text"
    for number in (1, 2, 3):
        module.write_text(f"def answer(): return {number}")
        os.utime(module, ns=(0, module.stat().st_mtime_ns // 10**9 * 10**9 + number * 10**6))
        assert kernel.run("print(ranks(rewritten_x32.answer))")[0] == f"{number}\n"


def test_exercises_in_cells_of_magics(kernel):
    """X02: a 50-line OSError; and a lambda was taken for an empty answer."""
    kernel.run("from chapter19_9.exercises import check")
    kernel.run("%%time\ndef shift():\n    '''Yours.'''")
    assert kernel.run("check('shift', shift)")[0] == "shift: not done yet\n"
    kernel.run("%%time\ndef shift():\n    return 0")
    assert "shift: not yet. With 2 ranks: rank 0 returned 0, expected 1" in kernel.run("check('shift', shift)")[0]
    assert "got a lambda" in refused(kernel, "check('shift', lambda: 0)")
    kernel.run("%%time\ntext = 'def halves(): ' + 'return -1'\nexec(text)")
    assert "the source of halves cannot be found" in refused(kernel, "check('two halves', halves)")


# Last: it holds for every cell that comes after it.
def test_future_annotations_reach_the_script(kernel):
    cells = [
        "@dataclass\nclass Before:\n    width: int = 1",
        "from __future__ import annotations",
        "@dataclass\nclass After:\n    kind: typing.ClassVar[int] = 3\n    width: Unknown = 2\n"
        "def asks(x: AlsoUnknown = 2) -> After: return After().width",
        "def plain(): return After().width",
    ]
    assert both(kernel, "asks", *cells, uses="[After]") == [2, 2]
    assert both(kernel, "plain", uses="[After]") == [2, 2]
    assert kernel.run("print(ranks(asks, [After]))")[0] == "2\n"
    cell = "def names(): return [f.name for f in dataclasses.fields(After)]"
    assert both(kernel, "names", cell, uses="[After]") == [["width"], ["width"]]
    error = refused(kernel, "ranks(asks, [After, Before])", "def asks(x: int = 3): return After, Before")
    assert "Before was defined without `from __future__ import annotations` and" in error


def test_a_value_that_was_changed_later_is_found_behind_a_conversion_and_beside_an_older_cell(kernel):
    """The ranks had 0.1, and the default of an older cell with the same code."""
    older = "def lately(lr=time.time()):\n    return lr"
    newer = "def lately(lr=0.1):\n    return lr\nlately.__defaults__ = (0.9,)"
    assert "the default of lr is 0.9, and the text says 0.1" in refused(kernel, "launch(lately)", older, newer)
    changed = "def converted(lr=float('0.1')):\n    return lr\nconverted.__defaults__ = (5.0,)"
    assert "the default of lr is 5.0, and the text says 0.1" in refused(kernel, "launch(converted)", changed)
    settings = "class Settings:\n    steps = int(1e3)\ndef counts():\n    return Settings.steps"
    assert both(kernel, "counts", settings, uses="[Settings]") == [1000, 1000]
    kernel.run("Settings.steps = 5")
    words = refused(kernel, "launch(counts, uses=[Settings])")
    assert "steps is 5, and the text says 1000" in words


def test_a_submodule_of_a_package_is_imported_as_the_notebook_imported_it(kernel):
    """`import xml.dom.minidom` gives the name xml, and `import xml` does not give what is read of it."""
    cell = "import xml.dom.minidom\ndef parses():\n    return xml.dom.minidom.__name__"
    assert both(kernel, "parses", cell) == ["xml.dom.minidom"] * 2


def test_a_lambda_under_a_name_is_called_a_lambda(kernel):
    cell = "square = lambda x: x * x\ndef squares():\n    return square(3)"
    assert "squares names square, a lambda, which has no source" in refused(kernel, "launch(squares)", cell)
    assert "uses has a lambda" in refused(kernel, "launch(squares, uses=[square])")
