"""Whether the packages that are installed are the ones that were asked for."""

import importlib.metadata
import sys
from collections.abc import Iterable


def mismatches(requirements: Iterable[str]) -> list[str]:
    """Names each requirement that this environment does not meet, and what it has instead.

    Args:
        requirements: as in `pyproject.toml`, such as "torch>=2.14,<2.15".

    Returns:
        One line each, such as "numpy 2.4.1 is installed; numpy<2.6,>=2.5 is needed"; empty if all are met.
    """
    from packaging.requirements import Requirement

    found = []
    for requirement in map(Requirement, requirements):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        needed = f"{requirement.name}{requirement.specifier}"
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{requirement.name} is not installed; {needed} is needed")
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            found.append(f"{requirement.name} {installed} is installed; {needed} is needed")
    return found


def distribution_mismatches(name: str) -> list[str]:
    """The same for what an installed distribution asks for, its Python included.

    Args:
        name: a distribution, such as "dnnlpy".
    """
    from packaging.specifiers import SpecifierSet

    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return [f"{name} is not installed"]
    found = mismatches(distribution.requires or ())
    pythons = distribution.metadata.get("Requires-Python")
    version = ".".join(map(str, sys.version_info[:3]))
    if pythons and not SpecifierSet(pythons).contains(version, prereleases=True):
        found.append(f"Python {version} is running; {name} needs Python {pythons}")
    return found
