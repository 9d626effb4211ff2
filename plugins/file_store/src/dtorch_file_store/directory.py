"""The sessions of this user: a folder for each, in which every process of it has a file that it keeps locked.

A lock ends with its process, however that ends. So a session all of whose locks are free is dead, and whoever finds it
may remove it. Nobody waits for a lock here: a file is locked before it gets its name in the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
import uuid
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import SystemRandom
from typing import Any

from dtorch_core._text import count
from dtorch_core.errors import DtorchError
from dtorch_file_store.places import VARIABLE, candidates, check_own, made_or_said, own_places, place_for_new

LONGEST = 107
"""Bytes in the path of a UNIX socket."""

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FILE = re.compile(r"([0-9]{1,9})\.json")
_UNNAMED = re.compile(r"\.[0-9a-f]{32}")
_TRIES = 100

LOOKS = 16
"""Other sessions that an opening looks at, so that those of which all processes were killed go by themselves. (About
20 us each.)"""

_open: weakref.WeakSet[SessionDirectory] = weakref.WeakSet()


@dataclass(frozen=True)
class ProcessInfo:
    """One process of a session, as it described itself."""

    index: int
    pid: int
    alive: bool


@dataclass(frozen=True)
class SessionInfo:
    """One session of this user. A process that has left it is not shown; one that died is."""

    token: str
    name: str
    world_size: int
    """0 where it is not known."""
    processes: tuple[ProcessInfo, ...]
    path: str

    @property
    def alive(self) -> bool:
        """One of its processes is."""
        return any(process.alive for process in self.processes)

    def __str__(self) -> str:
        who = ", ".join(f"pid {process.pid}{'' if process.alive else ' (dead)'}" for process in self.processes)
        size = count(self.world_size, "rank") if self.world_size else "unknown ranks"
        return f"{self.name or self.token}, {size}: {who or 'no process'}"


class SessionDirectory:
    """This process's part of a session's folder."""

    def __init__(self, token: str, index: int, about: Mapping[str, object]) -> None:
        """
        :param token: names the session: letters, digits, ``_`` and ``-``.
        :param index: of this process in the session.
        :param about: what others may know of it: ``name``, ``ranks``, ``world_size``. The pid and the time are added.
        :raises DtorchError: if the folder can't be made, belongs to somebody else, or its path is too long.
        """
        if not _TOKEN.fullmatch(token):
            raise DtorchError(f"{token!r} is no name of a session")

        self.base = place_for_new()
        self.path = os.path.join(self.base, token)
        self._index = index
        self.socket_path(index)  # too long a path is seen before anything is made
        with made_or_said(self.base):
            os.makedirs(self.base, mode=0o700, exist_ok=True)

        check_own(self.base)
        said = {"pid": os.getpid(), "started": time.time(), **about}
        with made_or_said(self.path):
            self._lock = self._join(json.dumps(said).encode())

        _open.add(self)
        if index == 0:  # one process of a session does it
            _clean_some(self.base, token)

    def socket_path(self, index: int) -> str:
        """Where the process with this index listens.

        :raises DtorchError: if the path is too long for a socket.
        """
        path = os.path.join(self.path, f"{index}.sock")
        length = len(os.fsencode(path))
        if length > LONGEST:
            raise DtorchError(
                f"{path} has {length} bytes, and the path of a socket has at most {LONGEST}: set {VARIABLE} to a "
                f"folder with a shorter name"
            )

        return path

    def close(self, dead: Iterable[int] = ()) -> None:
        """Remove this process's files, and those of processes that died; with the last one, the folder."""
        if self._lock < 0:
            return

        _open.discard(self)
        _remove_files(self.path, self._index)
        lock, self._lock = self._lock, -1
        os.close(lock)
        for index in dead:
            _remove_if_dead(self.path, index)

        with contextlib.suppress(OSError):
            os.rmdir(self.path)

    def _join(self, about: bytes) -> int:
        """Put this process's file into the folder, locked; its descriptor."""
        for _ in range(_TRIES):
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path, mode=0o700)

            lock = self._try_join(about)
            if lock is not None:
                return lock

        raise DtorchError(f"the session's folder {self.path} is removed again and again by other processes")

    def _try_join(self, about: bytes) -> int | None:
        """None if somebody who cleans up has just removed what is new here."""
        new = os.path.join(self.base, f".{uuid.uuid4().hex}")
        lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(lock, about)
            os.rename(new, os.path.join(self.path, f"{self._index}.json"))
        except BaseException as error:
            os.close(lock)
            with contextlib.suppress(OSError):
                os.unlink(new)

            if isinstance(error, (FileNotFoundError, BlockingIOError)):
                return None

            raise

        return lock

    def _forget(self) -> None:
        """In a forked child: the lock is the parent's, and has to end when it does."""
        if self._lock >= 0:
            lock, self._lock = self._lock, -1
            os.close(lock)


