"""However a launch ends: the right message, results kept, the next launch works, nothing left. Warm and cold alike."""

import contextlib
import os
import signal
import threading
import time

import psutil
import pytest

from d2l_utils import LaunchError, LaunchStopped, LaunchTimeout, launch
from d2l_utils.launching import folders, follow, helper, launcher
from tests.ranks.leftovers import none_left


def end(how, culprit=1, nap="321"):
    """Rank `culprit` ends as told; the others go into an all-reduce. `nap`: seconds that a child of theirs sleeps."""
    import os
    import signal
    import sys
    import threading
    import time

    import torch
    import torch.distributed as dist

    if dist.get_rank() == culprit:
        if how == "raise":
            raise ValueError("boom 中文 αβ")
        if how == "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            sys.exit(0)
        if how == "exit status":
            sys.exit(3)
        if how == "_exit":
            os._exit(0)
        if how == "return":
            return "early"
        if how == "sleep":
            time.sleep(100)
        if how == "late":
            threading.Thread(
                target=lambda: (time.sleep(0.3), os.kill(os.getpid(), signal.SIGABRT)), daemon=True
            ).start()
    if how == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if dist.get_rank() == culprit:
            os._exit(5)
    if how == "all":
        raise KeyError("nobody has it")
    x = torch.ones(2)
    dist.all_reduce(x)
    if how == "children":
        import subprocess

        subprocess.Popen(["sleep", nap], start_new_session=True)
        if dist.get_rank() == culprit:
            raise OSError("after starting a child")
    return x.sum().item()


def fails(**arguments):
    with pytest.raises(LaunchError) as caught:
        launch(end, world_size=2, **arguments)
    return caught.value


def works():
    assert launch(end, world_size=2, how="well").results == [4.0, 4.0]


def test_L06_L08_exception(way):
    error = fails(how="raise")
    first = error.message.splitlines()[0]
    assert first == "rank 1 failed: ValueError: boom 中文 αβ"
    assert 'raise ValueError("boom 中文 αβ")' in error.message and "line" in error.message and "in end" in error.message
    assert "1 other rank failed only because of it" in error.message
    assert "torch/" not in error.message and "worker.py" not in error.message
    assert (error.rank, error.kind) == (1, "exception")
    assert error.script.is_file()
    works()


def test_all_ranks_fail_alike():
    error = fails(how="all")
    assert (
        "KeyError: 'nobody has it'" in error.message.splitlines()[0]
        and "1 other rank failed in the same way" in error.message
    )


@pytest.mark.parametrize(("how", "name"), [("segv", "SIGSEGV"), ("kill", "SIGKILL (often: out of memory)")])
def test_L10_signal(way, how, name):
    error = fails(how=how)
    assert error.message.startswith(f"rank 1 was killed by {name}") and error.kind == "signal"
    works()


@pytest.mark.parametrize("how", ["exit", "_exit"])
def test_L11_early_exit(way, how):
    error = fails(how=how)
    assert error.message.startswith("rank 1 exited before the others finished") and error.rank == 1


def test_exit_status(way):
    assert fails(how="exit status").message.startswith("rank 1 failed: sys.exit(3)")


def test_skipped_collective_keeps_what_was_delivered(way):
    error = fails(how="return")
    assert "every rank must join every collective" in error.message.splitlines()[0]
    assert error.results == [None, "early"]


def test_timeout_names_who_did_not_join(way):
    error = fails(how="sleep", timeout=4)
    assert isinstance(error, LaunchTimeout)
    first = error.message.splitlines()[0]
    assert first.startswith("timed out after 4 s")
    assert "rank 1 never joined the all_reduce (collective 1) in which rank 0 waited" in first and error.rank == 1
    works()


def says(words, others):
    """Rank 1 raises an error of these words; the others return, or wait for it."""
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise RuntimeError(words)
    if others == "wait":
        dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("others", ["return", "wait"])
@pytest.mark.parametrize("words", ["connection to the tracking server failed", "expected an exception, got no error"])
def test_an_error_of_the_readers_own_is_the_cause_whatever_its_words(words, others):  # X22
    with pytest.raises(LaunchError) as caught:
        launch(says, world_size=3, words=words, others=others)
    assert caught.value.message.startswith(f"rank 1 failed: RuntimeError: {words}") and caught.value.rank == 1


def loses_its_peer(how):
    """Rank 1 is killed; the others meet that in calls that raise from C++, at the reader's own line or deep in autograd."""
    import os
    import signal

    import torch
    import torch.distributed as dist

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if how == "backward":
            model(torch.ones(1, 2)).sum().backward()
        else:
            dist.all_reduce(torch.ones(1), async_op=True).wait()
    except RuntimeError as error:
        if how == "raised from":
            raise ValueError("the step failed") from error
        raise


@pytest.mark.parametrize("how", ["backward", "wait", "raised from"])
def test_what_ranks_raise_that_lost_their_peer_is_no_cause(how):
    with pytest.raises(LaunchError, match=r"^rank 1 was killed by SIGKILL") as caught:
        launch(loses_its_peer, world_size=3, how=how)
    assert "2 other ranks failed only because of it" in caught.value.message


def test_late_death_does_not_spoil_a_good_run(monkeypatch):
    # the group's end is what a rank does after it has delivered: make it last until the signal comes
    run = launch(dies_late, world_size=2)
    assert run.results == [0, 1] and run.late_failures == {1: "SIGABRT"}


