"""What ranks write down for each other in a c10d Store, with as few connections to it as can be.

A connection serves one call at a time, and some calls wait for another rank. So each call takes a connection that is
free, or a new one, and gives it back: a process has as many as it ever had calls under way at once. (The server of a
TCPStore asks a name server about each of them, and answers nobody meanwhile: seconds, where a query is lost.)
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

REACH = 0.5
"""Seconds in which a server takes a connection, if there is one."""


_all: weakref.WeakSet[Lines] = weakref.WeakSet()


class Lines:
    """The connections of this process to one store."""

    def __init__(self, first: dist.Store) -> None:
        """
        :param first: a connection that nobody else uses.
        """
        self._first = first
        self._free = [first]  # without a lock: append and pop are atomic
        self._lost: str | None = None
        """The server is gone, and how that was said."""
        _all.add(self)

    @contextmanager
    def one(self) -> Iterator[dist.Store]:
        """A connection for one call. It is not used again where the call fails: it may be broken."""
        try:
            line = self._free.pop()
        except IndexError:
            if self._lost is not None:  # c10d would try for minutes to make another one
                raise dist.DistNetworkError(self._lost) from None

            line = self.own()

        try:
            yield line
        except dist.DistNetworkError as error:
            if self.gone():  # else it has refused this call alone: one with too long a key, for example
                self._lost = str(error)

            raise

        self._free.append(line)

    def give(self, line: dist.Store) -> None:
        """One more connection that nobody else uses."""
        self._free.append(line)

    def own(self) -> dist.Store:
        """A connection that stays the caller's."""
        return own_line(self._first)

    def answer(self) -> bool:
        """Whether the server at the other end is still the one that was there first."""
        try:
            with self.one() as line:
                line.check(["?"])
        except dist.DistError:
            return False

        return True

    def forget(self) -> None:
        """In a forked child: the connections are the parent's, and what two processes say there would be mixed up."""
        self._free.clear()

    def gone(self) -> bool:
        """Whether nobody takes connections any more."""
        if self._lost is not None:
            return True

        server = self._first
        while isinstance(server, dist.PrefixStore):
            server = server.underlying_store

        if isinstance(server, dist.TCPStore):
            try:
                socket.create_connection((server.host, server.port), REACH).close()
            except OSError:
                return True

        return False


class Board:
    """A store under a prefix. What is not explained here is as c10d's."""

    def __init__(self, lines: Lines, place: str, prefix: str = "") -> None:
        """
        :param place: how messages call it.
        """
        self.lines, self.place = lines, place
        self._prefix = prefix
        self._lock = threading.Lock()
        self._store: dist.Store | None = None

    def under(self, prefix: str) -> Board:
        """The same under a longer prefix."""
        return Board(self.lines, self.place, f"{self._prefix}{prefix}/")

    def store(self) -> dist.Store:
        """The same as a c10d Store, with a connection of its own from the first call on."""
        with self._lock:
            if self._store is None:
                own = self.lines.own()
                self._store = dist.PrefixStore(self._prefix.removesuffix("/"), own) if self._prefix else own

            return self._store

    def set(self, key: str, value: str) -> None:
        with self.lines.one() as line:
            line.set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        with self.lines.one() as line:
            return line.get(self._prefix + key)

    def add(self, key: str, amount: int) -> int:
        with self.lines.one() as line:
            return line.add(self._prefix + key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        with self.lines.one() as line:
            return line.check([self._prefix + key for key in keys])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self.lines.one() as line:
            return line.compare_set(self._prefix + key, expected, desired)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        with self.lines.one() as line:
            line.wait([self._prefix + key for key in keys], timeout)

    def delete_key(self, key: str) -> bool:
        with self.lines.one() as line:
            return line.delete_key(self._prefix + key)


_lock = threading.Lock()
_given: weakref.WeakKeyDictionary[dist.Store, Lines] = weakref.WeakKeyDictionary()
_at: weakref.WeakValueDictionary[str, Lines] = weakref.WeakValueDictionary()


def board_in(store: dist.Store) -> Board:
    """The board in a store that somebody else uses, too."""
    place = f"the given {type(store).__name__}"
    with _lock:
        lines = _given.get(store)

    if lines is None:
        first = own_line(store)
        lines = made = Lines(first)
        if first is not store:  # it would keep itself alive
            with _lock:
                lines = _given.setdefault(store, made)

            if lines is not made:  # another rank has been quicker
                lines.give(first)

    return Board(lines, place)


def board_at(address: str, place: str, connect: Callable[[], dist.Store]) -> Board:
    """The board of a server, with the same connections while anything that was opened there is in use.

    :param connect: makes the first one.
    """
    with _lock:
        lines = _at.get(address)

    if lines is None or not lines.answer():  # another server may have taken its place
        before, first = lines, connect()
        with _lock:
            lines = _at.get(address)
            if lines is None or lines is before:
                lines = _at[address] = Lines(first)
            else:
                lines.give(first)  # another rank has been quicker

    return Board(lines, place)


def own_line(store: dist.Store) -> dist.Store:
    """Another connection to the same store: a call that blocks on one does not hold up the other."""
    try:
        line: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it
    except dist.DistError:
        raise
    except (AttributeError, RuntimeError):
        return store  # written in Python, without clone()

    return line


def _forked() -> None:
    for lines in list(_all):
        lines.forget()


os.register_at_fork(after_in_child=_forked)
