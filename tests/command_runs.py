"""The dtorch command, in this process or in one of its own, and plugins for it to look at."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dtorch_core._selection import registry
from dtorch_core.cli import main

PLUGIN = """
    from dtorch_core import BackendSpec, Support, hookimpl

    {before}

    @hookimpl
    def dtorch_register_tensor_stores():
        return [BackendSpec({name!r}, "a:b", lambda topology: Support.yes(1000, "fits"), capabilities={words!r})]
"""


def source(name, before="", words=frozenset()):
    return PLUGIN.replace("{before}", before).replace("{name!r}", repr(name)).replace("{words!r}", repr(set(words)))


@pytest.fixture
def dtorch(site, capsys, monkeypatch):
    """Run the command in this process, as if nothing had been loaded yet: its status, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(registry, "_current", None)
        capsys.readouterr()
        status = main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def fresh(site, code, *arguments):
    """Run ``code`` and then the command in a Python of its own that sees the site."""
    program = f"{code}\nimport sys\nfrom dtorch_core.cli import main\nsys.exit(main({list(arguments)!r}))"
    return subprocess.run(
        [sys.executable, "-c", program],
        env=site.environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
