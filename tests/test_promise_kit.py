"""The promise kit catches wrong backends: each with one mistake, each caught by the test that is for it."""

from __future__ import annotations

import asyncio
import pickle
import time

import pytest

from dtorch_core import (
    BackendContext,
    BackendSpec,
    ProtocolError,
    Support,
    TensorFuture,
    TensorPromise,
    hookimpl,
    register,
    unregister,
)
from dtorch_core.promise import Outcome
from dtorch_core.testing import DEVICES, run_kit


class Right(TensorPromise):
    """No mistake. Each wrong promise below changes one thing, in itself or in its future."""

    future_type: type[TensorFuture] = TensorFuture

    def __init__(self, ctx: BackendContext, home: Home, slot: Slot) -> None:
        self.home, self.slot = home, slot
        super().__init__(ctx, slot.future.label)

    def take_future(self):
        if self.slot.taken:
            raise ProtocolError(f"future() of {self.label}: it was taken already")

        self.slot.taken = True
        return self.slot.future

    def cancelled(self):
        return self.slot.future.cancelled()

    def deliver(self, outcome):
        self.slot.future.settle(outcome)

    def hand_over(self):
        token = f"token of {self.label}".encode()
        self.home.tokens[token] = self.slot
        return token


class Slot:
    def __init__(self, future: TensorFuture) -> None:
        self.future = future
        self.taken = False


class Home:
    """The factory of every backend here: ``promise_type`` says what it makes."""

    promise_type: type[Right] = Right

    def __init__(self, ctx: BackendContext) -> None:
        self.ctx = ctx
        self.count = 0
        self.tokens: dict[bytes, Slot] = {}

    def create(self):
        self.count += 1
        return self.promise_type(self.ctx, self, Slot(self.promise_type.future_type(f"promise {self.count}")))

    def attach(self, token):
        if token not in self.tokens:
            raise ProtocolError("no promise waits for this token")

        return self.promise_type(self.ctx, self, self.tokens.pop(token))


# What is brought


class SwallowsErrors(Right):
    def deliver(self, outcome):
        super().deliver(Outcome() if outcome.error is not None else outcome)


class HidesTypes(Right):
    def deliver(self, outcome):
        super().deliver(Outcome(outcome.tensor, error=outcome.error and RuntimeError(str(outcome.error))))


class GivesTheSameTensor(Right):
    class future_type(TensorFuture):
        def result(self, timeout=None):
            value = super().result(timeout)
            return self.__dict__.setdefault("kept", value)


class ChangesWhatItIsGiven(Right):
    def set_result(self, tensor, *, stream=None):
        super().set_result(tensor if tensor is None or tensor.is_leaf else tensor.detach_(), stream=stream)


class FlattensViews(Right):
    def deliver(self, outcome):
        tensor = outcome.tensor
        if tensor is not None and not tensor.is_contiguous():
            tensor = tensor.as_strided(tensor.shape, tensor.new_empty(tensor.shape).stride())

        super().deliver(Outcome(tensor, error=outcome.error))


class KeepsTheGradient(Right):
    def set_result(self, tensor, *, stream=None):
        super().set_result(tensor, stream=stream)
        self.slot.future.given = tensor

    class future_type(TensorFuture):
        def result(self, timeout=None):
            return super().result(timeout) if self.given is None else self.given


class TakesAnything(Right):
    def set_result(self, tensor, *, stream=None):
        with self._use("set_result", "it has been set already"):
            super().deliver(Outcome(tensor if tensor is None or hasattr(tensor, "detach") else None))


class BringsTheLatest(Right):
    def deliver(self, outcome):
        type(self).latest = outcome
        super().deliver(outcome)

    class future_type(TensorFuture):
        def result(self, timeout=None):
            super().result(timeout)
            tensor = BringsTheLatest.latest.tensor
            return None if tensor is None else tensor.detach()


class BringsOnce(Right):
    class future_type(TensorFuture):
        def result(self, timeout=None):
            value = super().result(timeout)
            return None if self.__dict__.setdefault("given", []).append(1) or len(self.given) > 1 else value


class GrowsTracebacks(Right):
    class future_type(TensorFuture):
        def result(self, timeout=None):
            error = self.exception(timeout)
            if error is not None:
                raise error

            return super().result(timeout)


# Once


class SetsAgain(Right):
    def set_result(self, tensor, *, stream=None):
        self._right = None
        super().set_result(tensor, stream=stream)


class SetsWithoutALock(Right):
    def set_result(self, tensor, *, stream=None):
        if self._right is not None:
            raise ProtocolError("it has been set already")

        time.sleep(0.002)
        self.deliver(Outcome(None if tensor is None else tensor.detach()))
        self._right = "it has been set already"


