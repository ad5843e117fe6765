"""The command line: see the package."""

import argparse
import sys
from pathlib import Path

from d2l_utils.book import BookError, build


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m d2l_utils.book", description="Make a site that opens from disk.")
    parser.add_argument("--notebooks", type=Path, default=Path("notebooks"), help="folder of the built notebooks")
    parser.add_argument("--target", type=Path, default=Path("build") / "book", help="the site's folder, replaced")
    options = parser.parse_args(arguments)
    try:
        first = build(options.notebooks, options.target)
    except (BookError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(f"{error}. `make book` installs it.", file=sys.stderr)
        return 1
    print(f"Open {first.resolve().as_uri()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
