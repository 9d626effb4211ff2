"""What ranks on one GPU do with a store: the four steps."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from file_cuda_programs import GPU, LONG, SIZE, is_busy, own_stream, program

from dtorch_core import UnsupportedOperationError
from dtorch_core.testing._group_base import same as same_bits
from dtorch_core.testing._layouts import DTYPES, LAYOUTS, moved, of_dtype
from dtorch_core.testing._store_base import coded, same, take


def _consumers(store):
    return store.world_size - 1


def _ordered(store, given):
    """The host waits in no step, and the consumers' copies are right."""
    with own_stream(store, given) as (stream, argument):
        if store.rank == 0:
            tensor = torch.zeros(SIZE, device=GPU)
            torch.cuda._sleep(LONG)
            tensor.copy_(coded(0, SIZE, GPU))
            store.src_set("k", tensor, _consumers(store), stream=argument)
            assert is_busy(stream), "src_set waited for the stream"
            store.src_wait_until_get_finished("k", stream=argument)
            assert is_busy(stream), "src_wait_until_get_finished waited for the stream"
            stream.synchronize()
            return

        got = store.dest_get("k", stream=argument)
        assert is_busy(stream), "dest_get waited for the producer's stream"
        copy = got.clone()
        store.dest_finish_get("k", stream=argument)
        assert is_busy(stream), "dest_finish_get waited for the stream"
        stream.synchronize()
        assert same(copy, coded(0, SIZE, GPU))


@program("store")
def ordered_on_the_current_stream(store):
    _ordered(store, "current stream")


@program("store")
def ordered_on_a_stream_that_is_named(store):
    _ordered(store, "stream=")


@program("store")
def ordered_on_default_streams(store):
    _ordered(store, "default stream")


