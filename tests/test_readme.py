"""Every code block of every page runs, or is checked for what it names.

A page's Python blocks run in order and share their names, as a reader would type them. A ``text`` block right below
a Python block, or below a ``dtorch`` command, is its output; ``...`` stands for anything.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import importlib_metadata
import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "plugins/*/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)
BLOCK = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$(?P<gap>\s*)", re.MULTILINE | re.DOTALL)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
SETUP = ("sudo apt install ", "git clone ", "cd ", "python3 -m venv ", ". .venv/bin/activate")
"""Commands that only the reader's own machine can show to be right."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    output: str | None
    """What the ``text`` block right below says that it prints."""

    def check_output(self, printed: str) -> None:
        if self.output is not None:
            same = doctest.OutputChecker().check_output(self.output, printed, FLAGS)
            assert same, f"{self.page.name}:{self.line} says\n{self.output}\nbut it prints\n{printed}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = list(BLOCK.finditer(text))
    made = []
    for match, following in zip(found, [*found[1:], None], strict=False):
        line = text.count("\n", 0, match.start()) + 1
        below = following is not None and following["language"] == "text" and following.start() == match.end()
        output = following["text"] if below and following is not None else None
        made.append(Block(page, line, match["language"], match["text"], output))

    return made


def commands(block: Block) -> Iterator[list[str]]:
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))


@page
def test_python_blocks_run(page: Path) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    before = set(threading.enumerate())
    for block in blocks(page):
        if block.language == "python":
            code = compile("\n" * block.line + block.text, str(page), "exec", dont_inherit=True)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code, names)

            block.check_output(printed.getvalue())

    deadline = time.monotonic() + 5
    for thread in set(threading.enumerate()) - before:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), f"{page.name} leaves {thread.name} running"


@page
def test_commands_exist(page: Path) -> None:
    for block in blocks(page):
        if block.language == "sh":
            for words in commands(block):
                check_command(block, words)


@page
def test_data_blocks_parse(page: Path) -> None:
    for block in blocks(page):
        if block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "json":
            json.loads(block.text)
        else:
            assert block.language in ("python", "sh", "text"), f"{page.name}:{block.line}: say what the block is"


@page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), f"{page.name} links to {target}"


def check_command(block: Block, words: list[str]) -> None:
    assignments = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    command, *arguments = [word for word in words if not re.match(r"[A-Z_]+=", word)]
    where = f"{block.page.name}:{block.line}: {shlex.join(words)}"
    if command == "dtorch":
        run_dtorch(block, arguments, assignments, where)
    elif command == "make":
        variables = [f"{name}={value}" for name, value in assignments.items()]
        dry = ["make", "--dry-run", *arguments, *variables]
        done = subprocess.run(dry, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{where}\n{done.stderr}"
    elif command == "pip":
        assert arguments[0] == "install", where
        for argument in arguments[1:]:
            assert argument.startswith("-") or (ROOT / argument).exists() or is_distribution(argument), where
    elif command in ("python", "pytest"):
        for argument in arguments:
            module = ROOT / f"{argument.replace('.', '/')}.py"
            assert argument.startswith(("-", "...")) or (ROOT / argument).exists() or module.exists(), where
    else:
        assert shlex.join(words).startswith(SETUP), f"{where}: teach tests/test_readme.py what this needs"


def run_dtorch(block: Block, arguments: list[str], assignments: dict[str, str], where: str) -> None:
    # The kit, a benchmark or a program of the reader's takes long, or does not exist here: the command itself does.
    quick = arguments[0] in ("plugins", "explain", "doctor")
    command = [sys.executable, "-m", "dtorch_core", *(arguments if quick else [arguments[0], "--help"])]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, env={**os.environ, **assignments}
    )
    assert done.returncode == 0, f"{where}\n{done.stdout}\n{done.stderr}"
    if quick:
        block.check_output(done.stdout)


def is_distribution(argument: str) -> bool:
    """One of ours, with extras that it has; or one that is installed here."""
    match = re.fullmatch(r"(?P<name>[\w-]+)(\[(?P<extras>[\w,]+)\])?", argument)
    if match is None:
        return False

    try:
        distribution = importlib_metadata.distribution(match["name"])
    except importlib_metadata.PackageNotFoundError:
        return False

    extras = set(match["extras"].split(",")) if match["extras"] else set()
    return extras <= set(distribution.metadata.get_all("Provides-Extra") or ())
