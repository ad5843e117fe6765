"""``python -m chapter19_9.dryrun``: a dry run from the command line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from chapter19_9.choosing.presets import PRESETS, own
from chapter19_9.dryrun.plan import ALLOWED, PRECISIONS, Plan
from chapter19_9.dryrun.process import dry_run
from d2l_utils.launching.errors import LaunchError

SIZES = ("layers", "width", "heads", "vocabulary")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what one step of the command line's plan takes."""
    parser = argparse.ArgumentParser(
        prog="python -m chapter19_9.dryrun",
        description="One training step of a strategy's own code on a pretended rank, with tensors that have no data.",
    )
    parser.add_argument("--model", default=Plan.model, help=f"one of {', '.join(PRESETS)} (default: {Plan.model})")
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, help="own size instead of a preset; the four go together")
    parser.add_argument("--strategy", default=Plan.strategy, help=f"one of {', '.join(ALLOWED)}")
    for field, words in (
        ("world_size", "pretended ranks"), ("rank", "which of them"), ("micro_batch", "samples of one rank at once"),
        ("length", "tokens of a sample (default: the model's)"),
    ):  # fmt: skip
        parser.add_argument(f"--{field.replace('_', '-')}", type=int, default=getattr(Plan, field), help=words)
    parser.add_argument("--precision", default=Plan.precision, help=" or ".join(PRECISIONS))
    parser.add_argument("--checkpointing", action="store_true", help="keep only each block's input for backward")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds (default: 300)")
    parser.add_argument("--json", action="store_true", help="print all that was found, as JSON")
    values = vars(parser.parse_args(arguments))
    as_json, timeout = values.pop("json"), values.pop("timeout")
    sizes = {name: values.pop(name) for name in SIZES}
    given = {name: value for name, value in sizes.items() if value is not None}
    live = "live" if sys.stderr.isatty() else "quiet"
    try:
        if given and len(given) < len(sizes):
            raise ValueError(f"{next(name for name in sizes if name not in given)} is missing: own sizes go together")
        if given:
            values["model"] = own(**given, length=values["length"] or 2048)
        found = dry_run(Plan(**values), output=live, timeout=timeout, stream=sys.stderr)
    except ValueError as error:
        parser.error(str(error))
    except LaunchError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        print(found)
        print(f"found in {found.seconds:.1f} s ({found.cpu_seconds:.1f} s of one core) and {found.memory / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
