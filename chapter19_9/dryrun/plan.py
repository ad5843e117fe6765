"""What a dry run is asked for, checked before any process starts. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from chapter19_9.choosing.presets import Model, of_toy, sizes_of, whole
from chapter19_9.strategies import get

if TYPE_CHECKING:
    from d2l_utils.transformer import TransformerConfig

ALLOWED = ("fsdp2", "fsdp2_no_reshard", "fsdp2_root_only", "zero1", "zero2", "zero3")
OPTIONS: dict[str, dict[str, tuple[object, ...]]] = {
    "fsdp2": {"reshard_after_forward": (True, False), "root": ("same", True, False, None)},
    "zero3": {"prefetch": (True, False)},
}
PRECISIONS = ("bf16", "fp32")
MOST_RANKS = 2**17

WHY_NOT = {
    "single": "one rank alone stores no less and tells nobody",
    "ddp": "DDP reduces in C++, which runs on no fake tensors",
    "zero_redundancy": "it stands on DDP, which reduces in C++ and runs on no fake tensors",
}


@dataclass(frozen=True)
class Plan:
    """One step of one rank.

    model         : sizes, the name of some in ``choosing.presets``, or a ``TransformerConfig`` of the chapter's own.
    strategy      : one of ``ALLOWED``.
    world_size    : number of pretended ranks, 1 to 131072; rank: which of them this one is. Rank 0 never has less.
    micro_batch   : samples that the rank computes with at once.
    length        : tokens of one sample; 0 takes the model's own.
    precision     : "bf16" for mixed precision as the strategy does it, or "fp32".
    checkpointing : keep only each block's input for backward.
    options       : for the strategy's ``shard``, as far as ``OPTIONS`` lists them.

    Raises ValueError that names the field.
    """

    model: Model | str | TransformerConfig = "llama-65b"
    strategy: str = "fsdp2"
    world_size: int = 1024
    rank: int = 0
    micro_batch: int = 1
    length: int = 0
    precision: str = "bf16"
    checkpointing: bool = False
    options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.is_toy:
            sizes_of(self.model)
        get(self.strategy)
        if self.strategy not in ALLOWED:
            why = WHY_NOT.get(self.strategy, "its code was not made for fake tensors")
            raise ValueError(
                f"strategy is {self.strategy!r}: {why}. Allowed: {', '.join(ALLOWED)}; for the others ask "
                "chapter19_9.theory or chapter19_9.choosing.advisor"
            )
        for name, low in (("world_size", 1), ("rank", 0), ("micro_batch", 1), ("length", 0)):
            whole(name, getattr(self, name), low)
        if self.world_size > MOST_RANKS:
            raise ValueError(f"world_size is {self.world_size}: it must be a whole number from 1 to {MOST_RANKS}")
        if self.rank >= self.world_size:
            raise ValueError(f"rank is {self.rank}: it must be below world_size, which is {self.world_size}")
        self.sizes.check_length(self.length)
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision is {self.precision!r}: it must be one of {', '.join(PRECISIONS)}")
        if not isinstance(self.checkpointing, bool):
            raise ValueError(f"checkpointing is {self.checkpointing!r}: it must be True or False")
        if not isinstance(self.options, Mapping):
            raise ValueError(
                f"options is {self.options!r}: it must be a dict, by the names that the strategy has for them"
            )
        known = OPTIONS.get(self.strategy, {})
        for name, value in self.options.items():
            if name not in known:
                some = f"; allowed: {', '.join(known)}" if known else ""
                raise ValueError(f"options has {name!r}: a dry run of {self.strategy!r} has no such setting{some}")
            if not any(type(value) is type(allowed) and value == allowed for allowed in known[name]):
                raise ValueError(
                    f"options[{name!r}] is {value!r}: it must be one of {', '.join(map(repr, known[name]))}"
                )

    @property
    def is_toy(self) -> bool:
        """The model is a config of the chapter's own Transformer."""
        return type(self.model).__name__ == "TransformerConfig"

    @property
    def sizes(self) -> Model:
        return sizes_of(self.model) if isinstance(self.model, str | Model) else of_toy(self.model)

    @property
    def tokens(self) -> int:
        """Tokens of one sample."""
        return self.length or self.sizes.length

    def to_json(self) -> dict[str, Any]:
        model = self.model if isinstance(self.model, str) else {"toy": self.is_toy, **asdict(self.model)}
        return {**asdict(self), "model": model}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Plan:
        """The plan that ``to_json`` was called on."""
        model = fields["model"]
        if isinstance(model, dict):
            toy, sizes = model["toy"], {name: value for name, value in model.items() if name != "toy"}
            if toy:
                from d2l_utils.transformer import TransformerConfig

                model = TransformerConfig(**sizes)
            else:
                model = Model(**sizes)
        return cls(**{**fields, "model": model})
