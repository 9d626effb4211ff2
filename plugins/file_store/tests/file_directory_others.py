"""A folder for a test's sessions, and other processes that join them. Imported by the tests of directories."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile

import pytest
from dtorch_file_store.directory import SessionDirectory
from dtorch_file_store.places import VARIABLE

LIMIT = 30.0


@pytest.fixture
def base(monkeypatch, tmp_path):
    """A short folder for sessions, which is the only one. (``tmp_path`` is made before the place for such changes.)"""
    with tempfile.TemporaryDirectory(prefix="dt") as folder:
        monkeypatch.setenv(VARIABLE, os.path.join(folder, "s"))
        monkeypatch.setenv("XDG_RUNTIME_DIR", "")
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield os.path.join(folder, "s")


@contextlib.contextmanager
def joined(token, index=0, name="numbers"):
    directory = SessionDirectory(token, index, about(name))
    try:
        yield directory
    finally:
        directory.close()


def about(name="numbers"):
    return {"name": name, "ranks": [0, 1], "world_size": 2}


class Other:
    """Another process that has joined a session, and waits to be told to leave it."""

    def __init__(self, token, index):
        code = (
            "import sys\n"
            "from dtorch_file_store.directory import SessionDirectory\n"
            f"directory = SessionDirectory({token!r}, {index}, {about()!r})\n"
            "print('in', flush=True)\n"
            "sys.stdin.readline()\n"
            "directory.close()\n"
        )
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, "-c", code], **pipes)
        readable, _, _ = select.select([self.process.stdout], [], [], LIMIT)
        assert readable and self.process.stdout.readline() == "in\n"
        self.pid = self.process.pid

    def leave(self):
        self.process.communicate("\n", timeout=LIMIT)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=LIMIT)


@pytest.fixture
def other():
    """Makes other processes; none of them outlives the test."""
    made = []

    def join(token, index):
        made.append(Other(token, index))
        return made[-1]

    yield join
    for each in made:
        if each.process.returncode is None:
            each.kill()
