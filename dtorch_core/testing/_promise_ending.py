"""How a promise ends without a value: errors, cancelling, and promises that are dropped."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import threading
import traceback
from collections.abc import Callable

import pytest

from dtorch_core.errors import BrokenPromiseError, ProtocolError
from dtorch_core.promise import TensorFuture, TensorPromise
from dtorch_core.testing._harness import Background, asleep
from dtorch_core.testing._promise_base import PromiseConformance
from dtorch_core.testing._promise_values import EACH_SET
from dtorch_core.testing._store_base import coded, same


class OddError(Exception):
    """An error that its own ``args`` can't make again."""

    def __init__(self, code: int) -> None:
        super().__init__(f"it went wrong with code {code}")
        self.code = code


class EndingTests(PromiseConformance):
    """A consumer always learns how it ended."""

    # Errors

    @pytest.mark.parametrize(
        "error",
        [ValueError("a", 7), KeyError("k"), FileNotFoundError(2, "none", "a.txt"), OddError(7), TimeoutError()],
        ids=lambda error: type(error).__name__,
    )
    def test_error_keeps_its_type(self, error: Exception) -> None:
        promise, future = self.pair()
        promise.set_exception(error)
        for _ in range(2):
            with pytest.raises(type(error)) as raised:
                future.result(self.patience)

            assert type(raised.value) is type(error)
            assert (str(raised.value), raised.value.args) == (str(error), error.args)
            assert getattr(raised.value, "code", None) == getattr(error, "code", None)

        kept = future.exception(0)
        assert type(kept) is type(error) and str(kept) == str(error)

    def test_error_wakes_a_consumer_that_waits(self) -> None:
        promise, future = self.pair()
        consumer = Background(lambda: future.result(self.patience))
        asleep(consumer)
        promise.set_exception(ValueError("on purpose"))
        with pytest.raises(ValueError, match="on purpose"):
            consumer.result(self.patience)

    @pytest.mark.parametrize("error", [ValueError("on purpose"), OddError(7)], ids=lambda error: type(error).__name__)
    def test_error_raised_often_does_not_grow(self, error: Exception) -> None:
        """Nobody's traceback holds the frames of those who asked before."""
        promise, future = self.pair()
        promise.set_exception(error)

        def depth() -> int:
            with pytest.raises(type(error)) as raised:
                future.result(self.patience)

            return len(traceback.extract_tb(raised.value.__traceback__))

        depths = [depth() for _ in range(10)]
        assert depths == depths[:1] * 10

    @pytest.mark.parametrize("what", [ValueError, "a text", None], ids=["class", "text", "none"])
    def test_error_has_to_be_an_exception(self, what: object) -> None:
        promise, future = self.pair()
        with pytest.raises(TypeError):
            promise.set_exception(what)  # type: ignore[arg-type]

        assert not future.done()
        promise.set_result(None)  # it is still unset
        assert future.result(self.patience) is None

    def test_future_is_not_the_consumers_to_set(self) -> None:
        promise, future = self.pair()
        calls: list[Callable[[], object]] = [
            lambda: future.set_result(coded(0)),
            lambda: future.set_exception(ValueError()),
            lambda: future.set_running_or_notify_cancel(),
        ]
        for call in calls:
            with pytest.raises(ProtocolError):
                call()

        assert not future.done()
        promise.set_result(coded(1, device=self.home))
        got = future.result(self.patience)
        assert got is not None and same(got, coded(1, device=self.home))

    # Cancelling

    @EACH_SET
    def test_cancel_ends_the_future_and_tells_the_promise(self, again: Callable[[TensorPromise], None]) -> None:
        promise, future = self.pair()
        assert not promise.cancelled()
        assert future.cancel() is True
        assert future.cancelled() and future.done() and promise.cancelled()
        for call in (future.result, future.exception):
            with pytest.raises(concurrent.futures.CancelledError):
                call(0)

        promise.set_result(coded(1, device=self.home))  # the worker does not fail
        assert future.cancelled() and promise.cancelled()
        with pytest.raises(ProtocolError):
            again(promise)

        assert future.cancel() is True

    def test_cancel_wakes_those_who_wait(self) -> None:
        promise, future = self.pair()
        consumer = Background(lambda: future.result(self.patience))
        asleep(consumer)
        assert future.cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            consumer.result(self.patience)

        promise.set_exception(ValueError("dropped quietly"))

    def test_cancel_comes_too_late(self) -> None:
        promise, future = self.pair()
        promise.set_result(coded(1, device=self.home))
        assert future.wait(self.patience)
        assert future.cancel() is False
        assert not promise.cancelled()
        got = future.result(0)
        assert got is not None and same(got, coded(1, device=self.home))

    def test_cancel_ends_one_future_only(self) -> None:
        (first, cancelled), (second, other) = self.pair(), self.pair()
        assert cancelled.cancel()
        second.set_result(coded(2, device=self.home))
        got = other.result(self.patience)
        assert got is not None and same(got, coded(2, device=self.home))
        assert first.cancelled() and not second.cancelled()

    def test_cancel_against_set_has_one_end(self) -> None:
        for turn in range(100):
            promise, future = self.pair()
            called: list[object] = []
            future.add_done_callback(called.append)
            raised, cancelled = self.together(
                lambda: promise.set_result(coded(turn, device=self.home)),  # noqa: B023
                future.cancel,
            )
            assert raised is None, "a worker fails since its consumer has cancelled"
            assert future.wait(self.patience)
            assert future.cancelled() is cancelled
            assert promise.cancelled() is cancelled
            assert called == [future]
            if not cancelled:
                got = future.result(0)
                assert got is not None and same(got, coded(turn, device=self.home))

    def test_cancel_by_many_threads(self) -> None:
        for _ in range(50):
            promise, future = self.pair()
            waiting = Background(lambda: concurrent.futures.wait([future], self.patience))  # noqa: B023
            assert self.together(future.cancel, future.cancel, future.cancel) == [True] * 3
            assert waiting.result(self.patience).done == {future}
            promise.set_result(None)

    # Dropped promises

    def test_dropped_promise_breaks_its_future(self) -> None:
        promise, future = self.pair()
        assert not future.done()
        del promise
        gc.collect()
        for _ in range(2):
            with pytest.raises(BrokenPromiseError, match=str(os.getpid())):
                future.result(self.patience)

        assert not future.cancelled()

    def test_dropped_promise_wakes_a_consumer_that_waits(self) -> None:
        held = [self.promise()]
        future = held[0].future()
        consumer = Background(lambda: future.result(self.patience))
        asleep(consumer)
        Background(held.clear).result(self.patience)
        with pytest.raises(BrokenPromiseError):
            consumer.result(self.patience)

    def test_dropped_promise_in_a_cycle(self) -> None:
        promise, future = self.pair()
        cycle: list[object] = [promise]
        cycle.append(cycle)
        del promise, cycle
        gc.collect()
        with pytest.raises(BrokenPromiseError):
            future.result(self.patience)

    def test_dropped_promise_of_a_worker_that_fails(self) -> None:
        """Its thread ends with an error; nobody keeps the traceback."""
        held = [self.promise()]
        future = held[0].future()

        def work(promise: TensorPromise) -> None:
            raise ZeroDivisionError(f"{promise} is never set")

        def worker() -> None:
            try:
                work(held.pop())
            except ZeroDivisionError:
                pass

        Background(worker).result(self.patience)
        gc.collect()
        with pytest.raises(BrokenPromiseError):
            future.result(self.patience)

    @pytest.mark.parametrize("end", ["value", "error", "cancel"])
    def test_dropped_promise_that_has_ended_changes_nothing(self, end: str) -> None:
        promise, future = self.pair()
        if end == "value":
            promise.set_result(coded(1, device=self.home))
        elif end == "error":
            promise.set_exception(ValueError("on purpose"))
        else:
            future.cancel()

        del promise
        gc.collect()
        if end == "value":
            got = future.result(self.patience)
            assert got is not None and same(got, coded(1, device=self.home))
        else:
            with pytest.raises(ValueError if end == "error" else concurrent.futures.CancelledError):
                future.result(self.patience)

    def test_dropped_promise_that_nobody_waits_for(self) -> None:
        """Without a future, or with one that was dropped first: nothing happens, and nothing is reported."""
        self.promise()
        promise, future = self.pair()
        del future
        del promise
        gc.collect()

    def test_dropped_future_leaves_the_worker_alone(self) -> None:
        promise, future = self.pair()
        del future
        gc.collect()
        promise.set_result(coded(1, device=self.home))

    def test_dropped_promise_against_a_wait_that_begins(self) -> None:
        """Whichever is first, the wait ends."""
        for _ in range(100):
            held = [self.promise()]
            future: TensorFuture = held[0].future()
            outcomes = self.together(held.clear, lambda: future.result(self.patience))  # noqa: B023
            assert type(outcomes[1]) is BrokenPromiseError

    def test_dropped_promise_against_cancel_has_one_end(self) -> None:
        for _ in range(100):
            held = [self.promise()]
            future = held[0].future()
            ended = threading.Event()
            future.add_done_callback(lambda _: ended.set())  # noqa: B023
            _, cancelled = self.together(held.clear, future.cancel)
            assert ended.wait(self.patience)
            assert future.cancelled() is cancelled
            with pytest.raises(concurrent.futures.CancelledError if cancelled else BrokenPromiseError):
                future.result(0)
