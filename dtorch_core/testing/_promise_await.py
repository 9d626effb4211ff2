"""Awaiting a promise: from any event loop and several at once, without polling, and without a hand in its end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
import traceback
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from dtorch_core.errors import AbortedError, BrokenPromiseError, RankFailedError, UnsupportedOperationError
from dtorch_core.launcher import RankContext
from dtorch_core.promise import TensorFuture
from dtorch_core.testing._harness import Background, asleep, requires, run_ranks, undeclared
from dtorch_core.testing._promise_base import PromiseConformance
from dtorch_core.testing._store_base import SHORT, coded, same

T = TypeVar("T")


class _Loop(asyncio.SelectorEventLoop):
    """An event loop that keeps what it was asked for, and what was reported to it."""

    def __init__(self) -> None:
        super().__init__()
        self.timers = 0
        self.jobs = 0
        self.turns = 0
        self.reports: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, report: self.reports.append(report))

    def call_at(self, *args: Any, **kw: Any) -> asyncio.TimerHandle:  # type: ignore[override]  # noqa: ANN401
        self.timers += 1
        return super().call_at(*args, **kw)

    def call_soon(self, *args: Any, **kw: Any) -> asyncio.Handle:  # type: ignore[override]  # noqa: ANN401
        self.turns += 1
        return super().call_soon(*args, **kw)

    def run_in_executor(self, *args: Any, **kw: Any) -> asyncio.Future[Any]:  # type: ignore[override]  # noqa: ANN401
        self.jobs += 1
        return super().run_in_executor(*args, **kw)


async def _get(future: TensorFuture) -> Any:  # noqa: ANN401
    return await future


class AwaitTests(PromiseConformance):
    """``await future``."""

    def run(self, main: Callable[[], Coroutine[Any, Any, T]], loops: list[_Loop] | None = None) -> T:
        """``main()`` in a loop of its own in a thread of its own, bounded; nothing may be reported to the loop."""
        return self.start(main, loops).result(self.patience)

    def start(self, main: Callable[[], Coroutine[Any, Any, T]], loops: list[_Loop] | None = None) -> Background[T]:
        """As :meth:`run`, without waiting for it."""

        def run() -> T:
            with asyncio.Runner(loop_factory=_Loop) as runner:
                loop = runner.get_loop()
                assert isinstance(loop, _Loop)
                (loops if loops is not None else []).append(loop)
                result = runner.run(main())
                gc.collect()
                assert loop.reports == []
                return result

        return Background(run, "event loop")

    @requires("await")
    def test_await_gives_the_value(self, device: str) -> None:
        promise, future = self.pair(device)

        async def main() -> None:
            got = await future
            assert got is not None and same(got, coded(1, (3, 5), device))
            again = await future
            assert again is not None and same(again, coded(1, (3, 5), device))

        waiting = self.start(main)
        asleep(waiting)
        promise.set_result(coded(1, (3, 5), device))
        waiting.result(self.patience)
        self.run(main)  # what is there already

    @requires("await")
    def test_await_of_the_void(self) -> None:
        promise, future = self.pair()
        waiting = self.start(lambda: _get(future))
        asleep(waiting)
        promise.set_result(None)
        assert waiting.result(self.patience) is None

    @requires("await")
    def test_await_does_not_poll(self) -> None:
        """While it is pending the loop sleeps: no timer, no turn, no helper thread."""
        promise, future = self.pair()
        loops: list[_Loop] = []
        threads = threading.active_count()
        waiting = self.start(lambda: _get(future), loops)
        try:
            asleep(waiting, SHORT)
            turns = loops[0].turns
            waiting.thread.join(SHORT)
            assert waiting.thread.is_alive()
            assert threading.active_count() == threads + 1
            assert (loops[0].timers, loops[0].jobs) == (0, 0)
            assert loops[0].turns == turns <= 5
        finally:
            promise.set_result(coded(1, device=self.home))

        assert same(waiting.result(self.patience), coded(1, device=self.home))

    @requires("await")
    def test_await_leaves_the_loop_to_others(self) -> None:
        """The promise is set by another task of the same loop."""
        promise, future = self.pair()

        async def main() -> None:
            waiting = asyncio.create_task(_get(future))
            for _ in range(5):
                await asyncio.sleep(0)

            assert not waiting.done()
            promise.set_result(coded(1, device=self.home))
            assert same(await waiting, coded(1, device=self.home))

        self.run(main)

    @requires("await")
    def test_await_from_several_loops_at_once(self) -> None:
        """Three loops, ten awaits in each, and a thread that just waits."""
        promise, future = self.pair()

        async def main() -> list[Any]:
            return await asyncio.gather(*(_get(future) for _ in range(5)), *([future] * 5))

        waiting = [self.start(main) for _ in range(3)]
        plain = Background(lambda: future.result(self.patience))
        asleep(plain)
        for background in waiting:
            asleep(background)

        promise.set_result(coded(1, device=self.home))
        for background in waiting:
            got = background.result(self.patience)
            assert len(got) == 10
            assert all(same(each, coded(1, device=self.home)) for each in got)

        value = plain.result(self.patience)
        assert value is not None and same(value, coded(1, device=self.home))

    @requires("await")
    def test_await_against_set_is_woken(self) -> None:
        """Set in the very moment in which the await begins."""

        async def main() -> None:
            loop = asyncio.get_running_loop()
            for turn in range(100):
                promise, future = self.pair()
                gate = threading.Barrier(2)

                def worker() -> None:
                    gate.wait(self.patience)  # noqa: B023
                    promise.set_result(coded(turn, device=self.home))  # noqa: B023

                running = Background(worker)
                gate.wait(self.patience)
                got = await asyncio.wait_for(future, self.patience)
                assert got is not None and same(got, coded(turn, device=self.home))
                running.result(self.patience)

            assert not loop.is_closed()

        self.run(main)

    @requires("await")
    @pytest.mark.parametrize("end", ["timeout", "cancel", "gather"])
    def test_await_that_is_given_up_loses_nothing(self, end: str) -> None:
        """Neither the value, nor the future, nor another await of it."""
        promise, future = self.pair()

        async def main() -> None:
            other = asyncio.create_task(_get(future))
            for _ in range(3):
                if end == "timeout":
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(future, 0.01)

                    continue

                given_up = asyncio.create_task(_get(future)) if end == "cancel" else asyncio.gather(future, future)
                await asyncio.sleep(0.01)
                given_up.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await given_up

            assert not future.done() and not future.cancelled() and not promise.cancelled()
            promise.set_result(coded(1, device=self.home))
            for got in (await other, await future):
                assert got is not None and same(got, coded(1, device=self.home))

        self.run(main)

    @requires("await")
    def test_await_that_is_given_up_as_it_ends(self) -> None:
        """Set and cancelled in one turn of the loop: nothing is reported, and the value is there."""

        async def main() -> None:
            for turn in range(10):
                promise, future = self.pair()
                waiting = asyncio.create_task(_get(future))
                await asyncio.sleep(0)
                promise.set_result(coded(turn, device=self.home))
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting

                got = await future
                assert got is not None and same(got, coded(turn, device=self.home))

        self.run(main)

    @requires("await")
    def test_await_that_is_given_up_leaves_nothing(self) -> None:
        """A pending future does not keep the loop of those who no longer wait."""
        promise, future = self.pair()
        loops: list[_Loop] = []

        async def main() -> None:
            for _ in range(10):
                waiting = asyncio.create_task(_get(future))
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)

        self.run(main, loops)
        watch = weakref.ref(loops.pop())
        gc.collect()
        assert watch() is None
        assert not future.done()
        promise.set_result(None)

    @requires("await")
    def test_await_in_a_loop_that_was_closed(self) -> None:
        """Closed with an await still pending: the worker does not notice, other consumers get the value."""
        promise, future = self.pair()
        loop = _Loop()
        waiting = loop.create_task(_get(future))
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        promise.set_result(coded(1, device=self.home))
        assert not waiting.done()
        got = future.result(self.patience)
        assert got is not None and same(got, coded(1, device=self.home))
        del waiting
        gc.collect()
        assert len(loop.reports) == 1, "asyncio's own, that a task was left pending"

    @requires("await")
    def test_await_raises_the_error(self) -> None:
        """To each its own: type, message and a traceback that holds nobody else's frames."""
        promise, future = self.pair()

        async def main() -> list[Any]:
            return await asyncio.gather(*(_get(future) for _ in range(4)), return_exceptions=True)

        waiting = self.start(main)
        asleep(waiting)
        promise.set_exception(ValueError("on purpose"))
        errors = waiting.result(self.patience) + self.run(main)
        assert {(type(error), str(error)) for error in errors} == {(ValueError, "on purpose")}
        depths = [len(traceback.extract_tb(error.__traceback__)) for error in errors]
        assert max(depths) <= min(depths) + 2, depths

    @requires("await")
    @pytest.mark.parametrize("end", ["error", "dropped", "cancel"])
    def test_await_that_was_left_reports_nothing(self, end: str) -> None:
        """The awaits were cancelled, or closed; then the promise fails. No loop hears that nobody fetched the error."""
        held = [self.promise()]
        future = held[0].future()

        async def main() -> None:
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(future, 0.01)

                closed = _get(future)
                closed.send(None)
                closed.close()

            if end == "error":
                held[0].set_exception(ValueError("on purpose"))
            elif end == "cancel":
                future.cancel()

            held.clear()
            await asyncio.sleep(0.01)

        self.run(main)  # sees to it that nothing is reported
        assert future.done()

    @requires("await")
    def test_await_of_a_dropped_promise(self) -> None:
        held = [self.promise()]
        future = held[0].future()
        waiting = self.start(lambda: _get(future))
        asleep(waiting)
        held.clear()
        gc.collect()
        with pytest.raises(BrokenPromiseError):
            waiting.result(self.patience)

    @requires("await")
    def test_await_of_a_cancelled_future(self) -> None:
        promise, future = self.pair()
        waiting = self.start(lambda: _get(future))
        asleep(waiting)
        assert future.cancel()
        with pytest.raises((concurrent.futures.CancelledError, asyncio.CancelledError)):
            waiting.result(self.patience)

        promise.set_result(None)

    @requires("await")
    def test_await_by_the_standard_librarys_bridge(self) -> None:
        promise, future = self.pair()

        async def main() -> Any:  # noqa: ANN401
            return await asyncio.wrap_future(future)

        waiting = self.start(main)
        asleep(waiting)
        promise.set_result(coded(1, device=self.home))
        assert same(waiting.result(self.patience), coded(1, device=self.home))

    @requires("await")
    def test_await_of_a_rank_ends_with_its_run(self) -> None:
        promise, future = self.pair()
        ended: list[str] = []

        def rank(ctx: RankContext) -> None:
            if ctx.rank == 0:
                with pytest.raises(AbortedError):
                    asyncio.run(_get(future))

                ended.append("rank 0")
                return

            raise ZeroDivisionError("rank 1 fails on purpose")

        with pytest.raises(RankFailedError, match="rank 1 fails on purpose") as failure:
            run_ranks(rank, 2, self.patience)

        assert ended == ["rank 0"] and "left behind" not in str(failure.value)
        assert not future.done()
        promise.set_result(None)

    @undeclared("await")
    def test_await_is_refused(self) -> None:
        promise, future = self.pair()
        with pytest.raises(UnsupportedOperationError):
            self.run(lambda: _get(future))

        promise.set_result(coded(1, device=self.home))
        got = future.result(self.patience)
        assert got is not None and same(got, coded(1, device=self.home))
