"""A promise whose holder is another process: it sets, fails, lets go, or is killed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

import pytest

from dtorch_core.errors import BrokenPromiseError, ProtocolError
from dtorch_core.future import TensorFuture
from dtorch_core.promise import TensorPromise, attach_promise, make_promise
from dtorch_core.testing._harness import requires
from dtorch_core.testing._promise_base import PromiseConformance
from dtorch_core.testing._store_base import HUGE, coded, same


def _hold(token: bytes, end: str, device: str) -> None:
    """What the other process does with its promise."""
    promise: TensorPromise = pickle.loads(token) if end == "pickled" else attach_promise(token)
    if end in ("value", "pickled"):
        promise.set_result(coded(os.getpid(), (3, 5), device))
    elif end == "large":
        promise.set_result(coded(1, HUGE, device))
    elif end == "void":
        promise.set_result(None)
    elif end == "error":
        promise.set_exception(FileNotFoundError(2, "on purpose", "a.txt"))
    elif end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif end == "twice":
        promise.set_result(coded(1, (3, 5), device))
        try:
            promise.set_result(None)
        except ProtocolError:
            sys.exit(3)  # not at once: a value from a GPU may be under way


class ProcessTests(PromiseConformance):
    """``reach="process"``."""

    @contextmanager
    def held(self, end: str, device: str) -> Iterator[tuple[TensorFuture, BaseProcess]]:
        """A future whose promise another process holds, and that process; it is gone afterwards."""
        promise = make_promise(reach="process", device=device, backend=self.backend)
        future = promise.future()
        token = pickle.dumps(promise) if end == "pickled" else promise.serialize()
        process = multiprocessing.get_context("spawn").Process(target=_hold, args=(token, end, device))
        process.start()
        del promise
        try:
            yield future, process
        finally:
            process.join(self.patience)
            process.kill()
            process.join()
            process.close()

    @requires("multi_process")
    @pytest.mark.parametrize("end", ["value", "pickled"])
    def test_process_sets_a_value(self, end: str, device: str) -> None:
        with self.held(end, device) as (future, process):
            assert (future.backend, len(future.selection.topology)) == (self.backend, 2)
            for _ in range(2):
                got = future.result(self.patience)
                assert got is not None and same(got, coded(process.pid or 0, (3, 5), device))

    @requires("multi_process")
    def test_process_sets_a_large_value(self, device: str) -> None:
        with self.held("large", device) as (future, _):
            got, wanted = future.result(self.patience), coded(1, HUGE, device)
            assert got is not None and got.shape == wanted.shape
            assert same(got, wanted), f"{(got != wanted).sum()} of {wanted.numel()} elements are wrong"

    @requires("multi_process")
    def test_process_sets_nothing(self, device: str) -> None:
        with self.held("void", device) as (future, _):
            assert future.result(self.patience) is None

    @requires("multi_process")
    def test_process_sets_twice(self, device: str) -> None:
        with self.held("twice", device) as (future, process):
            got = future.result(self.patience)
            assert got is not None and same(got, coded(1, (3, 5), device))
            process.join(self.patience)
            assert process.exitcode == 3

    @requires("multi_process")
    def test_process_sets_an_error(self, device: str) -> None:
        with self.held("error", device) as (future, _), pytest.raises(FileNotFoundError, match="on purpose") as raised:
            future.result(self.patience)

        assert raised.value.filename == "a.txt"

    @requires("multi_process")
    @pytest.mark.parametrize("end", ["dropped", "killed"])
    def test_process_ends_without_a_word(self, end: str, device: str) -> None:
        with self.held(end, device) as (future, process):
            with pytest.raises(BrokenPromiseError, match=str(process.pid)):
                future.result(self.patience)