def sessions() -> list[SessionInfo]:
    """The sessions of this user, live and dead."""
    return [_look(os.path.join(base, token), token) for base in own_places() for token in _tokens(base)]


def clean_dead() -> list[SessionInfo]:
    """Remove the folders of sessions none of whose processes lives; those that were removed."""
    for base in own_places():
        for name in os.listdir(base):
            _remove_unnamed(base, name)

    return [session for session in sessions() if not session.alive and _remove_session(session.path)]


def report() -> list[str]:
    """Lines for ``dtorch doctor``; what is dead is removed."""
    base = place_for_new()
    if os.path.lexists(base):
        check_own(base)
    else:  # as an opening would
        with made_or_said(base):
            os.makedirs(base, mode=0o700, exist_ok=True)

    lines = [f"removed: session {session}" for session in clean_dead()]
    for session in sessions():
        state = "live" if session.alive else f"dead, and can't be removed from {session.path}"
        lines.append(f"{state}: session {session}")

    return lines or [f"no session of this user in {' or '.join(candidates())}"]


def _tokens(base: str) -> list[str]:
    with os.scandir(base) as entries:
        return sorted(e.name for e in entries if _TOKEN.fullmatch(e.name) and e.is_dir(follow_symlinks=False))


def _look(path: str, token: str) -> SessionInfo:
    processes: list[ProcessInfo] = []
    about: dict[str, Any] = {}
    for index in _indices(path):
        said, alive = _read(os.path.join(path, f"{index}.json"))
        if said is not None:
            about = about or said
            processes.append(ProcessInfo(index, _int(said.get("pid")), alive))

    return SessionInfo(token, str(about.get("name", "")), _int(about.get("world_size")), tuple(processes), path)


def _indices(path: str) -> list[int]:
    """Of the processes that have a file in a session's folder."""
    try:
        return sorted(int(found[1]) for name in os.listdir(path) if (found := _FILE.fullmatch(name)))
    except FileNotFoundError:  # its last process has just removed it
        return []


def _read(path: str) -> tuple[dict[str, Any] | None, bool]:
    """What a process's file says, and whether the process lives; None if the file has just been removed."""
    try:
        with open(path, "rb") as file:
            alive = not _locked(file.fileno(), fcntl.LOCK_SH)
            said = json.loads(file.read())
    except FileNotFoundError:
        return None, False
    except ValueError:
        return {}, alive

    return said if isinstance(said, dict) else {}, alive


def _locked(descriptor: int, how: int) -> bool:
    """Lock it, if nobody holds the lock."""
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False

    return True


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0


def _remove_files(path: str, index: int) -> None:
    """The socket first: one without a file would belong to nobody."""
    for name in (f"{index}.sock", f"{index}.json"):
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(path, name))


def _remove_if_dead(path: str, index: int) -> bool:
    """Remove the files of a process, if it is dead; whether they are gone."""
    try:
        with open(os.path.join(path, f"{index}.json"), "rb") as file:
            if not _locked(file.fileno(), fcntl.LOCK_EX):
                return False

            _remove_files(path, index)
    except FileNotFoundError:
        pass

    return True


def _remove_session(path: str) -> bool:
    """Whether the folder is gone. A process that joins meanwhile has its file in it, and so keeps it."""
    if not all([_remove_if_dead(path, index) for index in _indices(path)]):
        return False

    try:
        os.rmdir(path)
    except OSError:
        return False

    return True


def _remove_unnamed(base: str, name: str) -> None:
    """Remove the file of a process that was killed before it joined, if it is one."""
    if _UNNAMED.fullmatch(name):
        with contextlib.suppress(OSError), open(os.path.join(base, name), "rb") as file:
            if _locked(file.fileno(), fcntl.LOCK_EX):
                os.unlink(file.name)


def _clean_some(base: str, own: str) -> None:
    """Remove what is dead of a few other sessions, any of them. What can't be removed is left."""
    with contextlib.suppress(OSError):
        others = [name for name in os.listdir(base) if name != own]
        # Not the random numbers that a program may have seeded.
        for name in SystemRandom().sample(others, min(len(others), LOOKS)):
            _remove_unnamed(base, name)
            if _TOKEN.fullmatch(name):
                _clean(os.path.join(base, name))


def _clean(path: str) -> None:
    """Remove a session none of whose processes lives. One of them that lives keeps the files of all."""
    with contextlib.suppress(OSError):
        if not any(_read(os.path.join(path, f"{index}.json"))[1] for index in _indices(path)):
            _remove_session(path)


def _forked() -> None:
    for directory in list(_open):
        directory._forget()


os.register_at_fork(after_in_child=_forked)
