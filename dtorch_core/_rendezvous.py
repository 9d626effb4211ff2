"""Where the ranks of one opening find each other: a c10d Store, a URL, torchrun's, or this process by name."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist

from dtorch_core import _scope
from dtorch_core.errors import DtorchError, StoreTimeoutError

_lock = threading.Lock()
_in_process = dist.HashStore()
_connected: dict[tuple[str, int], dist.Store] = {}


def connect(
    rendezvous: dist.Store | str | None, rank: int, world_size: int, timeout: float
) -> tuple[dist.Store, str]:
    """The store that carries an opening's exchange, and how messages call it.

    :raises ValueError: if the URL can't be read.
    :raises StoreTimeoutError: if the rendezvous' host does not answer within ``timeout`` seconds.
    """
    if isinstance(rendezvous, dist.Store):
        return rendezvous, f"the given {type(rendezvous).__name__}"

    if isinstance(rendezvous, str):
        return _at_url(rendezvous, rank, world_size, timeout), rendezvous

    if rendezvous is not None:
        raise TypeError(f"rendezvous must be a torch.distributed.Store, a URL or None, not {rendezvous!r}")

    scope = _scope.current()
    if scope is not None:
        return scope.rendezvous, "this spawn"

    if world_size > 1 and os.environ.get("WORLD_SIZE") == str(world_size) and "MASTER_ADDR" in os.environ:
        return _at_url("env://", rank, world_size, timeout), "torchrun's environment (env://)"

    return _in_process, f"process {os.getpid()}"


def _at_url(url: str, rank: int, world_size: int, timeout: float) -> dist.Store:
    parts = urlsplit(url)
    if parts.scheme not in ("tcp", "file", "env"):
        raise ValueError(f"rendezvous {url!r}: the scheme must be tcp://host:port, file:///path or env://")

    # One connection for each rank of this process, kept until the process ends: with tcp:// rank 0 is the server,
    # and its peers may still be reading from it when rank 0 has closed what it opened.
    key = (url, rank)
    with _lock:
        if key in _connected:
            return _connected[key]

    query = dict(parse_qsl(parts.query))
    given = {"rank": int(query.get("rank", rank)), "world_size": int(query.get("world_size", world_size))}
    try:
        store, _, _ = next(dist.rendezvous(url, timeout=timedelta(seconds=timeout), **given))
    except dist.DistError as error:
        raise StoreTimeoutError(
            f"rank {rank}: no rendezvous at {url} within {timeout:.3g} s: {error}. Is rank 0 up, and the address right?"
        ) from error
    except (ValueError, RuntimeError) as error:
        raise DtorchError(f"rank {rank}: the rendezvous {url} can't be used: {error}") from error

    with _lock:
        return _connected.setdefault(key, store)
