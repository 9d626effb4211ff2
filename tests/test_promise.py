"""The rules of promises and futures that the core keeps for every backend, on the smallest backend there is."""

from __future__ import annotations

import concurrent.futures
import gc
import pickle
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from dtorch_core import (
    BackendContext,
    BackendSpec,
    BrokenPromiseError,
    GetTensorOp,
    ProtocolError,
    StoreTimeoutError,
    Support,
    TensorFuture,
    TensorPromise,
    UnsupportedOperationError,
    attach_promise,
    hookimpl,
    make_promise,
    register,
    unregister,
)
from dtorch_core.promise import Outcome
from dtorch_core.testing import Background, PromiseTests, asleep

ALL = frozenset({"cpu", "cuda", "await"})
PATIENCE = 20.0


class Plain(TensorPromise):
    """A promise whose future is in its own hands."""

    def __init__(self, ctx: BackendContext, home: Plains, ended: TensorFuture) -> None:
        self.home, self.ended, self.taken = home, ended, home.taken.setdefault(ended.label, [])
        super().__init__(ctx, ended.label)

    def take_future(self):
        self.taken.append(True)
        if len(self.taken) > 1:
            raise ProtocolError(f"future() of {self.label}: it was taken already")

        return self.ended

    def cancelled(self):
        return self.ended.cancelled()

    def deliver(self, outcome):
        self.ended.settle(outcome)

    def hand_over(self):
        self.home.tokens[self.label.encode()] = self.ended
        return self.label.encode()


class Plains:
    """Its factory, with no lock and no clean-up."""

    made = 0

    def __init__(self, ctx: BackendContext) -> None:
        self.ctx = ctx
        self.count = 0
        self.tokens: dict[bytes, TensorFuture] = {}
        self.taken: dict[str, list[bool]] = {}

    def create(self):
        self.count += 1
        return Plain(self.ctx, self, TensorFuture(f"promise {self.count}"))

    def attach(self, token):
        try:
            return Plain(self.ctx, self, self.tokens.pop(token))
        except KeyError:
            raise ProtocolError(f"no promise waits for {token!r}") from None


def probe(topology: object) -> Support:
    return Support.yes(1, "the tests want it so") if len(topology) == 1 else Support.no("it is one thread's")


@contextmanager
def installed(name: str = "plain", factory: str = "Plains", capabilities: frozenset[str] = ALL) -> Iterator[None]:
    """A plugin that offers one promise backend, made by ``factory`` of this file."""

    class Plugin:
        @hookimpl
        def dtorch_register_promises(self):
            return [BackendSpec(name, f"{__name__}:{factory}", probe, capabilities=capabilities)]

    register(Plugin(), name=name)
    try:
        yield
    finally:
        unregister(name)


@pytest.fixture(autouse=True, scope="module")
def plain() -> Iterator[None]:
    with installed():
        yield


def pair() -> tuple[TensorPromise, TensorFuture]:
    promise = make_promise(backend="plain")
    return promise, promise.future()


class TestPlain(PromiseTests):
    """The rules are the core's: a backend of 40 lines passes the whole kit, but for what it holds too long."""

    backend = "plain"

    @pytest.mark.xfail(reason="it keeps its future for as long as it lives")
    def test_value_is_let_go_with_its_future(self):
        PromiseTests.test_value_is_let_go_with_its_future(self)


