"""Builds, renews and checks notebooks from a terminal; ``builder`` says what a section looks like.

python -m d2l_utils.notebooks build [NAME ...]    run and store; all, or those whose names begin with NAME
python -m d2l_utils.notebooks text [NAME ...]     run nothing; store the text around the outputs that are there
python -m d2l_utils.notebooks check [NAME ...]    run nothing; say where a stored notebook breaks a rule
"""

import argparse
import sys
import time
from pathlib import Path

from d2l_utils.notebooks.builder import BuildError, build, check, renew_text, sections


def _chosen(files: list[Path], names: list[str]) -> list[Path]:
    for name in names:
        if not any(file.stem.startswith(Path(name).stem) for file in files):
            known = ", ".join(file.stem for file in files) or "none"
            raise SystemExit(f"No section's name begins with {name!r}. There are: {known}.")
    return [file for file in files if not names or any(file.stem.startswith(Path(name).stem) for name in names)]


def _sections_folder(root: Path) -> Path:
    folders = [folder for folder in root.glob("*/sections") if folder.is_dir()]
    if len(folders) != 1:
        raise SystemExit(f"Found {len(folders)} folders */sections in {root}, not one; name it with --sections.")
    return folders[0]


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m d2l_utils.notebooks", description="Build and check notebooks.")
    parser.add_argument("action", choices=["build", "text", "check"])
    parser.add_argument("names", nargs="*", help="how a section's name begins, such as 02; all if none is given")
    parser.add_argument("--sections", type=Path, help="folder of the sections; the only */sections if left out")
    parser.add_argument("--notebooks", type=Path, default=Path("notebooks"), help="folder of the notebooks")
    options = parser.parse_args(arguments)
    root = Path.cwd()
    files = sections(options.sections or _sections_folder(root))
    failed = 0
    for section in _chosen(files, options.names):
        target = options.notebooks / f"{section.stem}.ipynb"
        began = time.monotonic()
        if options.action == "check":
            wrong = check(section, target)
            print("\n".join(f"{section.stem}: {problem}" for problem in wrong) or f"{section.stem}: ok")
        else:
            wrong = []
            try:
                changed = (build if options.action == "build" else renew_text)(section, target, root)
                state = {"build": "built", "text": "text renewed"}[options.action] if changed else "unchanged"
                print(f"{section.stem}: {state}, {time.monotonic() - began:.0f} s", flush=True)
            except BuildError as error:
                wrong = [str(error)]
                print(f"{error}\n{section.stem}: not built", file=sys.stderr, flush=True)
        failed += bool(wrong)
    extra = sorted({path.stem for path in options.notebooks.glob("*.ipynb")} - {file.stem for file in files})
    for name in extra:
        print(f"{name}: a notebook without a section")
    return 1 if failed or extra else 0


if __name__ == "__main__":
    sys.exit(main())