class GivesManyFutures(Right):
    def take_future(self):
        return self.slot.future


# Waiting


class LosesWhatIsLate(Right):
    class future_type(TensorFuture):
        def result(self, timeout=None):
            if not self.wait(timeout):
                self.settle(Outcome())

            return super().result(timeout)


class ForgetsToWake(Right):
    class future_type(TensorFuture):
        def wait(self, timeout=None):
            if not self.done():
                time.sleep(min(timeout or 1e9, 3.0))

            return self.done()


class RaisesAnotherTimeout(Right):
    class future_type(TensorFuture):
        def result(self, timeout=None):
            if not self.wait(timeout):
                raise RuntimeError("late")

            return super().result(timeout)


class ForgetsTheRun(Right):
    class future_type(TensorFuture):
        def _unless_aborted(self, sleeper):
            return False

        def result(self, timeout=None):
            return super().result(4.0 if timeout is None else timeout)


# Ending


class IsNeverBroken(Right):
    def __del__(self):
        pass


class BreaksSilently(Right):
    def deliver(self, outcome):
        super().deliver(Outcome() if "dropped" in str(outcome.error) else outcome)


class KeepsItself(Right):
    everyone: list[TensorPromise] = []

    def __init__(self, *args):
        super().__init__(*args)
        self.everyone.append(self)


class IgnoresCancel(Right):
    def cancelled(self):
        return False


class FailsTheWorkerOfACancelledFuture(Right):
    def set_result(self, tensor, *, stream=None):
        super().set_result(tensor, stream=stream)
        if self.cancelled():
            raise RuntimeError("nobody wants it")


class TellsNoStandardWait(Right):
    class future_type(TensorFuture):
        def cancel(self):
            self._told = True
            return super().cancel()


# Handing over


class DropsWhatItHandedOver(Right):
    def hand_over(self):
        token = super().hand_over()
        self.given = True
        return token

    def __del__(self):
        if "given" in self.__dict__:
            self._right = None

        super().__del__()


# Awaiting


class AwaitPolls(Right):
    class future_type(TensorFuture):
        def __await__(self):
            while not self.done():
                yield from asyncio.sleep(0.005).__await__()

            return self.result(0)


class AwaitSpins(Right):
    class future_type(TensorFuture):
        def __await__(self):
            while not self.done():
                yield

            return self.result(0)


class AwaitTakesAThread(Right):
    class future_type(TensorFuture):
        def __await__(self):
            return (yield from asyncio.to_thread(self.result).__await__())


class AwaitBlocksTheLoop(Right):
    class future_type(TensorFuture):
        def __await__(self):
            return self.result(3.0)
            yield


class AwaitIsNotShielded(Right):
    class future_type(TensorFuture):
        def __await__(self):
            return (yield from asyncio.wrap_future(self).__await__())


class AwaitReportsWhatWasLeft(Right):
    class future_type(TensorFuture):
        def __await__(self):
            return (yield from asyncio.shield(asyncio.wrap_future(self)).__await__())


class AwaitIsNotWokenFromOutside(Right):
    class future_type(TensorFuture):
        def __await__(self):
            arrived = asyncio.get_running_loop().create_future()
            self.add_done_callback(lambda _: arrived.done() or arrived.set_result(None))
            yield from arrived
            return self.result(0)


class AwaitLeavesItsWaiter(Right):
    class future_type(TensorFuture):
        def __await__(self):
            loop = asyncio.get_running_loop()
            arrived = loop.create_future()
            self.add_done_callback(lambda _: loop.call_soon_threadsafe(lambda: arrived.done() or arrived.set_result(0)))
            yield from arrived
            return self.result(0)


class AwaitMindsAClosedLoop(Right):
    class future_type(TensorFuture):
        def __await__(self):
            loop = asyncio.get_running_loop()
            self.__dict__.setdefault("loops", []).append(loop)
            return (yield from super().__await__())

        def settle(self, outcome):
            while self.__dict__.get("loops"):
                self.loops.pop().call_soon_threadsafe(lambda: None)

            return super().settle(outcome)


