"""What a panel's run prints goes to its panel, and to no other; what panels import."""

import subprocess
import sys
import threading

from d2l_utils.widgets.capture import printed_here

WAIT = 30  # seconds until a test gives up


def test_capture_is_by_thread_and_leaves_stdout_as_it_was(capsys):
    before, mine, other = sys.stdout, [], []
    inside, done = threading.Event(), threading.Event()

    def elsewhere():
        with printed_here(other.append):
            print("theirs")
            inside.set()
            done.wait(WAIT)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    assert inside.wait(WAIT)
    with printed_here(mine.append):
        print("mine")
    assert sys.stdout is not before, "the other thread is still inside"
    done.set()
    thread.join()
    assert sys.stdout is before
    assert ("".join(mine), "".join(other)) == ("mine\n", "theirs\n")
    assert capsys.readouterr().out == ""


def test_panels_use_neither_pyplot_nor_torch():
    code = (
        "import sys; from d2l_utils.widgets import BatchPanel, LivePanel, MemorySlider; BatchPanel();"
        "print([name for name in ('matplotlib.pyplot', 'torch') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