@program("store")
def rewritten_in_place_after_the_wait(store):
    """Behind consumers that read late: the write waits for them on the device."""
    with own_stream(store) as (stream, _):
        if store.rank == 0:
            tensor = coded(0, SIZE, GPU)
            store.src_set("k", tensor, _consumers(store))
            store.src_wait_until_get_finished("k")
            assert is_busy(stream), "the wait was one of the host"
            tensor.fill_(-1)
            stream.synchronize()
            return

        got = store.dest_get("k")
        torch.cuda._sleep(LONG if store.rank == 1 else LONG // 4)
        copy = got.clone()
        store.dest_finish_get("k")
        stream.synchronize()
        assert same(copy, coded(0, SIZE, GPU))


@program("store")
def one_buffer_again_and_again(store):
    """Now the one side is late and now the other, and no host waits for a stream."""
    turns = 40
    with own_stream(store) as (stream, _):
        buffer = torch.zeros(64, device=GPU)
        kept = torch.zeros(turns, 64, device=GPU)
        for turn in range(turns):
            torch.cuda._sleep(2_000_000 if turn % store.world_size == store.rank else 100)
            if store.rank == 0:
                torch.arange(64, out=buffer).add_(1000 * turn)
                store.src_set("k", buffer, _consumers(store))
                store.src_wait_until_get_finished("k")
            else:
                kept[turn].copy_(store.dest_get("k"))
                store.dest_finish_get("k")

        stream.synchronize()
        if store.rank > 0:
            for turn in range(turns):
                assert same(kept[turn].cpu(), torch.arange(64.0) + 1000 * turn), turn


@program("store")
def written_by_a_consumer(store):
    with own_stream(store) as (stream, _):
        if store.rank == 0:
            memory = store.empty((_consumers(store), *SIZE), dtype=torch.float32).fill_(-1)
            store.src_set("k", memory, _consumers(store), writable=True)
            store.src_wait_until_get_finished("k")
            copy = memory.clone()
            assert is_busy(stream)
            stream.synchronize()
            for number, part in enumerate(copy):
                assert same(part, coded(number + 1, SIZE, GPU))
        else:
            got = store.dest_get("k")
            torch.cuda._sleep(LONG)
            got[store.rank - 1].copy_(coded(store.rank, SIZE, GPU))
            store.dest_finish_get("k")
            stream.synchronize()


@program("store")
def kept_while_a_stream_still_reads_it(store):
    """The producer lets go at once, and allocates anew before the consumers' kernels have run."""
    with own_stream(store) as (stream, _):
        if store.rank == 0:
            tensor = coded(0, SIZE, GPU)
            store.src_set("k", tensor, _consumers(store))
            del tensor
            store.barrier()
            store.src_wait_until_get_finished("k")
            trash = [torch.full(SIZE, -1.0, device=GPU) for _ in range(8)]
            stream.synchronize()
            del trash
            return

        got = store.dest_get("k")
        torch.cuda._sleep(LONG)
        copy = got.clone()
        store.barrier()
        store.dest_finish_get("k")
        del got
        assert is_busy(stream), "the test is too slow to show anything"
        stream.synchronize()
        assert same(copy, coded(0, SIZE, GPU))


@program("store")
def given_back(store):
    """Each process's memory, and the GPU's."""

    def rounds():
        for turn in range(5):
            if store.rank == 0:
                store.src_set("k", coded(turn, (1 << 24,), GPU), _consumers(store))
                store.src_wait_until_get_finished("k")
            else:
                take(store, "k", coded(turn, (1 << 24,), GPU))

        gc.collect()
        torch.cuda.synchronize()
        store.barrier()  # the ranks of one process have its memory together

    rounds()
    before = torch.cuda.memory_allocated()
    store.barrier()
    rounds()
    assert torch.cuda.memory_allocated() == before
    store.barrier()


@program("store")
def every_dtype_and_layout(store):
    sent = {f"{dtype}": of_dtype(dtype, GPU) for dtype in DTYPES}
    sent |= {layout: moved(make(), GPU) for layout, make in LAYOUTS.items()}
    if store.rank == 0:
        for key, tensor in sent.items():
            store.src_set(key, tensor, _consumers(store))

        for key in sent:
            store.src_wait_until_get_finished(key)

        return

    for key, wanted in sent.items():
        got = store.dest_get(key)
        assert (got.dtype, got.shape, got.device) == (wanted.dtype, wanted.shape, wanted.device), key
        assert same_bits(got.cpu(), wanted.cpu()), key
        store.dest_finish_get(key)


@program("store")
def borrowed_tensors_are_published_again(store):
    """Their memory is another process's: a copy is offered."""
    for source in range(store.world_size - 1):
        if store.rank == source:
            tensor = coded(0, SIZE, GPU) if source == 0 else store.dest_get(f"{source - 1}")[: SIZE[0] // 2**source]
            store.src_set(f"{source}", tensor, 1)
            store.src_wait_until_get_finished(f"{source}")
            if source:
                store.dest_finish_get(f"{source - 1}")

    if store.rank == store.world_size - 1:
        take(store, f"{store.rank - 1}", coded(0, SIZE, GPU)[: SIZE[0] // 2 ** (store.rank - 1)])


@program("store")
def to_the_cpu(store):
    """By the producer's hint, and by the consumer's wish, which does not wait for the consumer's own stream."""
    with own_stream(store) as (stream, _):
        if store.rank == 0:
            tensor = torch.zeros(SIZE, device=GPU)
            torch.cuda._sleep(LONG // 2)
            tensor.copy_(coded(0, SIZE, GPU))
            store.src_set("hint", tensor, _consumers(store), dest_device="cpu")
            store.src_set("wish", tensor, _consumers(store))
            assert is_busy(stream), "src_set waited for the stream"
            store.src_wait_until_get_finished("hint")
            store.src_wait_until_get_finished("wish")
            tensor.fill_(-1)
            stream.synchronize()
            return

        torch.cuda._sleep(8 * LONG)
        take(store, "hint", coded(0, SIZE))
        assert same(store.dest_get_to_device("wish", "cpu"), coded(0, SIZE))
        assert is_busy(stream), "it waited for the caller's stream"
        stream.synchronize()


@program("store")
def from_the_cpu(store):
    if store.rank == 0:
        tensor = coded(0, (300, 500))
        store.src_set("hint", tensor.t(), _consumers(store), dest_device=GPU)
        store.src_set("wish", tensor.t(), _consumers(store))
        store.src_wait_until_get_finished("wish")
        store.src_wait_until_get_finished("hint")
        tensor.fill_(-1)
        return

    got = store.dest_get("hint")
    assert same(got, coded(0, (300, 500), GPU).t())
    store.dest_finish_get("hint")
    assert same(store.dest_get_to_device("wish", GPU), coded(0, (300, 500), GPU).t())


@program("store")
def copies_to_the_same_device_are_owned(store):
    if store.rank == 0:
        tensor = coded(0, SIZE, GPU)
        store.src_set("k", tensor, _consumers(store))
        store.src_wait_until_get_finished("k")
        store.barrier()
        assert same(tensor, coded(0, SIZE, GPU))
    else:
        copy = store.dest_get_to_device("k", "cuda")
        assert same(copy, coded(0, SIZE, GPU))
        copy.fill_(-1)
        torch.cuda.synchronize()
        store.barrier()


@program("store")
def published_by_every_rank(store):
    """To all others, in streams that are late in turn, with resets and barriers between."""
    with own_stream(store) as (stream, _):
        others = [rank for rank in range(store.world_size) if rank != store.rank]
        mine, copies = torch.zeros(1000, device=GPU), []
        for turn in range(12):
            if turn % store.world_size == store.rank:
                torch.cuda._sleep(20_000_000)

            torch.arange(1000, out=mine).add_(1000 * turn + 10_000 * store.rank)
            store.src_set(f"{store.rank}", mine, len(others))
            for rank in others:
                copies.append((turn, rank, store.dest_get(f"{rank}").clone()))
                store.dest_finish_get(f"{rank}")

            store.src_wait_until_get_finished(f"{store.rank}")
            if turn % 4 == 3:
                store.barrier()
                store.reset()

        stream.synchronize()
        for turn, rank, copy in copies:
            assert same(copy.cpu(), torch.arange(1000.0) + 1000 * turn + 10_000 * rank), (turn, rank)


@program("store")
def left_by_a_producer(store):
    """What a rank has published counts, also when it has left without having waited."""
    if store.rank == 0:
        store.src_set("left", coded(0, SIZE, GPU), _consumers(store))
        store.close()
        trash = [torch.full(SIZE, -1.0, device=GPU) for _ in range(8)]
        torch.cuda.synchronize()
        del trash
        time.sleep(0.2)  # the others come later, and this process is still here
        return

    time.sleep(0.1)
    take(store, "left", coded(0, SIZE, GPU))


@program("memory without a handle")
def offered_by_a_copy(store):
    """What the other programs then show is how that goes."""
    tensor = coded(0, SIZE, GPU)
    _, copy = store._session.gpu.offer(tensor, torch.cuda.current_stream())
    assert copy is not None
    assert same(copy, tensor)
    store._session.gpu.copies(tensor.device).give_back(copy, torch.cuda.current_stream())


@program("store")
def through_the_host(store):
    """Where memory can't be mapped: the values are right, and who wants more learns why."""
    from dtorch_file_store.gpu import Gpu

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gpu, "why_host", lambda self, device: "rank 1: on purpose")
        with own_stream(store) as (stream, _):
            for key, shape in (("large", SIZE), ("small", (7,)), ("empty", (0, 3)), ("scalar", ())):
                if store.rank == 0:
                    tensor = torch.zeros(shape, device=GPU)
                    torch.cuda._sleep(LONG // 8)
                    tensor.copy_(coded(0, shape, GPU))
                    store.src_set(key, tensor, _consumers(store))
                    store.src_wait_until_get_finished(key)
                    tensor.fill_(-1)
                    with pytest.raises(UnsupportedOperationError, match="on purpose"):
                        store.src_set("written", tensor, 1, writable=True)

                    store.src_set(f"{key} on the cpu", coded(1, shape, GPU), _consumers(store), dest_device="cpu")
                    store.src_wait_until_get_finished(f"{key} on the cpu")
                else:
                    take(store, key, coded(0, shape, GPU))
                    take(store, f"{key} on the cpu", coded(1, shape))

            stream.synchronize()
