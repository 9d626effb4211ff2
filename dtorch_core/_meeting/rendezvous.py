"""Where the ranks of one opening find each other: a c10d Store, a URL, torchrun's, or this process by name."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

import torch.distributed as dist

from dtorch_core import _scope
from dtorch_core._futures import begun
from dtorch_core._meeting.board import Board, Lines, board_at, board_in, own_line
from dtorch_core._text import seconds
from dtorch_core.checks import LONGEST
from dtorch_core.errors import DtorchError, PeerLostError, StoreTimeoutError

SHORTEST = 0.01
"""Seconds that a try has at least, however late it begins."""

RETRY = 0.05
"""Seconds between two tries to reach a server that is not up yet."""

WRITING = 0.5
"""Seconds in which a rank that lives writes more to a rendezvous file, if it is in the middle of a record."""

_LENGTH = struct.Struct("=I")

T = TypeVar("T")

_lock = threading.Lock()
_in_process = dist.HashStore()
_kept: dict[str, dist.Store] = {}
"""What has to last until the process ends: the server of a ``tcp://`` URL, which peers may still read from when rank 0
has closed what it opened; and one FileStore for each file, since the last one to go removes the file."""


def connect(rendezvous: Board | dist.Store | str | None, rank: int, world_size: int, timeout: float) -> Board:
    """What carries an opening's exchange.

    :raises ValueError: if the URL can't be read.
    :raises StoreTimeoutError: if the rendezvous' host does not answer within ``timeout`` seconds.
    :raises PeerLostError: if the server of a given Store is gone.
    :raises DtorchError: if rank 0 can't serve it, or its file can't be used; the system's error is the cause.
    """
    if isinstance(rendezvous, Board):
        return rendezvous

    if isinstance(rendezvous, dist.Store):
        return _at_given(rendezvous, timeout)

    if isinstance(rendezvous, str):
        return _at_url(rendezvous, rendezvous, rank, world_size, timeout)

    if rendezvous is not None:
        raise TypeError(f"rendezvous must be a torch.distributed.Store, a URL or None, not {rendezvous!r}")

    if world_size == 1:
        return _here(dist.HashStore())  # its own: nobody to meet, and nobody to mix up with

    scope = _scope.current()
    if scope is not None:
        return scope.board

    if os.environ.get("WORLD_SIZE") == str(world_size) and "MASTER_ADDR" in os.environ:
        return _at_url("env://", "torchrun's environment (env://)", rank, world_size, timeout)

    return _here(_in_process)


def _at_given(store: dist.Store, timeout: float) -> Board:
    name, limit = f"the given {type(store).__name__}", min(timeout, LONGEST)
    try:
        # It has a timeout of its own, in which c10d tries to reach a server that is gone.
        return _in_time(name, time.monotonic() + limit, lambda: board_in(store))
    except TimeoutError as error:
        raise StoreTimeoutError(
            f"the server of {name} takes no other connection within {seconds(limit)}: is the process up that serves it?"
        ) from error
    except dist.DistError as error:
        raise PeerLostError(f"the server of {name} is gone: {_first_line(error)}") from error


def _here(store: dist.HashStore) -> Board:
    return Board(Lines(store), f"process {os.getpid()}")


def _at_url(url: str, place: str, rank: int, world_size: int, timeout: float) -> Board:
    parts = urlsplit(url)
    if parts.query:
        raise ValueError(f"rendezvous {url!r}: rank and world_size are arguments; leave out ?{parts.query}")

    if parts.scheme == "file":
        return Board(Lines(_at_file(url, parts, world_size, time.monotonic() + min(timeout, LONGEST))), place)

    limit = timedelta(seconds=min(timeout, LONGEST))
    if parts.scheme == "tcp":
        host, port = _host_and_port(url, parts)
        return _at_server(host, port, rank == 0, limit, place)

    if parts.scheme == "env":
        # torchrun's agent serves the store itself; each restart of the workers begins anew.
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host, port = _host_and_port_of_environment()
        board = _at_server(host, port, rank == 0 and not agent, limit, place)
        return board.under(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}")

    raise ValueError(f"rendezvous {url!r}: the scheme must be tcp://host:port, file:///path or env://")


def _at_server(host: str, port: int, serve: bool, limit: timedelta, shown: str) -> Board:
    place, deadline = f"{host}:{port}", time.monotonic() + limit.total_seconds()
    if serve:
        _serve(host, port, place, deadline, limit)

    def line() -> dist.Store:
        server = _kept.get(place)
        if server is None:
            return _at_port(host, port, place, deadline, limit)

        # Not the server's own: every rank of this process would have the same one, and a forked child its parent's.
        return own_line(server)

    return board_at(place, shown, line)


def _serve(host: str, port: int, place: str, deadline: float, limit: timedelta) -> None:
    if place in _kept:
        return

    try:
        _wait_for_name(host, port, place, deadline)
    except OSError as error:
        raise _nobody(place, limit, error) from error

    try:
        # Several in one process share the port: with other openings, and with torch's own process group.
        server = _in_time(
            place,
            deadline,
            lambda: dist.TCPStore(host, port, None, True, limit, wait_for_workers=False, multi_tenant=True),
        )
    except TimeoutError as error:
        raise _silent(place, limit) from error
    except (RuntimeError, ValueError) as error:
        raise DtorchError(f"rank 0 can't serve the rendezvous at {place}: {_first_line(error)}") from error

    with _lock:
        _kept.setdefault(place, server)


def _at_port(host: str, port: int, place: str, deadline: float, limit: timedelta) -> dist.Store:
    try:
        _wait_for_server(host, port, deadline)
    except OSError as error:
        raise _nobody(place, limit, error) from error

    try:
        return _in_time(place, deadline, lambda: dist.TCPStore(host, port, None, False, limit, wait_for_workers=False))
    except TimeoutError as error:
        raise _silent(place, limit) from error
    except (OSError, RuntimeError) as error:
        raise _nobody(place, limit, error) from error


def _in_time(place: str, deadline: float, call: Callable[[], T]) -> T:
    """What ``call`` returns; TimeoutError at the deadline.

    c10d waits for a server's first word without its timeout, and can't be interrupted there.
    """
    return begun(call, f"connecting to {place}").result(max(deadline - time.monotonic(), SHORTEST))


def _nobody(place: str, limit: timedelta, error: Exception) -> StoreTimeoutError:
    return StoreTimeoutError(
        f"no rendezvous at {place} within {seconds(limit.total_seconds())}: {_first_line(error)}. "
        f"Is rank 0 up, which serves it, and the address right?"
    )


def _silent(place: str, limit: timedelta) -> StoreTimeoutError:
    return StoreTimeoutError(
        f"no rendezvous at {place} within {seconds(limit.total_seconds())}: something takes the connection there, and "
        f"does not answer as a rendezvous does. Has another service this port? Use a free one"
    )


def _wait_for_name(host: str, port: int, place: str, deadline: float) -> None:
    """Until the host's name is known: c10d would write to stderr that it is not, and say something else.

    :raises OSError: if it is not known by the deadline.
    """
    while True:
        try:
            _in_time(place, deadline, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except TimeoutError:
            raise OSError("no name server answers") from None
        except OSError:
            if time.monotonic() > deadline:
                raise
        else:
            return

        time.sleep(RETRY)


def _wait_for_server(host: str, port: int, deadline: float) -> None:
    # Nothing tells when a port of another process begins to listen. TCPStore tries as well, but far beyond its timeout.
    while True:
        try:
            with socket.create_connection((host, port), max(deadline - time.monotonic(), SHORTEST)) as line:
                if line.getsockname() != line.getpeername():  # a port that nobody listens on can reach itself
                    return
        except OSError:
            if time.monotonic() > deadline:
                raise

        time.sleep(RETRY)


def _at_file(url: str, parts: SplitResult, world_size: int, deadline: float) -> dist.Store:
    if not parts.path or parts.netloc:
        raise ValueError(f"rendezvous {url!r}: a file's URL has three slashes and a whole path: file:///path")

    path = unquote(parts.path)
    try:
        with open(path, "ab"):
            pass  # a FileStore tries for five minutes to open what can't be opened

        _check_records(path, deadline)
        opened = dist.FileStore(path, world_size)
        with _lock:
            kept = _kept.setdefault(url, opened)

    except (OSError, RuntimeError) as error:
        raise DtorchError(f"the rendezvous {url} can't be used: {_first_line(error)}") from error

    return own_line(kept)


def _check_records(path: str, deadline: float) -> None:
    """A FileStore reads for ever what ends in the middle of a record.

    Without its lock, for which it waits with the GIL. So what another rank is just writing is looked at again.

    :raises OSError: if the file holds something else.
    """
    before = None
    while True:
        with open(path, "rb") as file:
            held = file.read()

        if _holds_records(held):
            return

        if held == before or time.monotonic() > deadline:
            raise OSError(
                "it holds something else than the records of a FileStore, or ends in the middle of one, as when its "
                "writer was killed; name a file that is not there"
            )

        before = held
        time.sleep(WRITING)


def _holds_records(data: bytes) -> bool:
    """It is what c10d's FileStore writes: for each key and each value its length, as four bytes, and its bytes."""
    at = 0
    while at < len(data):
        if at + _LENGTH.size > len(data):
            return False

        at += _LENGTH.size + _LENGTH.unpack_from(data, at)[0]

    return at == len(data)


def _host_and_port(url: str, parts: SplitResult) -> tuple[str, int]:
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None

    if not host or not port:
        raise ValueError(f"rendezvous {url!r}: needs a host and a port that every rank knows: tcp://host:port")

    return host, port


def _host_and_port_of_environment() -> tuple[str, int]:
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise ValueError(
            f"rendezvous 'env://' needs MASTER_ADDR and MASTER_PORT in the environment, not {host!r} and {port!r}"
        )

    return host, int(port)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
