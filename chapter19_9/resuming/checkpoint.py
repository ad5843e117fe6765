"""Checkpoints of a training in a folder: one folder inside it for each, which every rank writes a file of.

    run = launch(train, world_size=4, steps=4, checkpoints=Checkpoints(folder, every=2))
    run = launch(train, world_size=2, steps=8, checkpoints=Checkpoints(folder))    # steps 4 to 7

A checkpoint is written under a draft's name and renamed when all ranks are done, so a crash leaves a draft at most. It
is looked over before anything is read: a file that is missing or too short is named. What is not noticed is a file of the
right length with wrong content.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from chapter19_9.resuming.named import put, states
from chapter19_9.strategies.shards import place

_NAME = re.compile(r"step-(\d{6,})")
_BATCH = "training.batch"


@dataclass(frozen=True)
class Checkpoints:
    """Where a training saves, and from where it goes on: from the newest checkpoint in ``folder``, if there is one.

    folder        : a path that every rank can read and write; it need not exist.
    every         : save after each so many steps; 0 saves nothing.
    optimizer     : False goes on with the weights only.
    another_batch : True lets a training go on with another batch than it was saved with. Step s reads the text from
                    sample s x batch on, so that some of it is then skipped, or read twice.

    Raises ValueError for an ``every`` that is no whole number of at least 0.
    """

    folder: str
    every: int = 0
    optimizer: bool = True
    another_batch: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 0:
            raise ValueError(f"every is {self.every!r}: it must be a whole number of at least 0")

    def resume(self, model: nn.Module, optimizer: Any, steps: int, batch: int) -> int:
        """Load the newest checkpoint; returns the number of steps that it has behind it, 0 without one.

        Raises ValueError when it is damaged, is of another model or batch, or leaves none of ``steps`` to do. One that
        was saved before checkpoints held the batch is loaded with any.
        """
        if (path := newest(self.folder)) is None:
            return 0
        done = step_of(path)
        if done >= steps:
            raise ValueError(f"steps is {steps}: {path} has {done} behind it, so it must be more")
        if not self.another_batch and (saved := batch_of(path)) not in (None, batch):
            raise ValueError(
                f"batch is {batch}: {path} was saved with batch {saved}, and with another the text would go on from "
                f"another place. Give batch={saved}, or ask for it with Checkpoints(another_batch=True)"
            )
        load(path, model, optimizer if self.optimizer else None)
        return done

    def after(self, step: int, model: nn.Module, optimizer: Any, batch: int) -> None:
        """Save when it is time to, ``step`` steps of ``batch`` samples being done. Every rank must call it."""
        if self.every and step % self.every == 0:
            save(self.folder, step, model, optimizer, batch)


def save(folder: str | Path, step: int, model: nn.Module, optimizer: Any = None, batch: int | None = None) -> Path:
    """Write the checkpoint of ``step`` steps, each rank its own part; returns its path. Without an optimizer, weights only.
    batch: samples of a step, to be held against the batch of whoever resumes. Every rank must call it."""
    final = Path(folder) / f"step-{step:06}"
    draft = final.with_suffix(".draft")
    if place()[0] == 0:
        shutil.rmtree(draft, ignore_errors=True)  # of a training that was killed here
        draft.mkdir(parents=True)
    _wait()
    with _quiet():
        settings = {} if batch is None else {_BATCH: torch.tensor(batch)}
        dcp.save(states(model, optimizer) | settings, storage_writer=dcp.FileSystemWriter(draft))
    if place()[0] == 0:
        draft.rename(final)  # whoever looks sees all of it or nothing
    _wait()
    return final


def load(path: str | Path, model: nn.Module, optimizer: Any = None) -> None:
    """Fill the model and its optimizer, each rank reading what it needs from whichever file has it. Without an optimizer,
    weights only. Every rank must call it. Raises ValueError when the checkpoint is damaged or is of another model."""
    saved = check(path).state_dict_metadata
    with _quiet():
        wanted = states(model, optimizer)
        for name, tensor in wanted.items():
            has = getattr(saved.get(name), "size", None)
            if has != tensor.size():
                found = "is not in it" if has is None else f"has shape {tuple(has)} there"
                raise ValueError(f"{path} is of another model: {name} {found}, and {tuple(tensor.size())} here")
        dcp.load(wanted, storage_reader=dcp.FileSystemReader(path))
        put(model, optimizer, wanted)


def batch_of(path: str | Path) -> int | None:
    """The batch that a checkpoint was saved with; None where it does not say. ValueError when it is damaged."""
    if _BATCH not in check(path).state_dict_metadata:
        return None
    found = {_BATCH: torch.tensor(0)}
    with _quiet():
        dcp.load(found, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return int(found[_BATCH])


def newest(folder: str | Path) -> Path | None:
    """The finished checkpoint of the most steps; drafts do not count."""
    found = [path for path in Path(folder).glob("step-*") if _NAME.fullmatch(path.name)]
    return max(found, key=step_of, default=None)


def step_of(path: Path) -> int:
    """Steps done, by a checkpoint's name."""
    return int(path.name.removeprefix("step-"))


def check(path: str | Path) -> dcp.Metadata:
    """The checkpoint's table of contents. ValueError naming the file that is missing, cut short or cannot be read."""
    table = Path(path) / ".metadata"
    advice = "the checkpoint cannot be used; remove its folder to go on from the one before"
    try:
        metadata = dcp.FileSystemReader(path).read_metadata()
    except FileNotFoundError:
        raise ValueError(f"{table} is missing: {advice}") from None
    except Exception as error:
        raise ValueError(f"{table} cannot be read ({type(error).__name__}): {advice}") from None
    ends: dict[str, int] = {}
    for place_in in (metadata.storage_data or {}).values():
        ends[place_in.relative_path] = max(ends.get(place_in.relative_path, 0), place_in.offset + place_in.length)
    for name, length in sorted(ends.items()):
        file = Path(path) / name
        if not file.is_file():
            raise ValueError(f"{file} is missing: {advice}")
        if (has := file.stat().st_size) < length:
            raise ValueError(f"{file} has {has:,} of {length:,} bytes: {advice}")
    return metadata


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's words about one process that saves alone, which it may, and about FSDP1's age."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is|When using ``NO_SHARD``")
        warnings.filterwarnings("ignore", module=r"torch\.distributed\.fsdp\.")
        warnings.filterwarnings("ignore", message=".*deprecating ShardedTensor")
        yield


def _wait() -> None:
    """Until every rank is here."""
    if dist.is_initialized():
        dist.barrier()
