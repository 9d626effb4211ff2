"""The rules of promises that the core keeps for every backend, on the smallest backend there is."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path

import pytest
import torch

from dtorch_core import (
    BrokenPromiseError,
    GetTensorOp,
    ProtocolError,
    TensorFuture,
    UnsupportedOperationError,
    attach_promise,
    make_promise,
)
from dtorch_core.testing import PromiseTests

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import plain_promises
    from plain_promises import Plain, Plains, installed, pair

plain = plain_promises.plain


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
