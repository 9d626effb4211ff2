"""Waiting for a promise: timeouts that lose nothing, callbacks, and the standard library's own waits."""

from __future__ import annotations

import concurrent.futures
import threading
import time

import pytest

from dtorch_core.errors import AbortedError, RankFailedError, StoreTimeoutError
from dtorch_core.future import TensorFuture
from dtorch_core.launcher import RankContext
from dtorch_core.testing._harness import Background, asleep, run_ranks
from dtorch_core.testing._promise_base import PromiseConformance
from dtorch_core.testing._store_base import SHORT, coded, same

CALLS = pytest.mark.parametrize("call", ["result", "exception"])


class WaitingTests(PromiseConformance):
    """A wait ends when the future does, or at its deadline, and may be repeated."""

    @CALLS
    @pytest.mark.parametrize("timeout", [0, -1, SHORT], ids=["none", "negative", "short"])
    def test_timeout_can_be_repeated(self, call: str, timeout: float) -> None:
        promise, future = self.pair()
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(StoreTimeoutError) as late:
                getattr(future, call)(timeout)

            assert max(timeout, 0) * 0.9 <= time.monotonic() - began < self.patience / 2
            assert isinstance(late.value, TimeoutError)
            assert not future.done() and not promise.cancelled()

        promise.set_result(coded(1, device=self.home))
        got = future.result(self.patience)
        assert got is not None and same(got, coded(1, device=self.home))

    def test_timeouts_of_some_do_not_end_the_wait_of_another(self) -> None:
        promise, future = self.pair()
        patient = Background(lambda: future.result(self.patience))
        asleep(patient)
        for _ in range(5):
            with pytest.raises(StoreTimeoutError):
                future.result(0.01)

        promise.set_result(coded(1, device=self.home))
        got = patient.result(self.patience)
        assert got is not None and same(got, coded(1, device=self.home))

    def test_wait_says_whether_it_has_ended(self) -> None:
        promise, future = self.pair()
        assert future.wait(0) is False
        assert future.wait(SHORT) is False
        assert not future.done()
        waiting = Background(future.wait)  # without a limit
        asleep(waiting)
        promise.set_result(None)
        assert waiting.result(self.patience) is True
        assert future.wait(0) is True

    def test_wait_ends_with_an_error_and_does_not_raise_it(self) -> None:
        promise, future = self.pair()
        promise.set_exception(ValueError("on purpose"))
        assert future.wait(self.patience) is True

    @CALLS
    def test_timeout_near_the_set_loses_nothing(self, call: str) -> None:
        """A wait that ends in the very moment of the set gives the value or the timeout, and then the value."""
        for turn in range(100):
            promise, future = self.pair()

            def read(future: TensorFuture = future) -> None:
                while True:
                    try:
                        getattr(future, call)(0.0001)
                        return
                    except StoreTimeoutError:
                        continue

            outcomes = self.together(read, lambda: promise.set_result(coded(turn, device=self.home)))  # noqa: B023
            assert outcomes == [None, None]
            got = future.result(0)
            assert got is not None and same(got, coded(turn, device=self.home))

    # The standard library's

    def test_is_a_future_of_the_standard_library(self) -> None:
        promise, future = self.pair()
        assert isinstance(future, concurrent.futures.Future)
        assert not future.running() and not future.cancelled()
        promise.set_result(None)
        assert future.done()

    def test_concurrent_wait_sees_every_end(self) -> None:
        """Of a value, an error, a cancelled one and a dropped one; and of the one that is left."""
        pairs = [self.pair() for _ in range(5)]
        futures = [future for _, future in pairs]
        waiting = Background(lambda: concurrent.futures.wait(futures[:4], self.patience))
        asleep(waiting)
        pairs[0][0].set_result(coded(0, device=self.home))
        pairs[1][0].set_exception(ValueError("on purpose"))
        futures[2].cancel()
        last = pairs[4][0]
        pairs.clear()  # drops the fourth
        done, left = waiting.result(self.patience)
        assert (done, left) == (set(futures[:4]), set())
        done, left = concurrent.futures.wait(futures, SHORT)
        assert (done, left) == (set(futures[:4]), {futures[4]})
        last.set_result(None)

    def test_as_completed_gives_them_as_they_come(self) -> None:
        pairs = [self.pair() for _ in range(4)]
        stream = concurrent.futures.as_completed([future for _, future in pairs], self.patience)
        for index in (2, 0, 3, 1):
            promise, future = pairs[index]
            if index == 3:
                future.cancel()
            else:
                promise.set_result(coded(index, device=self.home))

            assert Background(lambda: next(stream)).result(self.patience) is future

    def test_callback_is_called_once_with_the_future(self) -> None:
        promise, future = self.pair()
        called: list[TensorFuture] = []
        ended = threading.Event()
        future.add_done_callback(called.append)  # type: ignore[arg-type]
        future.add_done_callback(lambda _: ended.set())
        assert called == []
        promise.set_result(coded(1, device=self.home))
        assert ended.wait(self.patience)
        future.add_done_callback(called.append)  # type: ignore[arg-type]  # at once
        assert called == [future, future]

    def test_callback_that_fails_hurts_nobody(self, caplog: pytest.LogCaptureFixture) -> None:
        promise, future = self.pair()
        called = threading.Event()

        def fail(_: object) -> None:
            raise ZeroDivisionError("a callback fails on purpose")

        future.add_done_callback(fail)
        future.add_done_callback(lambda _: called.set())
        promise.set_result(coded(1, device=self.home))
        assert called.wait(self.patience)
        got = future.result(self.patience)
        assert got is not None and same(got, coded(1, device=self.home))
        assert "a callback fails on purpose" in caplog.text

    def test_callback_on_a_future_that_nobody_holds(self) -> None:
        promise = self.promise()
        ended = threading.Event()
        promise.future().add_done_callback(lambda _: ended.set())
        promise.set_result(None)
        assert ended.wait(self.patience)

    # In a run of ranks

    def test_failure_of_another_rank_ends_the_wait(self) -> None:
        promise, future = self.pair()
        ended: list[BaseException] = []

        def rank(ctx: RankContext) -> None:
            if ctx.rank == 0:
                try:
                    future.result()
                except AbortedError as error:
                    ended.append(error)
                    raise

            raise ZeroDivisionError("rank 1 fails on purpose")

        with pytest.raises(RankFailedError, match="rank 1 fails on purpose") as failure:
            run_ranks(rank, 2, self.patience)

        assert "left behind" not in str(failure.value)
        assert [type(error) for error in ended] == [AbortedError], ended
        assert not future.done()
        promise.set_result(coded(1, device=self.home))  # the wait was ended, not the future
        got = future.result(self.patience)
        assert got is not None and same(got, coded(1, device=self.home))
