"""What this process holds: threads, children, open files and shared-memory names; to see what a test left behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_SHM = Path("/dev/shm")
_NAME = "shared memory "


@dataclass(frozen=True, slots=True)
class Held:
    """One look at the process. Where the system has no such list, it is empty."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    files: Counter[str]
    names: frozenset[str]

    @classmethod
    def now(cls) -> Held:
        """Look."""
        return cls(_threads(), _children(), _files(), _names())


def left_behind(before: Held, grace: float) -> list[str]:
    """A line for each thing that was not held ``before`` and still is, after threads had ``grace`` seconds to end."""
    deadline = time.monotonic() + grace
    for thread in _threads() - before.threads:
        thread.join(max(0.0, deadline - time.monotonic()))

    if lines := _new(before):
        gc.collect()  # what only a reference cycle keeps open is not a leak
        # Another process may be just making a name of shared memory, which it has not mapped yet.
        lines = [line for line in _new(before) if line in lines]

    return lines


def _new(before: Held) -> list[str]:
    after = Held.now()
    lines = [f"thread {thread.name!r}" for thread in after.threads - before.threads]
    lines += [f"process {pid}" for pid in after.children - before.children]
    lines += [f"open file {path}" for path in after.files - before.files]
    lines += [f"{_NAME}{name}" for name in after.names - before.names if not _used_elsewhere(name)]
    return sorted(lines)


def _threads() -> frozenset[threading.Thread]:
    # A dummy stands for a native thread that once ran Python code (autograd's, for one): no test has started it.
    return frozenset(thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread))


def _children() -> frozenset[int]:
    children: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        children.update(int(pid) for pid in _read(path).split())

    # multiprocessing starts this helper once and keeps it until the process ends.
    return frozenset(pid for pid in children if "resource_tracker" not in _read(Path(f"/proc/{pid}/cmdline")))


def _files() -> Counter[str]:
    files: Counter[str] = Counter()
    for fd in Path("/proc/self/fd").glob("*"):
        try:
            link = os.readlink(fd)
        except OSError:
            continue  # the one that lists the folder

        if not link.startswith("/dev/nvidia"):  # the driver opens these when it likes
            files[link] += 1

    return files


def _names() -> frozenset[str]:
    return frozenset(path.name for path in _SHM.glob("*"))


def _used_elsewhere(name: str) -> bool:
    """Another process has it open: it is none of ours."""
    path, mine = str(_SHM / name), str(os.getpid())
    try:
        # A semaphore is mapped under the name that it was made with, and that one is gone: the file's number stays.
        mapped = f" {os.stat(path).st_ino} "
    except OSError:
        return True  # it is gone: whoever had it

    for process in Path("/proc").glob("[0-9]*"):
        if process.name != mine:
            lines = _read(process / "maps").splitlines()
            if any(mapped in line and str(_SHM) in line for line in lines):
                return True

        if process.name != mine and any(_link(fd) == path for fd in process.glob("fd/*")):
            return True

    return False


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _link(path: Path) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
