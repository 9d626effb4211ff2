"""Plugins as text, and what became of one."""

from __future__ import annotations

from dtorch_core._selection.discovery import Plugin
from dtorch_core._selection.registry import registry

HEAD = "from dtorch_core import BackendSpec, Support, hookimpl\n"
PROBE = "lambda topology: Support.yes(1, 'fits')"

GOOD = HEAD + f"""
@hookimpl
def dtorch_register_tensor_stores():
    return [BackendSpec("good", "no.such:Factory", {PROBE})]
"""


def stores(*specs: str) -> str:
    """A plugin that offers these stores."""
    return HEAD + f"@hookimpl\ndef dtorch_register_tensor_stores():\n    return [{', '.join(specs)}]\n"


def spec(name: str = "x", more: str = "") -> str:
    return f"BackendSpec({name!r}, 'a:b', {PROBE}{more})"


def hook(body: str, name: str = "dtorch_register_tensor_stores", arguments: str = "") -> str:
    return HEAD + f"@hookimpl\ndef {name}({arguments}):\n    {body}\n"


def plugin(name: str) -> Plugin:
    (found,) = [plugin for plugin in registry().listing() if plugin.name == name]
    return found
