"""How the client hands its batches to rank 0: in its own process, or in another one."""

from __future__ import annotations

import multiprocessing
import pickle
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from torch import Tensor

from dtorch_core import TensorPromise

PATIENCE = 300.0
"""Seconds that rank 0 waits for the next request before it gives up."""


@dataclass(frozen=True)
class Request:
    """A batch of token ids, and the promise that its embeddings will fulfil."""

    tokens: Tensor
    promise: TensorPromise


class Requests(Protocol):
    """A queue of requests; None says that no more come."""

    def put(self, request: Request | None) -> None: ...

    def get(self) -> Request | None: ...

    def close(self) -> None: ...


class ThreadRequests:
    """To a rank that is a thread of this process."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Request | None] = SimpleQueue()

    def put(self, request: Request | None) -> None:
        self._queue.put(request)

    def get(self) -> Request | None:
        return self._queue.get(timeout=PATIENCE)

    def close(self) -> None:
        pass


class ProcessRequests:
    """To a rank in another process. A pickled promise is the right to set it: this process keeps the future alone."""

    def __init__(self) -> None:
        self._queue = multiprocessing.get_context("spawn").Queue()

    def put(self, request: Request | None) -> None:
        self._queue.put(pickle.dumps(request))

    def get(self) -> Request | None:
        request: Request | None = pickle.loads(self._queue.get(timeout=PATIENCE))
        return request

    def close(self) -> None:
        self._queue.close()
        self._queue.cancel_join_thread()  # what has not been read is for ranks that have failed
