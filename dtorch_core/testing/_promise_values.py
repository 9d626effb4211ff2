"""What a promise brings: any strided dense tensor as it is, or nothing; once, and to each who asks."""

from __future__ import annotations

import array
import gc
import random
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from dtorch_core.errors import NoBackendError, ProtocolError, UnsupportedTensorError
from dtorch_core.promise import GetTensorOp, TensorFuture, TensorPromise, make_promise
from dtorch_core.testing._harness import Background, asleep, undeclared
from dtorch_core.testing._layouts import LAYOUTS
from dtorch_core.testing._promise_base import PromiseConformance
from dtorch_core.testing._store_base import HUGE, coded, same
from dtorch_core.testing._subclasses import loud

SETS: dict[str, Callable[[TensorPromise], None]] = {
    "value": lambda promise: promise.set_result(coded(9)),
    "void": lambda promise: promise.set_result(None),
    "error": lambda promise: promise.set_exception(ValueError("second")),
}
EACH_SET = pytest.mark.parametrize("again", SETS.values(), ids=SETS)


class ValueTests(PromiseConformance):
    """The value arrives, whole and once."""

    def test_promise_says_who_carries_it(self) -> None:
        promise, future = self.pair()
        assert (promise.backend, future.backend) == (self.backend, self.backend)
        assert promise.selection.chosen == self.backend
        assert future.selection is promise.selection
        promise.set_result(None)

    def test_value_set_before_it_is_awaited(self, device: str) -> None:
        promise, future = self.pair(device)
        assert not future.done()
        promise.set_result(coded(1, (3, 5), device))
        got = future.result(self.patience)
        assert got is not None and same(got, coded(1, (3, 5), device))
        assert future.done() and not future.cancelled()
        assert future.exception(0) is None

    def test_value_wakes_a_consumer_that_waits(self, device: str) -> None:
        promise, future = self.pair(device)
        consumer = Background(lambda: future.result(self.patience))
        asleep(consumer)
        promise.set_result(coded(2, (4,), device))
        got = consumer.result(self.patience / 2)  # long before the wait's own deadline
        assert got is not None and same(got, coded(2, (4,), device))

    def test_value_set_before_the_future_is_asked_for(self, device: str) -> None:
        promise = self.promise(device)
        promise.set_result(coded(3, (4,), device))
        got = promise.future().result(self.patience)
        assert got is not None and same(got, coded(3, (4,), device))

    def test_value_outlives_what_the_producer_held(self, device: str) -> None:
        """The producer lets go of tensor and promise; the memory is not given to anybody else."""
        promise, future = self.pair(device)
        promise.set_result(coded(4, (1000,), device))
        del promise
        gc.collect()
        others = [coded(tag, (1000,), device) for tag in range(5, 15)]
        got = future.result(self.patience)
        assert got is not None and same(got, coded(4, (1000,), device))
        assert same(others[-1], coded(14, (1000,), device))

    def test_void_brings_none(self) -> None:
        promise, future = self.pair()
        promise.set_result(None)
        assert future.wait(self.patience)
        assert future.result(0) is None
        assert future.exception(0) is None

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_layout_arrives_with_its_values(self, layout: str, device: str) -> None:
        promise, future = self.pair(device)
        sent = LAYOUTS[layout]().to(device)
        promise.set_result(sent)
        got = future.result(self.patience)
        assert got is not None and same(got, sent), f"got {got}, not {sent}"
        assert same(got.clone(), LAYOUTS[layout]().to(device))

    def test_large_value_arrives_whole(self, device: str) -> None:
        promise, future = self.pair(device)
        promise.set_result(coded(1, HUGE, device))
        got, wanted = future.result(self.patience), coded(1, HUGE, device)
        assert got is not None and got.shape == wanted.shape
        assert same(got, wanted), f"{(got != wanted).sum()} of {wanted.numel()} elements are wrong"

    @pytest.mark.parametrize(
        "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
    )
    def test_dtype_arrives(self, dtype: torch.dtype, device: str) -> None:
        promise, future = self.pair(device)
        promise.set_result(coded(0, (6,), device).remainder(2).to(dtype))
        got = future.result(self.patience)
        assert got is not None and same(got, coded(0, (6,), device).remainder(2).to(dtype))

    def test_subclass_arrives_as_the_plain_tensor_that_it_is(self, device: str) -> None:
        promise, future = self.pair(device)
        promise.set_result(loud(coded(1, (3, 5), device)))
        got = future.result(self.patience)
        assert type(got) is Tensor
        assert same(got, coded(1, (3, 5), device))

    @pytest.mark.parametrize("parameter", [False, True], ids=["not a leaf", "parameter"])
    def test_requires_grad_arrives_detached(self, parameter: bool, device: str) -> None:
        promise, future = self.pair(device)
        leaf = coded(0, device=device).requires_grad_()
        sent = torch.nn.Parameter(leaf) if parameter else leaf * 1
        before = sent.requires_grad, sent.grad_fn, sent.data_ptr()
        promise.set_result(sent)
        got = future.result(self.patience)
        assert got is not None and same(got, coded(0, device=device))
        assert (type(got), got.requires_grad, got.grad_fn) == (Tensor, False, None)
        assert (sent.requires_grad, sent.grad_fn, sent.data_ptr()) == before, "the producer's tensor was changed"

    def test_result_again_is_the_same_value(self, device: str) -> None:
        promise, future = self.pair(device)
        promise.set_result(coded(5, (2, 3), device))
        for _ in range(3):
            got = future.result(0)
            assert got is not None and same(got, coded(5, (2, 3), device))

    def test_result_is_each_callers_own_object(self, device: str) -> None:
        """To reshape one in place changes no other, and not the producer's."""
        promise, future = self.pair(device)
        sent = coded(6, (2, 3), device)
        promise.set_result(sent)
        first, second = future.result(self.patience), future.result(self.patience)
        assert first is not None and second is not None
        first.t_()
        first.unsqueeze_(0)
        assert same(second, coded(6, (2, 3), device))
        assert same(sent, coded(6, (2, 3), device))
        third = future.result(self.patience)
        assert third is not None and same(third, coded(6, (2, 3), device))

    def test_result_for_many_consumers(self, device: str) -> None:
        promise, future = self.pair(device)
        consumers = [Background(lambda: future.result(self.patience)) for _ in range(8)]
        for consumer in consumers:
            asleep(consumer)

        promise.set_result(coded(7, (4,), device))
        for consumer in consumers:
            got = consumer.result(self.patience)
            assert got is not None and same(got, coded(7, (4,), device))

    def test_many_promises_do_not_mix(self) -> None:
        """200 of them, fulfilled by four threads in another order than they are read."""
        pairs = [self.pair() for _ in range(200)]
        order = list(range(200))
        random.Random(0).shuffle(order)

        def work(start: int) -> None:
            for index in order[start::4]:
                pairs[index][0].set_result(coded(index, device=self.home))

        def read() -> None:
            for index, (_, future) in enumerate(pairs):
                got = future.result(self.patience)
                assert got is not None and same(got, coded(index, device=self.home))

        assert self.together(read, *(partial(work, start) for start in range(4))) == [None] * 5

    def test_value_is_let_go_with_its_future(self) -> None:
        """A promise that has been set holds no tensor: its worker may keep it for long."""
        if self.home != "cpu":
            pytest.skip("the memory of a CPU tensor is watched")

        memory = array.array("f", range(64))
        watch = weakref.ref(memory)
        promise, future = self.pair()
        promise.set_result(torch.frombuffer(memory, dtype=torch.float32))
        got = future.result(self.patience)
        assert got is not None and same(got, torch.arange(64, dtype=torch.float32))
        del memory, got, future
        gc.collect()
        assert watch() is None
        assert not promise.cancelled()

    # Once

    def test_future_is_given_once(self) -> None:
        promise, future = self.pair()
        with pytest.raises(ProtocolError):
            promise.future()

        promise.set_result(coded(0, device=self.home))
        with pytest.raises(ProtocolError):
            promise.future()

        got = future.result(self.patience)
        assert got is not None and same(got, coded(0, device=self.home))

    @EACH_SET
    @pytest.mark.parametrize("first", ["value", "void", "error"])
    def test_second_set_is_refused(self, first: str, again: Callable[[TensorPromise], None]) -> None:
        promise, future = self.pair()
        if first == "error":
            promise.set_exception(KeyError("first"))
        else:
            promise.set_result(coded(1, device=self.home) if first == "value" else None)

        for _ in range(2):
            with pytest.raises(ProtocolError):
                again(promise)

        if first == "error":
            with pytest.raises(KeyError, match="first"):
                future.result(self.patience)

            return

        got = future.result(self.patience)
        assert got is None if first == "void" else got is not None and same(got, coded(1, device=self.home))

    def test_set_by_many_threads_is_of_one(self) -> None:
        for _ in range(50):
            promise, future = self.pair()
            raised = self.together(*(partial(promise.set_result, coded(tag, device=self.home)) for tag in range(3)))
            winners = [tag for tag, error in enumerate(raised) if error is None]
            assert len(winners) == 1, raised
            assert sum(isinstance(error, ProtocolError) for error in raised) == 2, raised
            got = future.result(self.patience)
            assert got is not None and same(got, coded(winners[0], device=self.home))

    def test_future_by_many_threads_is_of_one(self) -> None:
        for _ in range(50):
            promise = self.promise()
            given = self.together(
                promise.future,
                promise.future,
                lambda: promise.set_result(coded(1, device=self.home)),  # noqa: B023
            )[:2]
            (future,) = (each for each in given if isinstance(each, TensorFuture))
            assert sum(isinstance(each, ProtocolError) for each in given) == 1, given
            got = future.result(self.patience)
            assert got is not None and same(got, coded(1, device=self.home))

    # Refused in the caller

    @pytest.mark.parametrize("what", ["sparse", "meta", "list", "number"])
    def test_unsupported_value_is_refused_in_the_caller(self, what: str) -> None:
        promise, future = self.pair()
        values: dict[str, Callable[[], object]] = {
            "sparse": lambda: torch.eye(3).to_sparse(),
            "meta": lambda: torch.empty(3, device="meta"),
            "list": lambda: [1.0, 2.0],
            "number": lambda: 3,
        }
        with pytest.raises(UnsupportedTensorError):
            promise.set_result(values[what]())  # type: ignore[arg-type]

        assert not future.done()
        promise.set_result(coded(8, device=self.home))  # it is still unset
        got = future.result(self.patience)
        assert got is not None and same(got, coded(8, device=self.home))

    @undeclared("multi_process")
    def test_reach_of_a_process_is_refused(self) -> None:
        with pytest.raises(NoBackendError, match=self.backend):
            make_promise(reach="process", backend=self.backend)

    # The operator

    def test_operator_passes_its_tensor_on(self, device: str) -> None:
        promise, future = self.pair(device)
        tensor = coded(1, (4,), device)
        operator = GetTensorOp(promise)
        assert operator(tensor) is tensor
        got = future.result(self.patience)
        assert got is not None and same(got, coded(1, (4,), device))
        with pytest.raises(ProtocolError):
            operator(tensor)

    def test_operator_does_not_mind_a_cancelled_future(self) -> None:
        promise, future = self.pair()
        future.cancel()
        tensor = coded(1, device=self.home)
        assert GetTensorOp(promise)(tensor) is tensor
