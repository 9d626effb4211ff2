"""What the installed distributions say of themselves. A damaged one stops nobody: it becomes a problem to report."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtorch_core._selection.discovery import guarded
from dtorch_core._text import canonical, describe_error
from dtorch_core.hookspecs import PROJECT

if TYPE_CHECKING:
    from importlib_metadata import EntryPoint, IDistribution


@dataclass(frozen=True, slots=True)
class EntryPointSource:
    """A plugin found through its distribution's entry point."""

    name: str
    value: str
    distribution: str
    version: str
    load: Callable[[], object]


def entry_points() -> tuple[list[EntryPointSource], list[str]]:
    """The plugins that are installed, in the order of their names, and a sentence for each damaged distribution."""
    import importlib_metadata  # costs 20 ms: not at import

    points, error = guarded(lambda: list(importlib_metadata.entry_points(group=PROJECT)))
    problems: list[str] = []
    if points is None or error is not None:
        # One file that can't be parsed, of whatever distribution, ends that call: read each alone.
        points = list(_one_by_one(problems))

    found: dict[tuple[str, str, str], EntryPointSource] = {}
    for point in points:
        name, version = name_and_version(point.dist)
        source = EntryPointSource(point.name, point.value, name, version, point.load)
        # One distribution seen twice (lib and lib64, an editable and its stale metadata) is one plugin.
        found.setdefault((canonical(name), point.name, point.value), source)

    return sorted(found.values(), key=lambda source: (source.name, source.distribution)), problems


def _one_by_one(problems: list[str]) -> Iterator[EntryPoint]:
    import importlib_metadata

    seen: set[str] = set()
    for distribution in importlib_metadata.distributions():
        name, _ = name_and_version(distribution)
        if canonical(name) in seen:
            continue

        seen.add(canonical(name))
        points, error = guarded(lambda of=distribution: list(of.entry_points))
        if error is not None:
            problems.append(f"the entry points of {name} can't be read: {describe_error(error)}; reinstall it")

        yield from (point for point in points or () if point.group == PROJECT)


def name_and_version(distribution: IDistribution | None) -> tuple[str, str]:
    """A distribution's own words; its folder's name where it gives none, and an empty version."""
    if distribution is None:
        return "unknown distribution", ""

    name, _ = guarded(lambda: distribution.name)
    version, _ = guarded(lambda: distribution.version)
    # A folder without a METADATA file is what is left of one that was uninstalled, or installed by half.
    left = os.path.basename(folder(distribution)).partition("-")[0]
    return name or left or "unknown distribution", version or ""


def folder(distribution: IDistribution) -> str:
    """Where a distribution's metadata lies; an empty string where that is no folder."""
    return str(getattr(distribution, "_path", ""))