CAUGHT_BY: dict[type[Right], str] = {
    SwallowsErrors: "test_error_keeps_its_type",
    HidesTypes: "test_error_keeps_its_type",
    GivesTheSameTensor: "test_result_is_each_callers_own_object",
    ChangesWhatItIsGiven: "test_requires_grad_arrives_detached",
    FlattensViews: "test_layout_arrives_with_its_values",
    KeepsTheGradient: "test_requires_grad_arrives_detached",
    TakesAnything: "test_unsupported_value_is_refused_in_the_caller",
    BringsTheLatest: "test_many_promises_do_not_mix",
    BringsOnce: "test_result_again_is_the_same_value",
    GrowsTracebacks: "test_error_raised_often_does_not_grow",
    SetsAgain: "test_second_set_is_refused",
    SetsWithoutALock: "test_set_by_many_threads_is_of_one",
    GivesManyFutures: "test_future_is_given_once",
    LosesWhatIsLate: "test_timeout_can_be_repeated",
    ForgetsToWake: "test_value_wakes_a_consumer_that_waits",
    RaisesAnotherTimeout: "test_timeout_can_be_repeated",
    ForgetsTheRun: "test_failure_of_another_rank_ends_the_wait",
    IsNeverBroken: "test_dropped_promise_breaks_its_future",
    BreaksSilently: "test_dropped_promise_breaks_its_future",
    KeepsItself: "test_dropped_promise_breaks_its_future",
    IgnoresCancel: "test_cancel_ends_the_future_and_tells_the_promise",
    FailsTheWorkerOfACancelledFuture: "test_cancel_ends_the_future_and_tells_the_promise",
    TellsNoStandardWait: "test_concurrent_wait_sees_every_end",
    DropsWhatItHandedOver: "test_hand_over_and_drop_changes_nothing",
    AwaitPolls: "test_await_does_not_poll",
    AwaitSpins: "test_await_does_not_poll",
    AwaitTakesAThread: "test_await_does_not_poll",
    AwaitBlocksTheLoop: "test_await_leaves_the_loop_to_others",
    AwaitIsNotShielded: "test_await_that_is_given_up_loses_nothing",
    AwaitReportsWhatWasLeft: "test_await_that_was_left_reports_nothing",
    AwaitIsNotWokenFromOutside: "test_await_gives_the_value",
    AwaitLeavesItsWaiter: "test_await_that_is_given_up_leaves_nothing",
    AwaitMindsAClosedLoop: "test_await_in_a_loop_that_was_closed",
}
"""Each mistake and the test that has to fail of it."""


class AttachesAgain(Home):
    """A token works as often as one likes."""

    def attach(self, token):
        if token not in self.tokens:
            raise ProtocolError("no promise waits for this token")

        return self.promise_type(self.ctx, self, self.tokens[token])


class UnpicklesTokens(Home):
    """Trusts what it is given."""

    def attach(self, token):
        return super().attach(pickle.loads(token))


def probe(topology: object) -> Support:
    return Support.yes(1, "the tests want it so") if len(topology) == 1 else Support.no("it is one thread's")


def failed(home: type[Home], *tests: str, patience: float = 1.0) -> set[str]:
    """The kit's ``tests``, or all, that fail on the backend that ``home`` makes."""

    class Plugin:
        @hookimpl
        def dtorch_register_promises(self):
            return [BackendSpec("seeded", f"{__name__}:current", probe, capabilities=frozenset({"cpu", "await"}))]

    globals()["current"] = home
    register(Plugin(), name="seeded")
    try:
        outcomes = run_kit("promise", "seeded", select=tests, patience=patience)
    finally:
        unregister("seeded")

    names = {outcome.test.partition("[")[0] for outcome in outcomes if outcome.state != "skipped"}
    assert names >= set(tests or CAUGHT_BY.values()), "not run"
    return {outcome.test.partition("[")[0] for outcome in outcomes if outcome.state == "failed"}


@pytest.fixture(autouse=True)
def nothing_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtorch_core._promise_backends._built", {})


@pytest.mark.skipif("cpu" not in DEVICES, reason="the wrong backends are for the CPU")
class TestKit:
    @pytest.mark.parametrize("wrong", CAUGHT_BY, ids=lambda wrong: wrong.__name__)
    def test_kit_catches(self, wrong: type[Right]) -> None:
        home = type("Wrong", (Home,), {"promise_type": wrong})
        assert failed(home, CAUGHT_BY[wrong]) == {CAUGHT_BY[wrong]}

    @pytest.mark.parametrize(
        ("home", "test"),
        [
            (AttachesAgain, "test_token_is_attached_once"),
            (UnpicklesTokens, "test_token_that_is_none_is_refused"),
        ],
    )
    def test_kit_catches_wrong_tokens(self, home: type[Home], test: str) -> None:
        assert failed(home, test) == {test}

    def test_kit_passes_what_is_right(self) -> None:
        """The same tests, and all others, on the backend without the mistakes; but its slot keeps its future."""
        assert failed(Home, patience=20.0) == {"test_value_is_let_go_with_its_future"}