class TestSetting:
    def test_outcome_that_is_not_delivered_leaves_the_promise_unset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        promise, future = pair()
        with monkeypatch.context() as patch:
            patch.setattr(promise, "deliver", lambda outcome: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                promise.set_result(None)

        promise.set_result(torch.arange(3))
        assert torch.equal(future.result(0), torch.arange(3))

    def test_token_that_is_not_made_leaves_the_right_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        promise, future = pair()
        with monkeypatch.context() as patch:
            patch.setattr(promise, "hand_over", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                pickle.dumps(promise)

        del promise
        gc.collect()
        with pytest.raises(BrokenPromiseError):
            future.result(0)

    def test_promise_that_was_never_made_is_no_holder(self) -> None:
        """Nothing to break, and nothing to report, where a backend's constructor fails."""
        with pytest.raises(AttributeError):
            Plain(None, Plains(None), TensorFuture("promise 0"))

        gc.collect()

    def test_drop_while_the_interpreter_ends_tells_nobody(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Half of what a callback needs is gone by then."""
        promise, future = pair()
        with monkeypatch.context() as patch:
            patch.setattr("sys.is_finalizing", lambda: True)
            del promise

        assert not future.done()

    def test_errors_say_which_promise_and_what_became_of_it(self) -> None:
        promise, _ = pair()
        token = promise.serialize()
        with pytest.raises(ProtocolError, match=r"set_result of promise \d+: the right to set it was handed over"):
            promise.set_result(None)

        worker = attach_promise(token)
        worker.set_result(None)
        with pytest.raises(ProtocolError, match=r"set_exception of promise \d+: it has been set already"):
            worker.set_exception(ValueError())

        assert "handed over" in repr(promise) and "set already" in repr(worker)

    def test_operator_takes_a_promise(self) -> None:
        with pytest.raises(TypeError, match="TensorPromise"):
            GetTensorOp(torch.arange(3))

    def test_operator_that_is_dropped_unused_breaks_its_promise(self) -> None:
        promise, future = pair()
        operator = GetTensorOp(promise)
        del promise
        gc.collect()
        assert not future.done()
        del operator
        gc.collect()
        with pytest.raises(BrokenPromiseError):
            future.result(0)

    def test_operator_in_a_pipeline_keeps_the_gradient(self) -> None:
        promise, future = pair()
        weight = torch.arange(4.0, requires_grad=True)
        GetTensorOp(promise)(weight * 2).sum().backward()
        assert torch.equal(weight.grad, torch.full((4,), 2.0))
        assert torch.equal(future.result(0), torch.arange(4.0) * 2)


class TestCapabilities:
    """What a backend does not declare is refused by the core."""

    def test_kit_for_a_backend_without_await(self) -> None:
        with installed("no await", capabilities=frozenset({"cpu"})):
            promise = make_promise(backend="no await")
            future = promise.future()
            with pytest.raises(UnsupportedOperationError, match="'no await' does not declare 'await'"):
                future.__await__().send(None)

            promise.set_result(torch.arange(3))
            assert torch.equal(future.result(0), torch.arange(3))

    def test_device_that_is_not_declared(self) -> None:
        with installed("gpu only", capabilities=frozenset({"cuda"})):
            promise = make_promise(backend="gpu only")
            future = promise.future()
            with pytest.raises(UnsupportedOperationError, match="does not declare 'cpu'"):
                promise.set_result(torch.arange(3))

            promise.set_result(None)
            assert future.result(0) is None


class TestFuture:
    def test_drop_amid_a_change_of_the_future(self) -> None:
        """A collector may drop a promise while this very thread looks at its future; the end comes afterwards."""
        promise, future = pair()
        with future._condition:
            del promise
            assert not future.done()

        assert future.wait(PATIENCE)
        with pytest.raises(BrokenPromiseError):
            future.result(0)

    def test_drop_amid_a_standard_wait(self) -> None:
        """As above, where the change is the standard library's own: without care its wait would never end."""
        promise, future = pair()
        held = [promise]
        del promise

        class Watch(list):
            """Where ``concurrent.futures.wait`` puts itself, after it saw that the future is pending."""

            def append(self, waiter):
                held.clear()
                super().append(waiter)

        future._waiters = Watch()
        waiting = Background(lambda: concurrent.futures.wait([future], PATIENCE / 2))
        assert waiting.result(PATIENCE).done == {future}

    def test_end_before_a_wait_is_registered(self) -> None:
        """A wait registers first and looks then."""
        promise, future = pair()

        class Watch(dict):
            def __setitem__(self, sleeper, _):
                promise.set_result(torch.arange(3))
                super().__setitem__(sleeper, _)

        future._sleepers = Watch()
        assert Background(future.wait).result(PATIENCE)
        assert torch.equal(future.result(0), torch.arange(3))

    def test_waits_leave_nothing(self) -> None:
        promise, future = pair()
        for _ in range(20):
            assert not future.wait(0.0001)
            with pytest.raises(StoreTimeoutError):
                future.result(0)

        assert not future._sleepers
        waiting = Background(future.result)
        asleep(waiting)
        assert len(future._sleepers) == 1
        promise.set_result(None)
        waiting.result(PATIENCE)
        assert not future._sleepers

    @pytest.mark.parametrize("timeout", [1e12, float("inf")])
    def test_timeout_without_end(self, timeout: float) -> None:
        promise, future = pair()
        waiting = Background(lambda: future.result(timeout))
        asleep(waiting)
        promise.set_result(None)
        assert waiting.result(PATIENCE) is None

    def test_settle_twice_keeps_the_first(self) -> None:
        def failed(text: str) -> ValueError:
            try:
                raise ValueError(text)
            except ValueError as error:
                return error

        future = TensorFuture("promise 0")
        assert future.settle(Outcome(error=ValueError("first")))
        assert not future.settle(Outcome(torch.arange(3)))
        assert not future.settle(Outcome(error=failed("second")))
        with pytest.raises(ValueError, match="first") as raised:
            future.result(0)

        assert "failed" not in [frame.name for frame in traceback.extract_tb(raised.value.__traceback__)]

    def test_callback_sees_the_end(self) -> None:
        """Also when it asks from the thread that sets, in the middle of the set."""
        promise, future = pair()
        seen: list[object] = []
        future.add_done_callback(lambda done: seen.append(done.result(0)))
        future.add_done_callback(lambda done: seen.append(done.wait()))
        promise.set_result(torch.arange(3))
        assert torch.equal(seen[0], torch.arange(3)) and seen[1] is True

    def test_callback_may_drop_another_promise(self) -> None:
        (first, one), (second, other) = pair(), pair()
        held = [second]
        del second
        one.add_done_callback(lambda _: held.clear())
        first.set_result(None)
        with pytest.raises(BrokenPromiseError):
            other.result(PATIENCE)

    def test_snapshot_is_what_result_gives(self) -> None:
        """asyncio reads it from Python 3.14 on."""
        promise, future = pair()
        assert future._get_snapshot() == (False, False, None, None)
        promise.set_result(torch.arange(3))
        done, cancelled, result, error = future._get_snapshot()
        assert (done, cancelled, result.tolist(), error) == (True, False, [0, 1, 2], None)
        promise, future = pair()
        future.cancel()
        assert future._get_snapshot() == (True, True, None, None)
        promise, future = pair()
        promise.set_exception(error := ValueError())
        assert future._get_snapshot() == (True, False, None, error)

    def test_repr_says_how_it_stands(self) -> None:
        promise, future = pair()
        assert repr(future) == f"<TensorFuture of {future.label}: pending>"
        promise.set_exception(ValueError())
        assert repr(future).endswith(": failed with ValueError>")
        promise, future = pair()
        promise.set_result(None)
        assert repr(future).endswith(": there>")
        promise, future = pair()
        future.cancel()
        assert repr(future).endswith(": cancelled>")

    def test_timeout_says_whose_result_is_late(self) -> None:
        promise, future = pair()
        with pytest.raises(StoreTimeoutError, match=rf"{future.label}: no result after 0.01 s"):
            future.result(0.01)

        promise.set_result(None)


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
