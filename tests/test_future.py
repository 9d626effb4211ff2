"""The rules of futures that the core keeps for every backend, on the smallest backend there is."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import traceback
from pathlib import Path

import pytest
import torch

from dtorch_core import BrokenPromiseError, ProtocolError, StoreTimeoutError, TensorFuture
from dtorch_core.promise import Outcome
from dtorch_core.testing import Background, asleep

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import plain_promises
    from plain_promises import pair

plain = plain_promises.plain

PATIENCE = 20.0


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


async def awaited(future):
    return await future


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    "call",
    [
        lambda future: future.result(PATIENCE),
        lambda future: future.exception(PATIENCE),
        lambda future: future.wait(PATIENCE),
        lambda future: asyncio.run(awaited(future)),
        lambda future: future.cancel(),
    ],
    ids=["result", "exception", "wait", "await", "cancel"],
)
def test_forked_child_is_refused(call) -> None:
    """Its copy is one that nobody ends. What has ended before is there."""
    promise, future = pair()
    over, ended = pair()
    over.set_result(torch.arange(3))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing was raised"
        try:
            said = f"{ended.result(0).tolist()}; "
            call(future)
        except ProtocolError as error:
            said += str(error)
        except BaseException as error:
            said += repr(error)
        finally:
            os.write(writing, said.encode())
            os._exit(0)

    os.close(writing)
    with open(reading, "rb") as line:
        said = line.read().decode()

    os.waitpid(child, 0)
    assert said.startswith("[0, 1, 2]; ")
    assert f"of {future.label}: its future is in pid {os.getpid()}, and this is pid {child}, forked from it" in said
    promise.set_result(torch.ones(1))
    assert future.result(PATIENCE).tolist() == [1]
