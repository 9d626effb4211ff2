"""The errors of futures: what each caller sees of what the worker raised."""

from __future__ import annotations

import gc
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from dtorch_core import TensorFuture
from dtorch_core.promise import Outcome

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import plain_promises
    from plain_promises import pair

plain = plain_promises.plain


class TestErrors:
    """Each caller raises an error of its own, which tells all that the worker's did."""

    @staticmethod
    def failed(error: BaseException) -> TensorFuture:
        promise, future = pair()

        def the_worker() -> None:
            raise error

        try:
            the_worker()
        except type(error) as failure:
            promise.set_exception(failure)

        return future

    def test_traceback_shows_the_worker_and_this_caller_only(self) -> None:
        future = self.failed(ValueError("on purpose"))

        def the_first_caller() -> BaseException:
            with pytest.raises(ValueError, match="on purpose") as raised:
                future.result(0)

            return raised.value

        first = the_first_caller()
        with pytest.raises(ValueError, match="on purpose") as raised:
            future.result(0)

        assert raised.value is not first
        names = [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]
        assert names[-1] == "the_worker" and "the_first_caller" not in names

    def test_cause_and_notes_come_along(self) -> None:
        error = ValueError("on purpose")
        error.__cause__ = KeyError("why")
        error.add_note("seen by the worker")
        future = self.failed(error)
        for _ in range(2):
            with pytest.raises(ValueError, match="on purpose") as raised:
                future.result(0)

            assert raised.value.__cause__ is error.__cause__
            assert raised.value.__notes__ == ["seen by the worker"]
            raised.value.add_note("of one caller")

    @pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=["SystemExit", "KeyboardInterrupt"])
    def test_errors_beyond_exception(self, error: BaseException) -> None:
        with pytest.raises(type(error)):
            self.failed(error).result(0)

    def test_errors_that_can_not_be_copied(self) -> None:
        class Forgetful(Exception):
            """A copy of it has no code: that is not among its arguments, nor in its __dict__."""

            __slots__ = ("code",)

            def __init__(self, text: str, code: int = 0) -> None:
                super().__init__(text)
                self.code = code

            def __str__(self) -> str:
                return f"{self.args[0]}, code {self.code}"

        class Hostile(Exception):
            def __reduce__(self) -> str:
                raise ZeroDivisionError("can't be copied")

        class Unprintable(Exception):
            def __str__(self) -> str:
                raise ZeroDivisionError("can't be printed")

        for error in (Forgetful("on purpose", 7), Hostile("on purpose"), Unprintable()):
            future = self.failed(error)
            for _ in range(3):
                with pytest.raises(type(error)) as raised:
                    future.result(0)

                assert raised.value is error
                assert len(traceback.extract_tb(raised.value.__traceback__)) <= 5

    def test_error_and_future_are_no_cycle(self) -> None:
        """They go with their last reference: no collector is needed to free what a traceback holds."""
        ends: list[Callable[[], object]] = []
        gc.disable()
        try:
            hostile = type("Hostile", (Exception,), {"__reduce__": lambda self: 1 / 0})
            for error in (ValueError("on purpose"), hostile()):
                watched = threading.Event()
                future = TensorFuture("promise 0")
                future.add_done_callback(lambda _, kept=watched: None)
                future.settle(Outcome(error=error))
                ends.append(weakref.ref(watched))
                try:
                    future.result(0)
                except Exception:
                    pass

                del future, watched, error
        finally:
            gc.enable()

        assert [end() for end in ends] == [None, None]
