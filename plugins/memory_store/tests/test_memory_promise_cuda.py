"""The memory promise on a GPU: the kit's stream tests are in test_memory_promise.py; these are of no copy."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from dtorch_core import GetTensorOp, TensorFuture, TensorPromise, make_promise
from dtorch_core.testing import Background

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

PATIENCE = 30.0
SLOW = 0.2
"""Seconds that a slow kernel takes."""


@pytest.fixture(scope="module")
def slow_cycles() -> int:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    begin.record()
    torch.cuda._sleep(50_000_000)
    end.record()
    end.synchronize()
    return int(SLOW * 50_000_000 / (begin.elapsed_time(end) / 1000))


def pair() -> tuple[TensorPromise, TensorFuture]:
    promise = make_promise(device="cuda:0")
    return promise, promise.future()


def test_value_is_not_copied_and_stays_on_its_device() -> None:
    promise, future = pair()
    sent = torch.arange(12.0, device="cuda:0").reshape(3, 4)[1:, ::2]
    promise.set_result(sent)
    got = future.result(0)
    assert got.data_ptr() == sent.data_ptr() and got.device == sent.device


def test_set_and_result_take_no_host_time(slow_cycles: int) -> None:
    """Worker and client go on at once behind a slow kernel; the value is right."""
    promise, future = pair()
    tensor = torch.full((1 << 20,), -1.0, device="cuda:0")
    wanted = torch.arange(1 << 20, dtype=torch.float32, device="cuda:0")
    worker, client = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(worker):
        torch.cuda._sleep(slow_cycles)
        tensor.copy_(wanted)
        began = time.perf_counter()
        promise.set_result(tensor)
        set_took = time.perf_counter() - began

    with torch.cuda.stream(client):
        began = time.perf_counter()
        got = future.result(0)
        result_took = time.perf_counter() - began
        copy = got.clone()

    assert not worker.query(), "the kernel was too short to show anything"
    assert set_took < SLOW / 4 and result_took < SLOW / 4, (set_took, result_took)
    client.synchronize()
    assert torch.equal(copy, wanted)


def test_value_that_nobody_reads_is_kept_until_it_is_written(slow_cycles: int) -> None:
    """The future is dropped while a stream other than the tensor's own still writes it: nobody else gets the memory."""
    promise, future = pair()
    writer = torch.cuda.Stream()
    tensor = torch.empty(1 << 20, device="cuda:0")
    torch.cuda.synchronize()
    with torch.cuda.stream(writer):
        torch.cuda._sleep(slow_cycles)
        tensor.fill_(-1.0)

    promise.set_result(tensor, stream=writer)
    del tensor, promise, future
    others = [torch.arange(1 << 20, dtype=torch.float32, device="cuda:0") for _ in range(8)]
    torch.cuda.synchronize()
    wanted = torch.arange(1 << 20, dtype=torch.float32, device="cuda:0")
    assert all(torch.equal(other, wanted) for other in others)


def test_pipeline_runs_ahead_of_its_client(slow_cycles: int) -> None:
    """A worker submits ten slow steps, each with an operator, before the first is done; clients get the right ones."""
    pairs = [pair() for _ in range(10)]
    operators = [GetTensorOp(promise) for promise, _ in pairs]
    base = torch.arange(1000, dtype=torch.float32, device="cuda:0")
    torch.cuda.synchronize()
    submitted = threading.Event()

    def work() -> float:
        with torch.cuda.stream(torch.cuda.Stream()):
            began = time.perf_counter()
            for step, operator in enumerate(operators):
                torch.cuda._sleep(slow_cycles // 10)
                operator(base + step)

            submitted.set()
            return time.perf_counter() - began

    def read(step: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            return torch.equal(pairs[step][1].result(PATIENCE) + 0, base + step)

    clients = [Background(lambda step=step: read(step)) for step in range(10)]
    assert Background(work).result(PATIENCE) < SLOW / 2
    assert submitted.is_set()
    assert all(client.result(PATIENCE) for client in clients)


def test_many_threads_and_streams(slow_cycles: int) -> None:
    """Values go from stream to stream 200 times, written late each time; every reader sees its own."""

    def worker(pairs: list[tuple[TensorPromise, TensorFuture]], tag: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for step, (promise, _) in enumerate(pairs):
                tensor = torch.full((4096,), -1.0, device="cuda:0")
                torch.cuda._sleep(slow_cycles // 500)
                promise.set_result(tensor.copy_(torch.arange(4096, device="cuda:0") + 10_000 * tag + step))

    def reader(pairs: list[tuple[TensorPromise, TensorFuture]], tag: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for step, (_, future) in enumerate(pairs):
                wanted = torch.arange(4096, device="cuda:0") + 10_000 * tag + step
                assert torch.equal(future.result(PATIENCE), wanted.float())

    lists = [[pair() for _ in range(50)] for _ in range(4)]
    running = [
        Background(lambda job=job, tag=tag: job(lists[tag], tag)) for tag in range(4) for job in (worker, reader)
    ]
    for background in running:
        background.result(PATIENCE)


def test_result_goes_to_the_current_stream_of_its_device() -> None:
    """Also where another device is the caller's current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")

    promise, future = pair()
    with torch.cuda.device(1):
        promise.set_result(torch.arange(1000, device="cuda:0"))
        got = future.result(0)
        assert str(got.device) == "cuda:0" and torch.equal(got.cpu(), torch.arange(1000))
        second = make_promise(device="cuda:0")
        later = second.future()
        second.set_result(torch.arange(1000, device="cuda:1"))
        assert torch.equal(later.result(0).cpu(), torch.arange(1000))
