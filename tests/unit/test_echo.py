"""Which errors are taken for an echo of another rank's end: by where they were raised, and not by their words."""

import contextlib
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from d2l_utils.launching.echo import is_echo

WORDS = "[gloo/transport/tcp/pair.cc:545] Connection closed by peer"


def caught(function):
    with pytest.raises(BaseException) as error:  # noqa: PT011
        function()
    return error.value


def says(words, kind=RuntimeError):
    raise kind(words)


def module(file, text):
    """A module as if read from `file`."""
    names = {"torch": torch}
    exec(compile(text, file, "exec"), names)
    return names


@pytest.mark.parametrize(
    "words",
    [
        "connection to the tracking server failed",  # X22
        "the dataset socket closed",
        "expected an exception, got no error",
        "Connection reset by peer",
        WORDS,
    ],
)
def test_an_error_that_the_reader_raises_is_a_cause_whatever_its_words(words):
    assert not is_echo(caught(lambda: says(words)))


@pytest.mark.parametrize("kind", [ConnectionError, BrokenPipeError, OSError, RuntimeError])
def test_an_error_that_a_library_raises_is_a_cause(kind):
    client = module("/x/site-packages/requests/adapters.py", "def get(kind): raise kind('connection refused')")
    assert not is_echo(caught(lambda: client["get"](kind)))


def test_an_error_that_torch_raises_outside_distributed_is_a_cause():
    loader = module("/x/site-packages/torch/_utils.py", "def reraise(): raise RuntimeError('socket closed')")
    assert not is_echo(caught(loader["reraise"]))
    assert not is_echo(caught(lambda: torch.ones(2) @ torch.ones(3, 3)))


def test_a_broken_pipe_of_the_readers_own_child_is_a_cause():
    def write():
        child = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE)
        child.wait()
        with child.stdin as pipe:
            pipe.write(b"x" * 100_000)

    assert not is_echo(caught(write))


def test_an_error_in_a_hook_of_autograd_is_a_cause():
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: says("the dataset socket closed"))
    assert not is_echo(caught(lambda: x.sum().backward()))


def lost_peer():
    """As torch raises it inside torch.distributed."""
    text = f"def all_reduce(): raise RuntimeError({WORDS!r})"
    module("/x/site-packages/torch/distributed/distributed_c10d.py", text)["all_reduce"]()


def test_a_collective_that_lost_its_peer_is_an_echo():
    assert is_echo(caught(lost_peer))


def test_an_error_that_torch_raises_from_cpp_at_the_readers_line_is_an_echo():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=0.05))
    error = caught(lambda: store.get("never set"))
    assert isinstance(error, dist.DistStoreError)
    assert is_echo(error)


def test_a_shape_that_a_collective_refuses_is_a_cause():
    text = "def all_gather(): raise RuntimeError('ProcessGroupGloo::allgather: invalid tensor size at index 1')"
    gather = module("/x/site-packages/torch/distributed/distributed_c10d.py", text)["all_gather"]
    assert not is_echo(caught(gather))


@pytest.mark.parametrize("origin", ["from e", "from None", ""])
def test_an_error_that_is_raised_while_an_echo_is_handled_is_an_echo(origin):
    text = f"try:\n    lost()\nexcept RuntimeError as e:\n    raise ValueError('the step failed') {origin}"
    assert is_echo(caught(lambda: exec(text, {"lost": lost_peer})))


def test_an_echo_that_was_stored_and_is_raised_again_is_an_echo():
    def stored():
        try:
            lost_peer()
        except RuntimeError as error:
            kept = error
        raise kept

    assert is_echo(caught(stored))


def test_an_error_after_an_echo_was_handled_is_a_cause():
    def later():
        with contextlib.suppress(RuntimeError):
            lost_peer()
        says(WORDS)

    assert not is_echo(caught(later))


def test_an_error_raised_from_a_librarys_own_is_a_cause():
    def wraps():
        try:
            says("connection refused", ConnectionError)
        except ConnectionError as error:
            raise RuntimeError("connection to the tracking server failed") from error

    assert not is_echo(caught(wraps))


def test_an_error_without_words_is_a_cause():
    class Silent(RuntimeError):
        def __str__(self):
            raise ValueError("no words")

    assert not is_echo(caught(lambda: says("", Silent)))
