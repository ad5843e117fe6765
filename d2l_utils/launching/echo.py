"""Whether an error of one rank is only the echo of another rank's end: a collective that lost its peer."""

import dis
import re
import sys
import types

# What collectives and the store say when a peer is gone.
_WORDS = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|closed by (remote )?peer|broken pipe|socket (closed|timeout)|remote process exited"
    r"|timed out waiting|wait timeout|failed to (recv|send)|ncclRemoteError|connect(ing|ion)? .*failed|store .*(closed|failed)|"
    r"application timeout caused pair closure|no error$",
    re.IGNORECASE,
)
_BACKEND = re.compile(
    r"gloo|nccl|c10d|ucc", re.IGNORECASE
)  # these name themselves, or their source file, in their errors


def is_echo(error: BaseException) -> bool:
    """Whether the error, or one that was being handled when it was raised, came out of torch.distributed for want of a peer."""
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        if _lost_its_peer(link):
            return True
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return False


def _lost_its_peer(error: BaseException) -> bool:
    """The words alone tell nothing: where the error was raised decides."""
    try:
        words = str(error)
    except Exception:  # an exception may break whoever looks at it
        return False
    if not isinstance(error, RuntimeError) or error.__traceback__ is None or not _WORDS.search(words):
        return False
    innermost = error.__traceback__
    while innermost.tb_next is not None:
        innermost = innermost.tb_next
    if "/torch/distributed/" in innermost.tb_frame.f_code.co_filename.replace("\\", "/"):
        return True
    # Work.wait() and autograd raise from C++, which has no frame of its own. A `raise` statement elsewhere is somebody's own error.
    distributed = sys.modules.get("torch.distributed")
    kind = getattr(distributed, "DistError", None)
    named = _BACKEND.search(words) is not None or (kind is not None and isinstance(error, kind))
    return named and not _is_raise_statement(innermost)


def _is_raise_statement(traceback: types.TracebackType) -> bool:
    instruction = traceback.tb_frame.f_code.co_code[traceback.tb_lasti]
    return dis.opname[instruction] in ("RAISE_VARARGS", "RERAISE")
