"""Runs a kit against an installed backend without a test file: for the command line, and to test the kit itself."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

import pytest

from dtorch_core._selection.reasons import Kind
from dtorch_core.errors import DtorchError
from dtorch_core.testing._harness import TIMEOUT, installed_spec

KITS: dict[Kind, str] = {"store": "TensorStoreTests", "group": "ThreadGroupTests", "promise": "PromiseTests"}

FILE = """
from dtorch_core.testing import {kit}


class TestConformance({kit}):
    backend = {backend!r}
    patience = {patience!r}
    thorough = {thorough!r}
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one test."""

    test: str
    """``"test_handshake_within_one_rank[cpu]"``"""
    capabilities: frozenset[str]
    """The words it is about; empty for what every backend owes."""
    state: Literal["passed", "failed", "skipped"]
    why: str
    """Why it failed or was skipped, on one line."""
    report: str = ""
    """The whole report of a failure."""


def run_kit(
    kind: Kind,
    backend: str,
    *,
    select: Sequence[str] = (),
    expression: str = "",
    patience: float = TIMEOUT,
    thorough: bool = False,
    quiet: bool = True,
    progress: TextIO | None = None,
) -> list[Outcome]:
    """Run the kit of ``kind`` against the installed ``backend``, in this process.

    :param select: names of tests, with or without their parameters; all where empty.
    :param expression: of those, the ones that it matches, as pytest's ``-k`` does; all where empty.
    :param patience: seconds until a test that hangs is ended.
    :param thorough: hold it to more than the contract; see :attr:`Conformance.thorough`.
    :param quiet: print nothing to the standard output; else what pytest does.
    :param progress: where pytest's dots go while it is quiet.
    :raises NoBackendError: if not exactly one plugin offers it.
    :raises DtorchError: if the run was interrupted, or pytest could not start it.
    """
    installed_spec(kind, backend)
    watch = _Watch(frozenset(select))
    with tempfile.TemporaryDirectory(prefix="dtorch-kit-") as folder, _output(quiet, progress):
        # A name of its own: pytest imports a module once in a process. Of digits: an expression matches no part of it.
        file = Path(folder, f"test_conformance_{uuid.uuid4().int}.py")
        file.write_text(FILE.format(kit=KITS[kind], backend=backend, patience=patience, thorough=thorough))
        # Settings of the project that happens to be here are none of the backend's.
        settings = Path(folder, "pytest.ini")
        settings.write_text("[pytest]\n")
        options = ["-c", str(settings), "--rootdir", folder, "--import-mode=importlib", "-p", "no:cacheprovider"]
        options += ["-k", expression] if expression else []
        options += ["-q", "--no-header", "--no-summary", "--tb=no"] if quiet else ["-v"]
        code = pytest.main([str(file), *options], plugins=[watch])
        sys.modules.pop(file.stem, None)

    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise DtorchError(f"the kit for the {kind} backend {backend!r} did not run to its end (pytest: {code!r})")

    return list(watch.outcomes.values())


class _Watch:
    """Collects reports; a test fails if any of its phases does."""

    def __init__(self, select: frozenset[str]) -> None:
        self._select = select
        self._words: dict[str, frozenset[str]] = {}
        self.outcomes: dict[str, Outcome] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self._select:
            items[:] = [item for item in items if {item.name, getattr(item, "originalname", item.name)} & self._select]

        for item in items:
            self._words[item.nodeid] = getattr(getattr(item, "function", None), "capabilities", frozenset())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        before = self.outcomes.get(report.nodeid)
        if before is not None and (before.state == "failed" or report.passed):
            return

        test = report.nodeid.rpartition("::")[2]
        words = self._words.get(report.nodeid, frozenset())
        self.outcomes[report.nodeid] = Outcome(test, words, report.outcome, _why(report), report.longreprtext)


def _why(report: pytest.TestReport) -> str:
    if report.passed:
        return ""

    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")

    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash is not None else report.longreprtext).splitlines()
    return f"after it: {lines[0]}" if report.when == "teardown" and lines else lines[0] if lines else ""


@contextlib.contextmanager
def _output(quiet: bool, progress: TextIO | None) -> Iterator[None]:
    if not quiet:
        yield
        return

    if progress is not None:
        with contextlib.redirect_stdout(progress):
            yield

        return

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
