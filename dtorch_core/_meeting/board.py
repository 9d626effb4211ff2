"""What ranks write down for each other in a c10d Store, with as few connections to it as can be.

A connection serves one call at a time, and some calls wait for another rank. So each call takes a connection that is
free, or a new one, and gives it back: a process has as many as it ever had calls under way at once. (The server of a
TCPStore asks a name server about each of them, and answers nobody meanwhile: seconds, where a query is lost.)

Each process group of torch.distributed brings a new PrefixStore over the same TCPStore: what counts is the server.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dtorch_core._futures import begun

REACH = 0.5
"""Seconds in which a server takes a connection, if there is one."""

LOOK = 1.0
"""Seconds between two looks whether it is there, while c10d tries to reach it."""


_all: weakref.WeakSet[Lines] = weakref.WeakSet()


class Lines:
    """The connections of this process to one store."""

    def __init__(self, first: dist.Store) -> None:
        """
        :param first: a connection that nobody else uses.
        """
        self._first = first
        self._free = [first]  # without a lock: append and pop are atomic
        self._lost: Future[str] = Future()
        """The server is gone, and how that was said."""
        _all.add(self)

    @contextmanager
    def one(self) -> Iterator[dist.Store]:
        """A connection for one call. It is not used again where the call fails: it may be broken."""
        try:
            line = self._free.pop()
        except IndexError:
            line = self.own()

        try:
            yield line
        except dist.DistNetworkError:
            self.gone(REACH)  # or it has refused this call alone: one with too long a key, for example
            raise

        self._free.append(line)

    def give(self, line: dist.Store) -> None:
        """One more connection that nobody else uses."""
        self._free.append(line)

    def own(self) -> dist.Store:
        """A connection that stays the caller's.

        :raises dist.DistNetworkError: if the server is gone; also if :meth:`gone` finds that out meanwhile.
        """
        server = self._server()
        if not isinstance(server, dist.TCPStore):
            return own_line(self._first)

        if self._lost.done():
            raise dist.DistNetworkError(self._lost.result())

        # c10d tries to reach a server that is gone for longer than its own timeout, and can't be interrupted.
        made = begun(lambda: own_line(self._first), "connects once more")
        limit: timedelta = server.timeout  # type: ignore[attr-defined]  # torch's stub lacks it
        either: list[Future[Any]] = [made, self._lost]
        deadline = time.monotonic() + limit.total_seconds()
        while (left := deadline - time.monotonic()) > 0:
            first, _ = wait(either, min(left, LOOK), FIRST_COMPLETED)
            if made in first:
                return made.result()

            if first or self.gone():
                raise dist.DistNetworkError(self._lost.result())

        raise dist.DistNetworkError(f"it takes no connection within {limit}")

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

    def gone(self, patience: float = 0.0) -> bool:
        """Whether nobody takes connections any more.

        :param patience: seconds in which a server that is just ending has ended: its connections may be closed before
            it stops listening, and it then drops those that it has not taken yet.
        """
        server = self._server()
        if isinstance(server, dist.TCPStore) and not self._lost.done():
            try:
                with socket.create_connection((server.host, server.port), REACH) as line:
                    if patience:
                        _await_end(line, patience)
            except OSError as error:
                with suppress(InvalidStateError):  # another thread has found it out
                    self._lost.set_result(f"{server.host}:{server.port}: {error}")

        return self._lost.done()

    def _server(self) -> dist.Store:
        return _layers(self._first)[-1]


class Board:
    """A store under a prefix. What is not explained here is as c10d's."""

    def __init__(self, lines: Lines, place: str, prefix: str = "", patience: timedelta | None = None) -> None:
        """
        :param place: how messages call it.
        :param patience: the timeout of :meth:`store`; None is that of the connections.
        """
        self.lines, self.place = lines, place
        self._prefix, self._patience = prefix, patience
        self._lock = threading.Lock()
        self._store: dist.Store | None = None

    def under(self, prefix: str) -> Board:
        """The same under a longer prefix."""
        return Board(self.lines, self.place, f"{self._prefix}{prefix}/", self._patience)

    def store(self) -> dist.Store:
        """The same as a c10d Store, with a connection of its own from the first call on."""
        with self._lock:
            if self._store is None:
                own = self.lines.own()
                if self._patience is not None:
                    own.set_timeout(self._patience)

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
_prefixes: weakref.WeakKeyDictionary[dist.Store, str] = weakref.WeakKeyDictionary()
"""Of each PrefixStore that was reached, one that is equal on all ranks: c10d does not tell what its own is."""


def reach(store: dist.Store) -> None:
    """See whether it is there; :func:`board_in` then makes no connection for it. Nobody may be waiting on it.

    :raises dist.DistNetworkError: if its server is gone.
    """
    server = _layers(store)[-1]
    if server is store or not isinstance(server, dist.TCPStore):
        store.check(["dtorch"])
        return

    found = store.compare_set("dtorch", "", uuid.uuid4().hex)  # the first rank's counts
    with _lock:
        _prefixes[store] = f"dtorch in {found.decode()}/"


def board_in(store: dist.Store) -> Board:
    """The board in a store that somebody else uses, too."""
    place, layers = f"the given {type(store).__name__}", _layers(store)
    server = layers[-1]
    with _lock:
        prefix = "" if server is store else _prefixes.get(store)

    if prefix is None or not isinstance(server, dist.TCPStore):
        return Board(_lines_in(store), place)

    lines = board_at(f"{server.host}:{server.port}", place, Lines(server).own).lines
    with _lock:
        for layer in layers:  # as long as one of them is in use, more can be opened there
            _given[layer] = lines

    patience: timedelta = server.timeout  # type: ignore[attr-defined]  # torch's stub lacks it
    return Board(lines, place, prefix, patience)


def lines_to(server: dist.Store) -> Lines:
    """The connections of which this is the first, which nobody else uses; for all who come to the same server."""
    lines = Lines(server)
    if isinstance(server, dist.TCPStore):
        with _lock:
            _at[f"{server.host}:{server.port}"] = lines

    return lines


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


def _layers(store: dist.Store) -> list[dist.Store]:
    """It, and what it is a prefix in, down to what is none."""
    layers = [store]
    while isinstance(layers[-1], dist.PrefixStore):
        layers.append(layers[-1].underlying_store)

    return layers


def _lines_in(store: dist.Store) -> Lines:
    """Those to this very store."""
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

    return lines


def own_line(store: dist.Store) -> dist.Store:
    """Another connection to the same store: a call that blocks on one does not hold up the other."""
    try:
        line: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch's stub lacks it
    except dist.DistError:
        raise
    except (AttributeError, RuntimeError):
        return store  # written in Python, without clone()

    return line


def _await_end(line: socket.socket, seconds: float) -> None:
    """
    :raises ConnectionError: if the other end drops the connection in that time. It says nothing of its own accord.
    """
    line.settimeout(seconds)
    try:
        line.recv(1)
    except TimeoutError:
        return

    raise ConnectionError("it has dropped the connection")


def _forked() -> None:
    for lines in list(_all):
        lines.forget()


os.register_at_fork(after_in_child=_forked)
