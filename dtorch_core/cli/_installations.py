"""What the metadata of our distributions and of plugins says, and where it is stale, doubled or damaged."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import dtorch_core
from dtorch_core._selection.discovery import guarded
from dtorch_core._selection.metadata import folder, name_and_version
from dtorch_core._text import canonical
from dtorch_core.hookspecs import PROJECT

if TYPE_CHECKING:
    from importlib_metadata import IDistribution


def stale() -> list[str]:
    """A sentence for each distribution whose metadata misleads."""
    found = _installations()
    problems = [problem for copies in found.values() for problem in _doubled(copies)]
    problems += [problem for copies in found.values() for problem in _outdated(copies[0])]
    core = [name_and_version(copy)[1] for copy in found.get("dtorch-core", ())[:1]]
    if core not in ([], [dtorch_core.__version__]):
        problems.append(
            f"dtorch-core is {dtorch_core.__version__}, but its metadata says {core[0]}: install it again"
        )

    return problems


def _installations() -> dict[str, list[IDistribution]]:
    """Our distributions and those with plugins, by name; the first of each is the one that counts."""
    import importlib_metadata

    found: dict[str, list[IDistribution]] = {}
    places: set[str] = set()
    for distribution in importlib_metadata.distributions():
        place = os.path.realpath(folder(distribution))
        name = canonical(name_and_version(distribution)[0])
        if place not in places and (name.startswith("dtorch-") or _points(distribution)):
            places.add(place)
            found.setdefault(name, []).append(distribution)

    return found


def _doubled(copies: list[IDistribution]) -> Iterator[str]:
    if len(copies) > 1:
        name = name_and_version(copies[0])[0]
        places = ", ".join(f"{name_and_version(copy)[1] or 'no version'} in {folder(copy)}" for copy in copies)
        yield f"{name} has metadata in {len(copies)} places, of which the first counts: {places}. Remove the others"


def _outdated(distribution: IDistribution) -> Iterator[str]:
    name, version = name_and_version(distribution)
    if not version:
        yield f"{name}: its metadata is damaged (no version); install it again, or remove {folder(distribution)}"

    source = _source(distribution)
    if source is None:
        return

    project, error = guarded(lambda: tomllib.loads((source / "pyproject.toml").read_text())["project"])
    if error is not None or not isinstance(project, dict):
        yield f"{name} is installed editable from {source}, where no pyproject.toml can be read: install it again"
        return

    says = {"version": project.get("version", version), **project.get("entry-points", {}).get(PROJECT, {})}
    installed = {"version": version, **_points(distribution)}
    if says != installed:
        yield (
            f"{name} is installed editable, and its {source / 'pyproject.toml'} has changed since: it says {says}, the "
            f"metadata {installed}. Run: pip install -e {source}"
        )


def _source(distribution: IDistribution) -> Path | None:
    """The folder that an editable installation leads to."""
    text, _ = guarded(distribution.read_text, "direct_url.json")
    facts, _ = guarded(json.loads, text or "{}")
    if not isinstance(facts, dict) or not facts.get("dir_info", {}).get("editable"):
        return None

    return Path(unquote(urlsplit(facts.get("url", "")).path))


def _points(distribution: IDistribution) -> dict[str, str]:
    points, _ = guarded(lambda: {p.name: p.value for p in distribution.entry_points if p.group == PROJECT})
    return points or {}
