"""Promises of CUDA tensors: the order of streams, without a wait of the host."""

from __future__ import annotations

import asyncio
import time
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from dtorch_core.errors import UnsupportedOperationError
from dtorch_core.promise import GetTensorOp, TensorFuture
from dtorch_core.testing._harness import CUDA, Background, requires, undeclared
from dtorch_core.testing._promise_base import PromiseConformance
from dtorch_core.testing._store_base import coded, same

SLOW = 0.2
"""Seconds that the slow kernel takes."""

AT_ONCE = SLOW / 2
"""Seconds that a call may take which does not wait for the slow kernel."""


@cache
def _cycles_per_second() -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)  # the first one loads the kernel
    begin.record()
    torch.cuda._sleep(50_000_000)
    end.record()
    end.synchronize()
    return 50_000_000 / (float(begin.elapsed_time(end)) / 1000)


def written_late(tag: int, stream: torch.cuda.Stream) -> Tensor:
    """A tensor that holds wrong values until ``stream`` has been busy for :data:`SLOW` seconds."""
    cycles = int(SLOW * _cycles_per_second())
    wanted = coded(tag, (1000,), CUDA)
    tensor = torch.full((1000,), -1.0, device=CUDA)
    torch.cuda.synchronize(CUDA)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(cycles)
        tensor.copy_(wanted)

    # Both are used by another stream than the one that they were allocated on.
    tensor.record_stream(stream)
    wanted.record_stream(stream)
    return tensor


class StreamTests(PromiseConformance):
    """The value carries its event."""

    def fulfilled_late(self, tag: int) -> tuple[TensorFuture, torch.cuda.Stream]:
        """A future that is done while the stream that writes its value is still busy."""
        promise, future = self.pair(CUDA)
        stream = torch.cuda.Stream(CUDA)
        tensor = written_late(tag, stream)
        began = time.monotonic()
        promise.set_result(tensor, stream=stream)
        assert time.monotonic() - began < AT_ONCE, "set_result waited for the stream"
        assert future.wait(AT_ONCE), "done() means that the value is there, not that it is computed"
        assert not stream.query()
        return future, stream

    @requires("cuda")
    def test_result_orders_the_callers_stream(self) -> None:
        future, busy = self.fulfilled_late(1)
        with torch.cuda.stream(torch.cuda.Stream(CUDA)):
            got = future.result(0)
            assert got is not None
            copy = got.clone()
            assert not busy.query(), "result() waited for the stream"
            assert same(copy.cpu(), coded(1, (1000,)))

    @requires("cuda")
    def test_result_orders_each_callers_stream(self) -> None:
        """Several consumers, each with a stream of its own, one after the other and again."""
        future, busy = self.fulfilled_late(1)
        copies = []
        for _ in range(4):
            with torch.cuda.stream(torch.cuda.Stream(CUDA)):
                got = future.result(0)
                assert got is not None
                copies.append(got.clone())

        assert not busy.query(), "result() waited for the stream"
        torch.cuda.synchronize(CUDA)
        for copy in copies:
            assert same(copy.cpu(), coded(1, (1000,)))

    @requires("cuda")
    def test_set_takes_the_current_stream(self) -> None:
        promise, future = self.pair(CUDA)
        stream = torch.cuda.Stream(CUDA)
        tensor = written_late(2, stream)
        with torch.cuda.stream(stream):
            promise.set_result(tensor)

        def read() -> Tensor:
            with torch.cuda.stream(torch.cuda.Stream(CUDA)):
                got = future.result(self.patience)
                assert got is not None
                return got.cpu()

        assert same(Background(read).result(self.patience), coded(2, (1000,)))

    @requires("cuda")
    def test_operator_never_blocks_the_worker(self) -> None:
        promise, future = self.pair(CUDA)
        stream = torch.cuda.Stream(CUDA)
        tensor = written_late(3, stream)
        operator = GetTensorOp(promise)
        with torch.cuda.stream(stream):
            began = time.monotonic()
            assert operator(tensor) is tensor
            assert time.monotonic() - began < AT_ONCE
            assert not stream.query()

        got = future.result(self.patience)
        assert got is not None and same(got.cpu(), coded(3, (1000,)))

    @requires("cuda", "await")
    def test_await_orders_the_stream_of_its_task(self) -> None:
        future, busy = self.fulfilled_late(4)

        async def main() -> Any:  # noqa: ANN401
            with torch.cuda.stream(torch.cuda.Stream(CUDA)):
                got = await future
                assert got is not None
                copy = got.clone()
                assert not busy.query(), "await waited for the stream"
                return copy.cpu()

        assert same(Background(lambda: asyncio.run(main())).result(self.patience), coded(4, (1000,)))

    @requires("cuda")
    def test_memory_is_kept_until_consumers_have_read_it(self) -> None:
        """The consumer's stream is slow; meanwhile everybody lets go of the value and memory is taken anew."""
        promise, future = self.pair(CUDA)
        cycles = int(SLOW * _cycles_per_second())
        stream = torch.cuda.Stream(CUDA)
        promise.set_result(coded(5, (1 << 20,), CUDA))
        out = torch.empty(1 << 20, device=CUDA)
        torch.cuda.synchronize(CUDA)
        with torch.cuda.stream(stream):
            got = future.result(self.patience)
            assert got is not None
            torch.cuda._sleep(cycles)
            out.copy_(got)

        del got, future, promise
        others = [torch.full((1 << 20,), -1.0, device=CUDA) for _ in range(8)]
        torch.cuda.synchronize(CUDA)
        assert same(out.cpu(), coded(5, (1 << 20,)))
        assert len(others) == 8

    @requires("cuda")
    def test_error_and_void_need_no_stream(self) -> None:
        (first, failed), (second, void) = self.pair(CUDA), self.pair(CUDA)
        first.set_exception(ValueError("on purpose"))
        second.set_result(None)
        with pytest.raises(ValueError, match="on purpose"):
            failed.result(self.patience)

        assert void.result(self.patience) is None

    @undeclared("cuda")
    def test_cuda_tensor_is_refused(self) -> None:
        if not torch.cuda.is_available():
            pytest.skip("there is no CUDA device")

        promise, future = self.pair()
        with pytest.raises(UnsupportedOperationError):
            promise.set_result(coded(0, device=CUDA))

        assert not future.done()
        promise.set_result(None)
