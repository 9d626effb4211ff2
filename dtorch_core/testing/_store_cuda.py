"""CUDA: the order between streams, on both sides, without the host waiting for either."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dtorch_core._meeting.member import normal_device
from dtorch_core.errors import UnsupportedOperationError
from dtorch_core.store import TensorStore
from dtorch_core.testing._harness import CUDA, requires, undeclared
from dtorch_core.testing._store_base import StoreConformance, coded, same, take

LONG = 400_000_000
"""Clock cycles: about 200 ms."""

SIZE = (1 << 20,)

MOST = 32
"""Tensors that are allocated in the hope of memory that was given back too early."""


class CudaTests(StoreConformance):
    """What an exchange owes to work that is queued and has not run yet."""

    @property
    def gpu(self) -> str:
        """The GPU to test on."""
        return normal_device(CUDA)

    @requires("cuda")
    @pytest.mark.parametrize("given", ["stream=", "current stream"])
    def test_cuda_value_is_ordered_after_the_producers_work(self, given: str) -> None:
        def body(store: TensorStore) -> None:
            with _side_stream(store, given) as (stream, argument):
                if store.rank == 0:
                    tensor = torch.zeros(SIZE, device=self.gpu)
                    torch.cuda._sleep(LONG)
                    tensor.copy_(coded(0, SIZE, self.gpu))
                    store.src_set("k", tensor, 1, stream=argument)
                    assert _busy(stream), "src_set waited for the stream"
                    store.src_wait_until_get_finished("k", stream=argument)
                    assert _busy(stream), "src_wait_until_get_finished waited for the stream"
                    return

                got = store.dest_get("k", stream=argument)
                assert _busy(stream), "dest_get waited for the producer's stream"
                copy = got.clone()
                store.dest_finish_get("k", stream=argument)
                assert _busy(stream), "dest_finish_get waited for the stream"

            stream.synchronize()
            assert same(copy, coded(0, SIZE, self.gpu))

        self.ranks(body, 2, self.gpu)

    @requires("cuda")
    @pytest.mark.parametrize("given", ["stream=", "current stream"])
    def test_cuda_tensor_may_be_rewritten_in_place_after_the_wait(self, given: str) -> None:
        """Behind a consumer that reads late: the write waits for it on the device."""

        def body(store: TensorStore) -> None:
            with _side_stream(store, given) as (stream, argument):
                if store.rank == 0:
                    tensor = coded(0, SIZE, self.gpu)
                    store.src_set("k", tensor, 2, stream=argument)
                    store.src_wait_until_get_finished("k", stream=argument)
                    assert _busy(stream), "the wait was one of the host"
                    tensor.fill_(-1)
                    store.barrier()
                    return

                got = store.dest_get("k", stream=argument)
                torch.cuda._sleep(LONG if store.rank == 1 else LONG // 4)
                copy = got.clone()
                store.dest_finish_get("k", stream=argument)
                store.barrier()

            stream.synchronize()
            assert same(copy, coded(0, SIZE, self.gpu))

        self.ranks(body, 3, self.gpu)

    @requires("cuda")
    def test_cuda_buffer_that_is_used_again_and_again(self) -> None:
        """One buffer, many generations, now the one side late and now the other, and no host wait in between."""
        turns = 40

        def body(store: TensorStore) -> None:
            with _side_stream(store, "current stream") as (stream, _):
                buffer = torch.zeros(64, device=self.gpu)
                kept = torch.zeros(turns, 64, device=self.gpu)
                for turn in range(turns):
                    torch.cuda._sleep(2_000_000 if turn % 2 == store.rank else 100)
                    if store.rank == 0:
                        torch.arange(64, out=buffer).add_(1000 * turn)
                        store.src_set("k", buffer, 1)
                        store.src_wait_until_get_finished("k")
                    else:
                        kept[turn].copy_(store.dest_get("k"))
                        store.dest_finish_get("k")

            stream.synchronize()
            if store.rank == 1:
                for turn in range(turns):
                    assert same(kept[turn].cpu(), torch.arange(64.0) + 1000 * turn)

        self.ranks(body, 2, self.gpu)

    @requires("cuda", "zero_copy")
    def test_cuda_writes_of_a_consumer_are_ordered_before_the_producer(self) -> None:
        def body(store: TensorStore) -> None:
            with _side_stream(store, "stream=") as (stream, argument):
                if store.rank == 0:
                    memory = store.empty(SIZE, dtype=torch.float32)
                    store.src_set("k", memory.copy_(coded(0, SIZE, self.gpu)), 1, stream=argument, writable=True)
                    store.src_wait_until_get_finished("k", stream=argument)
                    copy = memory.clone()
                    assert _busy(stream)
                    stream.synchronize()
                    assert same(copy, coded(1, SIZE, self.gpu))
                    return

                got = store.dest_get("k", stream=argument)
                torch.cuda._sleep(LONG)
                got.copy_(coded(1, SIZE, self.gpu))
                store.dest_finish_get("k", stream=argument)

        self.ranks(body, 2, self.gpu)

    @requires("cuda")
    @pytest.mark.parametrize("view", ["as it is", "conjugate"])
    def test_cuda_memory_is_kept_while_a_stream_still_reads_it(self, view: str) -> None:
        """The producer lets go of the tensor at once, and allocates anew before the consumer's kernel has run.

        ``Tensor.record_stream`` of a conjugate view keeps nothing, and damages the heap:
        :func:`dtorch_core.streams.keep_until_done` does neither.
        """

        def made() -> Tensor:
            tensor = coded(0, SIZE, self.gpu)
            return tensor if view == "as it is" else torch.view_as_complex(tensor.view(-1, 2)).conj()

        def body(store: TensorStore) -> None:
            with _side_stream(store, "current stream") as (stream, _):
                made().clone()  # loads the kernel, which would wait for all that sleeps
                stream.synchronize()
                store.barrier()
                if store.rank == 0:
                    tensor = made()
                    address = tensor.data_ptr()
                    store.src_set("k", tensor, 1)
                    del tensor
                    store.barrier()
                    trash = []
                    for _ in range(MOST):
                        trash.append(torch.full(SIZE, -1.0, device=self.gpu))
                        stream.synchronize()  # the allocator learns from the GPU what may be used again
                        if trash[-1].data_ptr() == address:
                            break

                    store.barrier()
                    store.src_wait_until_get_finished("k")
                    del trash
                    return

                got = store.dest_get("k")
                torch.cuda._sleep(LONG)
                copy = got.clone()
                store.dest_finish_get("k")
                del got
                store.barrier()
                store.barrier()
                assert _busy(stream), "the test is too slow to show anything"

            stream.synchronize()
            assert same(copy, made())

        self.ranks(body, 2, self.gpu)

    @requires("cuda")
    def test_cuda_memory_is_given_back(self) -> None:
        def body(store: TensorStore) -> None:
            for turn in range(10):
                if store.rank == 0:
                    store.src_set("k", coded(turn, SIZE, self.gpu), 1)
                    store.src_wait_until_get_finished("k")
                else:
                    take(store, "k", coded(turn, SIZE, self.gpu))

        self.ranks(body, 2, self.gpu)
        before = _allocated()
        self.ranks(body, 2, self.gpu)
        assert _allocated() == before

    @requires("cuda")
    def test_cuda_copy_to_the_cpu_waits_for_its_own_copy_only(self) -> None:
        def body(store: TensorStore) -> None:
            with _side_stream(store, "current stream") as (stream, _):
                if store.rank == 0:
                    tensor = torch.zeros(SIZE, device=self.gpu)
                    torch.cuda._sleep(LONG // 4)
                    tensor.copy_(coded(0, SIZE, self.gpu))
                    store.src_set("k", tensor, 1)
                    store.src_wait_until_get_finished("k")
                    tensor.fill_(-1)
                    return

                torch.cuda._sleep(4 * LONG)
                copy = store.dest_get_to_device("k", "cpu")
                assert _busy(stream), "it waited for the caller's stream"
                assert same(copy, coded(0, SIZE))

        self.ranks(body, 2, self.gpu)

    @requires("cuda")
    @pytest.mark.parametrize("target", ["cuda", "same"])
    def test_cuda_copy_to_the_same_device_is_owned(self, target: str) -> None:
        def body(store: TensorStore) -> None:
            if store.rank == 0:
                tensor = coded(0, device=self.gpu)
                store.src_set("k", tensor, 1)
                store.src_wait_until_get_finished("k")
                store.barrier()
                assert same(tensor, coded(0, device=self.gpu))
                return

            copy = store.dest_get_to_device("k", self.gpu if target == "same" else "cuda")
            assert same(copy, coded(0, device=self.gpu))
            copy.fill_(-1)
            torch.cuda.synchronize()
            store.barrier()

        self.ranks(body, 2, self.gpu)

    @requires("cpu", "cuda")
    def test_cuda_copy_of_a_cpu_tensor(self) -> None:
        def body(store: TensorStore) -> None:
            if store.rank == 0:
                tensor = coded(0, (3, 5))
                store.src_set("k", tensor.t(), 1)
                store.src_wait_until_get_finished("k")
                tensor.fill_(-1)
            else:
                assert same(store.dest_get_to_device("k", self.gpu), coded(0, (3, 5), self.gpu).t())

        self.ranks(body, 2, "cpu")

    @requires("cuda", "cross_device")
    def test_cuda_hint_moves_a_cpu_tensor_on_the_producers_side(self) -> None:
        def body(store: TensorStore) -> None:
            if store.rank == 0:
                tensor = coded(0, (3, 5))
                store.src_set("k", tensor, 2, dest_device=self.gpu)
                store.src_wait_until_get_finished("k")
                tensor.fill_(-1)
                store.barrier()
                return

            got = store.dest_get("k")
            assert str(got.device) == self.gpu
            copy = got.clone()
            store.dest_finish_get("k")
            store.barrier()
            assert same(copy, coded(0, (3, 5), self.gpu))

        self.ranks(body, 3, self.gpu)

    @requires("cuda", "cross_device")
    def test_cuda_hint_moves_a_gpu_tensor_to_the_cpu(self) -> None:
        """Behind work of the producer; the consumer sees finished values, the producer's stream goes on."""

        def body(store: TensorStore) -> None:
            with _side_stream(store, "stream=") as (stream, argument):
                if store.rank > 0:
                    take(store, "k", coded(0, SIZE))
                    return

                tensor = torch.zeros(SIZE, device=self.gpu)
                torch.cuda._sleep(LONG)
                tensor.copy_(coded(0, SIZE, self.gpu))
                store.src_set("k", tensor, 2, stream=argument, dest_device="cpu")
                assert _busy(stream), "src_set waited for the stream"
                store.src_wait_until_get_finished("k", stream=argument)
                tensor.fill_(-1)

        self.ranks(body, 3, self.gpu)

    @requires("cuda", "cross_device")
    def test_cuda_ranks_on_gpus_of_their_own(self) -> None:
        if torch.cuda.device_count() < 2:
            pytest.skip("there is one CUDA device only")

        def body(store: TensorStore) -> None:
            wanted = coded(0, SIZE, self.gpu)
            torch.cuda.synchronize(self.gpu)
            if store.rank == 0:
                with torch.cuda.stream(torch.cuda.Stream()):
                    tensor = torch.zeros(SIZE, device=self.gpu)
                    torch.cuda._sleep(LONG)
                    tensor.copy_(wanted)
                    for key in ("get", "same", "cpu", "own"):
                        store.src_set(key, tensor, 1)

                    for key in ("get", "same", "cpu", "own"):
                        store.src_wait_until_get_finished(key)

                    tensor.fill_(-1)
                    return

            assert same(store.dest_get_to_device("cpu", "cpu"), wanted.cpu())
            assert same(store.dest_get_to_device("own", store.device).cpu(), wanted.cpu())
            assert same(store.dest_get_to_device("same", self.gpu).cpu(), wanted.cpu())
            got = store.dest_get("get")
            assert same(got.cpu(), wanted.cpu())
            store.dest_finish_get("get")

        self.ranks(body, 2, ["cuda:0", "cuda:1"])

    @undeclared("cuda")
    def test_cuda_tensor_is_refused_where_it_is_not_declared(self) -> None:
        if not torch.cuda.is_available():
            pytest.skip("there is no CUDA device")

        def body(store: TensorStore) -> None:
            with pytest.raises(UnsupportedOperationError):
                store.src_set("k", coded(0, device=self.gpu), 1)

            store.src_set("k", coded(0), 1)  # the key is free
            take(store, "k", coded(0))

        self.ranks(body, 1, "cpu")


@contextlib.contextmanager
def _side_stream(store: TensorStore, given: str) -> Iterator[tuple[torch.cuda.Stream, torch.cuda.Stream | None]]:
    """A stream of the rank's own as the current one, and the argument that names it: none for the current stream.

    Kernels are loaded and memory is allocated first, since both can wait for the device.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        warm = [coded(0, SIZE, str(stream.device)) for _ in range(4)]
        warm[0].clone().fill_(1).copy_(warm[1])
        torch.cuda._sleep(1)
        store.empty(SIZE, dtype=torch.float32, device=stream.device)
        warm.clear()
        stream.synchronize()
        store.barrier()
        yield stream, stream if given == "stream=" else None


def _busy(stream: torch.cuda.Stream) -> bool:
    event = torch.cuda.Event()
    event.record(stream)
    return not event.query()


def _allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()
