"""Handing over the right to set: by token and by pickle, once; to this process, or to another one."""

from __future__ import annotations

import base64
import copy
import gc
import json
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from dtorch_core.errors import BrokenPromiseError, DtorchError, NoBackendError, ProtocolError
from dtorch_core.promise import TensorPromise, attach_promise
from dtorch_core.testing._harness import Background, asleep
from dtorch_core.testing._promise_base import PromiseConformance
from dtorch_core.testing._promise_values import EACH_SET
from dtorch_core.testing._store_base import coded, same

WAYS: dict[str, Callable[[TensorPromise], TensorPromise]] = {
    "token": lambda promise: attach_promise(promise.serialize()),
    "pickle": lambda promise: pickle.loads(pickle.dumps(promise)),
}
EACH_WAY = pytest.mark.parametrize("hand_over", WAYS.values(), ids=WAYS)


def _changed(original: bytes, **fields: object) -> bytes:
    return json.dumps({**json.loads(original), **fields}).encode()


class HandOverTests(PromiseConformance):
    """One holder at a time."""

    @EACH_WAY
    def test_hand_over_and_drop_changes_nothing(
        self, hand_over: Callable[[TensorPromise], TensorPromise], device: str
    ) -> None:
        promise, future = self.pair(device)
        worker = hand_over(promise)
        del promise
        gc.collect()
        assert not future.done()
        assert worker.backend == self.backend
        Background(lambda: worker.set_result(coded(1, (3,), device))).result(self.patience)
        got = future.result(self.patience)
        assert got is not None and same(got, coded(1, (3,), device))

    @EACH_WAY
    def test_hand_over_of_a_hand_over(self, hand_over: Callable[[TensorPromise], TensorPromise]) -> None:
        promise, future = self.pair()
        for _ in range(5):
            promise = hand_over(promise)

        promise.set_exception(ValueError("from the last one"))
        with pytest.raises(ValueError, match="from the last one"):
            future.result(self.patience)

    @EACH_SET
    @EACH_WAY
    def test_hand_over_takes_the_right_to_set(
        self, hand_over: Callable[[TensorPromise], TensorPromise], again: Callable[[TensorPromise], None]
    ) -> None:
        promise, future = self.pair()
        worker = hand_over(promise)
        calls: list[Callable[[], Any]] = [promise.serialize, lambda: pickle.dumps(promise), lambda: again(promise)]
        for call in calls:
            with pytest.raises(ProtocolError):
                call()

        assert not future.done()
        worker.set_result(coded(1, device=self.home))
        got = future.result(self.patience)
        assert got is not None and same(got, coded(1, device=self.home))
        with pytest.raises(ProtocolError):
            again(worker)

    def test_hand_over_of_what_is_set_is_refused(self) -> None:
        promise, future = self.pair()
        promise.set_result(coded(1, device=self.home))
        with pytest.raises(ProtocolError):
            promise.serialize()

        with pytest.raises(ProtocolError):
            pickle.dumps(promise)

        got = future.result(self.patience)
        assert got is not None and same(got, coded(1, device=self.home))

    def test_hand_over_then_future(self) -> None:
        """The future stays with the one who made the promise, also when it is asked for later."""
        promise = self.promise()
        worker = attach_promise(promise.serialize())
        future = promise.future()
        worker.set_result(coded(1, device=self.home))
        got = future.result(self.patience)
        assert got is not None and same(got, coded(1, device=self.home))

    @EACH_WAY
    def test_hand_over_and_drop_by_the_new_holder(self, hand_over: Callable[[TensorPromise], TensorPromise]) -> None:
        held = [self.promise()]
        future = held[0].future()
        consumer = Background(lambda: future.result(self.patience))
        asleep(consumer)
        held[0] = hand_over(held[0])
        gc.collect()
        assert not future.done()
        held.clear()
        gc.collect()
        with pytest.raises(BrokenPromiseError):
            consumer.result(self.patience)

    @EACH_WAY
    def test_hand_over_then_cancel(self, hand_over: Callable[[TensorPromise], TensorPromise]) -> None:
        promise, future = self.pair()
        worker = hand_over(promise)
        assert not worker.cancelled()
        assert future.cancel()
        assert worker.cancelled()
        worker.set_result(coded(1, device=self.home))
        assert future.cancelled()

    def test_cancel_then_hand_over(self) -> None:
        """A worker that comes late finds a promise that nobody waits for, not an error."""
        promise, future = self.pair()
        assert future.cancel()
        worker = attach_promise(promise.serialize())
        assert worker.cancelled()
        worker.set_result(coded(1, device=self.home))
        assert future.cancelled()

    def test_hand_over_against_set_is_of_one(self) -> None:
        for turn in range(50):
            promise, future = self.pair()
            token, raised = self.together(
                promise.serialize,
                lambda: promise.set_result(coded(turn, device=self.home)),  # noqa: B023
            )
            if isinstance(token, bytes):
                assert isinstance(raised, ProtocolError)
                attach_promise(token).set_result(coded(turn, device=self.home))
            else:
                assert isinstance(token, ProtocolError) and raised is None

            got = future.result(self.patience)
            assert got is not None and same(got, coded(turn, device=self.home))

    def test_token_is_attached_once(self) -> None:
        for _ in range(20):
            promise, future = self.pair()
            token = promise.serialize()
            results = self.together(*([lambda: attach_promise(token)] * 3))  # noqa: B023
            (worker,) = (result for result in results if isinstance(result, TensorPromise))
            assert sum(isinstance(result, ProtocolError) for result in results) == 2, results
            worker.set_result(coded(1, device=self.home))
            got = future.result(self.patience)
            assert got is not None and same(got, coded(1, device=self.home))
            with pytest.raises(ProtocolError):
                attach_promise(token)

    def test_token_is_small_text_that_names_the_backend(self) -> None:
        promise, future = self.pair()
        token = promise.serialize()
        assert type(token) is bytes
        assert json.loads(token)["backend"] == self.backend
        assert len(token) < 4096
        attach_promise(token).set_result(None)
        assert future.result(self.patience) is None

    def test_token_that_is_none_is_refused(self) -> None:
        """Whatever the bytes are, nothing is executed and the error is one of ours."""
        promise, future = self.pair()
        token = promise.serialize()
        inner = json.loads(token)["token"]
        for wrong in (
            b"",
            b"\x00\xff",
            b"[1, 2]",
            b"{}",
            b"[" * 100_000,
            token[:-10],
            _changed(token, version=99),
            _changed(token, token="not base64!"),
            _changed(token, token=7),
            _changed(token, backend=None),
            _changed(token, token=base64.b64encode(b"what this backend never made").decode()),
            _changed(token, token=inner[:-4]),
        ):
            with pytest.raises(DtorchError):
                attach_promise(wrong)

        with pytest.raises(ProtocolError):
            attach_promise(pickle.dumps(_Opener()))

        with pytest.raises(TypeError):
            attach_promise("a text")  # type: ignore[arg-type]

        assert not _opened
        attach_promise(token).set_result(None)  # the right one still works
        assert future.result(self.patience) is None

    def test_token_of_a_backend_that_is_not_installed(self) -> None:
        promise, future = self.pair()
        token = promise.serialize()
        with pytest.raises(NoBackendError, match="nobody_has_this"):
            attach_promise(_changed(token, backend="nobody_has_this"))

        attach_promise(token).set_result(None)
        assert future.result(self.patience) is None

    def test_copy_is_refused(self) -> None:
        promise, future = self.pair()
        for call in (copy.copy, copy.deepcopy):
            with pytest.raises(ProtocolError):
                call(promise)

        with pytest.raises(TypeError):
            pickle.dumps(future)

        promise.set_result(coded(1, device=self.home))  # the right to set is still here
        got = future.result(self.patience)
        assert got is not None and same(got, coded(1, device=self.home))


_opened: list[int] = []


class _Opener:
    """Shows whether anybody unpickles it."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _open, (os.getpid(),)


def _open(pid: int) -> None:
    _opened.append(pid)
