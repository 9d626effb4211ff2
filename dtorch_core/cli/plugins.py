"""List the plugins that are installed: what each offers, or why it is broken."""

from __future__ import annotations

import argparse
import json
from typing import TextIO

from dtorch_core._selection import catalogue
from dtorch_core._selection import registry as _registry
from dtorch_core._selection.discovery import Plugin
from dtorch_core._selection.reasons import KINDS
from dtorch_core._selection.registry import Registry
from dtorch_core._text import columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """This command takes no argument of its own."""


def run(options: argparse.Namespace, out: TextIO) -> int:
    """Print the list; broken plugins are part of it, so the status is 0."""
    known = _registry.inspect()
    if options.json:
        facts = {"plugins": [plugin.to_dict() for plugin in known.listing()], "problems": problems(known)}
        print(json.dumps(facts, indent=2), file=out)
        return 0

    for plugin in known.listing():
        print("\n".join(described(plugin)), file=out)

    for kind in KINDS:
        if not any(plugin.names(kind) for plugin in known.plugins):
            print(catalogue.install_hint(kind), file=out)

    for problem in problems(known):
        print(f"problem: {problem}", file=out)

    return 0


def described(plugin: Plugin) -> list[str]:
    """One plugin in a few lines."""
    lines = [f"{plugin.name}  {plugin.state}  {plugin.label}  ({plugin.value})"]
    if plugin.why:
        lines.append(f"  {plugin.why}")

    backends = [
        (kind, spec.name, " ".join(sorted(spec.capabilities)) or "declares no capability")
        for kind in KINDS
        for spec in plugin.specs.get(kind, ())
    ]
    lines += columns(backends, indent="  ")
    if plugin.calls:
        lines.append(f"  hooks    {' '.join(plugin.calls)}")

    return lines


def problems(known: Registry) -> list[str]:
    """What is wrong beside the plugins that are broken."""
    return [
        *known.problems,
        *(
            f"plugin {plugin.name!r} of {plugin.label} imports torch to be listed; its hooks need to do without"
            for plugin in known.plugins
            if plugin.imports_torch
        ),
    ]