def dies_late():
    import os
    import signal
    import time

    import torch.distributed as dist

    rank = dist.get_rank()
    if rank == 1:
        dist.destroy_process_group = lambda: (time.sleep(0.2), os.kill(os.getpid(), signal.SIGABRT))
    return rank


def test_rank_that_ignores_sigterm():
    begun = time.monotonic()
    assert "rank 1 exited with status 5" in fails(how="stubborn").message
    assert time.monotonic() - begun < 15  # torchrun alone would wait for 30 s


def test_children_of_ranks_end_too(way):
    nap = f"321.{os.getpid()}"  # this test's own, where several run at once
    fails(how="children", nap=nap)
    sleeping = [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", nap]]
    assert not sleeping


@contextlib.contextmanager
def stopped_after():
    """A launch that would sleep, in another thread; after the block its event is set, and it ends by that."""
    stop, caught = threading.Event(), []

    def target():
        try:
            launch(end, world_size=2, how="sleep", stop=stop)
        except LaunchStopped as error:
            caught.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(15)
    assert not thread.is_alive() and caught[0].message.startswith("stopped")


def test_stop_event(way):
    with stopped_after():
        time.sleep(1.0)
    works()


def test_a_supervisor_that_somebody_stopped_does_not_keep_the_ranks(way, monkeypatch):
    monkeypatch.setattr(follow, "_ANSWER", 1.0)
    before = set(folders.base().glob("run-*"))
    with stopped_after():
        deadline = time.monotonic() + 60
        while not (mine := [f for f in folders.base().glob("run-*/rank1.ready") if f.parent not in before]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        folder = mine[0].parent
        os.kill(int((folder / "supervisor.pid").read_text()), signal.SIGSTOP)
    assert not none_left(folders.base())
    works()


def test_a_helper_that_died_is_replaced(monkeypatch):
    monkeypatch.setenv("D2L_LAUNCH", "warm")
    works()
    old = helper._helper.process
    old.kill()
    old.wait()
    run = launch(end, world_size=2, how="well")
    assert run.way == "warm" and helper._helper.process.pid != old.pid


def test_warm_that_cannot_start_turns_cold_and_says_so(monkeypatch, capsys):
    from d2l_utils.launching import launcher

    def refuse(request):
        raise helper.Unavailable("the test says no")

    monkeypatch.setattr(helper, "start_warm", refuse)
    monkeypatch.setattr(launcher, "_said", set())
    assert launch(end, world_size=1, how="well").way == "cold"
    assert "the test says no" in capsys.readouterr().out


def all_exit():
    import sys

    import torch.distributed as dist

    dist.barrier()
    sys.exit(0)


class Silent(RuntimeError):
    def __str__(self):
        raise ValueError("no words")


def unprintable():
    raise Silent


def test_all_exit():
    with pytest.raises(LaunchError, match=r"^ranks 0 and 1 exited without returning a result$"):
        launch(all_exit, world_size=2)


def test_an_exception_without_words():
    with pytest.raises(LaunchError, match=r"^rank [01] failed: .*Silent"):
        launch(unprintable, world_size=2)


def test_a_syntax_error_in_a_script(tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text("x = (\n")
    with pytest.raises(LaunchError, match=r"^rank [01] failed: SyntaxError: ") as caught:
        launch(script, world_size=2)
    assert "wrong.py" in caught.value.message and "worker.py" not in caught.value.message


def test_a_killed_agent_is_named():
    caught = []

    def target():
        try:
            launch(end, world_size=2, how="sleep", timeout=90)
        except LaunchError as error:
            caught.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    try:
        wait_for_agent(helper.warm_helper().process.pid, ranks=2).kill()
    finally:
        thread.join(120)
    assert caught and caught[0].message.startswith("torchrun itself was killed by SIGKILL")


def wait_for_agent(pid, ranks):
    """The torchrun agent of the one launch that the helper with this pid serves, once it has started all ranks."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):  # the supervisor of the launch before, which is ending
            for supervisor in psutil.Process(pid).children():
                for agent in supervisor.children():
                    if len(agent.children()) == ranks:
                        return agent
        time.sleep(0.1)
    raise AssertionError("no agent with its ranks was seen")


def test_an_interrupt_between_start_and_wait_ends_the_ranks(monkeypatch):
    """The stop button in the moment before somebody listens for it; the look for processes left is every test's here."""
    monkeypatch.setattr(launcher, "follow", lambda line, folder, *_: wait_and_interrupt(folder))
    with pytest.raises(KeyboardInterrupt):
        launch(sleeps, world_size=1)


def sleeps():
    import time

    time.sleep(60)


def wait_and_interrupt(folder):
    deadline = time.monotonic() + 60
    while not list(folder.glob("rank*.ready")) and time.monotonic() < deadline:
        time.sleep(0.02)
    raise KeyboardInterrupt


def two_types():
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(4, dtype=torch.float32 if dist.get_rank() else torch.float64))


def test_what_cpp_says_before_it_aborts_is_told():
    """Ranks that give a collective other types: gloo ends one of them."""
    with pytest.raises(
        LaunchError, match=r"was killed by SIGABRT; the last line that it printed is:.*collective mismatch"
    ):
        launch(two_types, world_size=2, output="quiet")
