"""What ranks on one GPU do to show that processes exchange CUDA tensors. Imported by the ranks' processes.

Each program has an opening of its own, so that one that fails leaves the next ones alone.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import traceback

import pytest
import torch
from dtorch_samedevice_group.fused_launch import launcher

from dtorch_core import CollectiveMismatchError, StoreTimeoutError, UnsupportedOperationError, spawn
from dtorch_core.testing._group_base import COLLECTIVES
from dtorch_core.testing._group_base import same as same_bits
from dtorch_core.testing._store_base import coded, same, take
from dtorch_core.testing._store_values import DTYPES, LAYOUTS, moved, of_dtype

GPU = "cuda:0"
LIMIT = 10.0
LONG = 400_000_000
"""Clock cycles: about 200 ms."""
SIZE = (1 << 20,)

PROGRAMS = {}


def program(kind):
    """A function to be called with a handle of this kind."""

    def add(body):
        PROGRAMS[body.__name__] = kind, body
        return body

    return add


def names(kind):
    return [name for name, (found, _) in PROGRAMS.items() if found == kind]


def play(ctx, chosen):
    """What became of each program on this rank: None, or the traceback."""
    torch.cuda.set_device(0)
    with torch.cuda.stream(torch.cuda.Stream()):
        _warm()

    said = {}
    for name in chosen:
        kind, body = PROGRAMS[name]
        begun = time.monotonic()
        try:
            with _opened(ctx, kind, name) as handle:
                body(handle)
        except BaseException:
            said[name] = f"rank {ctx.rank}, after {time.monotonic() - begun:.1f} s\n{traceback.format_exc()}"
        else:
            said[name] = None

    return said


def _opened(ctx, kind, name):
    if kind != "group":
        return ctx.open_store(name, backend="file", timeout=LIMIT)

    return ctx.open_group(name, backend="samedevice", timeout=LIMIT)


def _warm():
    """Load the kernels, which would wait for the device."""
    for dtype in (torch.float32, torch.int64):
        x = torch.arange(64, device=GPU, dtype=dtype)
        x.clone().fill_(-1).add_(x).copy_(x)
        torch.zeros(64, device=GPU, dtype=dtype)
        torch.cat([x, x])
        x.add_(1000 * x)
        x[::2].clone()
        x.reshape(8, 8).t().clone()
        torch.equal(x, x)

    torch.cuda._sleep(1)
    torch.cuda.synchronize()


@contextlib.contextmanager
def _stream(handle, given="current stream"):
    """A stream of the rank's own as the current one, with memory in its pool; and the argument that names it."""
    stream = torch.cuda.default_stream() if given == "default stream" else torch.cuda.Stream()
    with torch.cuda.stream(stream):
        warm = [coded(0, SIZE, GPU) for _ in range(4)]
        warm[0].clone().fill_(1).copy_(warm[1])
        del warm
        stream.synchronize()
        handle.barrier()
        yield stream, stream if given == "stream=" else None


def _busy(stream):
    event = torch.cuda.Event()
    event.record(stream)
    return not event.query()


def _consumers(store):
    return store.world_size - 1


# The four steps


def _ordered(store, given):
    """The host waits in no step, and the consumers' copies are right."""
    with _stream(store, given) as (stream, argument):
        if store.rank == 0:
            tensor = torch.zeros(SIZE, device=GPU)
            torch.cuda._sleep(LONG)
            tensor.copy_(coded(0, SIZE, GPU))
            store.src_set("k", tensor, _consumers(store), stream=argument)
            assert _busy(stream), "src_set waited for the stream"
            store.src_wait_until_get_finished("k", stream=argument)
            assert _busy(stream), "src_wait_until_get_finished waited for the stream"
            stream.synchronize()
            return

        got = store.dest_get("k", stream=argument)
        assert _busy(stream), "dest_get waited for the producer's stream"
        copy = got.clone()
        store.dest_finish_get("k", stream=argument)
        assert _busy(stream), "dest_finish_get waited for the stream"
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
    with _stream(store) as (stream, _):
        if store.rank == 0:
            tensor = coded(0, SIZE, GPU)
            store.src_set("k", tensor, _consumers(store))
            store.src_wait_until_get_finished("k")
            assert _busy(stream), "the wait was one of the host"
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
    with _stream(store) as (stream, _):
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
    with _stream(store) as (stream, _):
        if store.rank == 0:
            memory = store.empty((_consumers(store), *SIZE), dtype=torch.float32).fill_(-1)
            store.src_set("k", memory, _consumers(store), writable=True)
            store.src_wait_until_get_finished("k")
            copy = memory.clone()
            assert _busy(stream)
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
    with _stream(store) as (stream, _):
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
        assert _busy(stream), "the test is too slow to show anything"
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
    with _stream(store) as (stream, _):
        if store.rank == 0:
            tensor = torch.zeros(SIZE, device=GPU)
            torch.cuda._sleep(LONG // 2)
            tensor.copy_(coded(0, SIZE, GPU))
            store.src_set("hint", tensor, _consumers(store), dest_device="cpu")
            store.src_set("wish", tensor, _consumers(store))
            assert _busy(stream), "src_set waited for the stream"
            store.src_wait_until_get_finished("hint")
            store.src_wait_until_get_finished("wish")
            tensor.fill_(-1)
            stream.synchronize()
            return

        torch.cuda._sleep(8 * LONG)
        take(store, "hint", coded(0, SIZE))
        assert same(store.dest_get_to_device("wish", "cpu"), coded(0, SIZE))
        assert _busy(stream), "it waited for the caller's stream"
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
    with _stream(store) as (stream, _):
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
        with _stream(store) as (stream, _):
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


# Groups


def _copied(got):
    if isinstance(got, list):
        return [tensor.clone() for tensor in got]

    return got.clone() if isinstance(got, torch.Tensor) else got


def _on_cpu(got):
    if isinstance(got, list):
        return [tensor.cpu() for tensor in got]

    return got.cpu() if isinstance(got, torch.Tensor) else got


def _inputs(group, shape, dtype, tag=0):
    return [coded(10 * tag + rank, shape, "cpu", dtype) for rank in range(group.world_size)]


SHAPES = {"odd": (5, 7), "large": (257, 1031), "strided": (6, 10)}


@program("group")
def collectives_of_every_dtype(group):
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.uint8, torch.bool):
        for name, shape in SHAPES.items():
            for collective in COLLECTIVES:
                if dtype is torch.bool and not ("gather" in collective.name or collective.name == "broadcast"):
                    continue  # what the others do, or their oracle, is arithmetic

                xs = _inputs(group, shape, dtype)
                if dtype is torch.bfloat16:
                    xs = [x % 16 for x in xs]  # sums are exact, in whatever precision they are made

                x = xs[group.rank].to(GPU)
                if name == "strided":
                    x = x.t().contiguous().t()
                    xs = [each.t().contiguous().t() for each in xs]

                got = _on_cpu(collective.call(group, x))
                wanted = collective.wanted(xs, group.rank)
                assert same_bits(got, wanted), (collective.name, dtype, name)


def _load_kernels(world_size, shape):
    """Do in this process alone what the collectives may have it do for all: who comes last does the work.

    CUDA loads a kernel when it is first launched, and waits for the GPU then.
    """

    def rank(ctx):
        with ctx.open_group("kernels", timeout=LIMIT) as group:
            for collective in COLLECTIVES:
                _copied(collective.call(group, torch.zeros(shape, device=GPU)))

        torch.cuda.synchronize()

    spawn(rank, world_size, devices=GPU, timeout=6 * LIMIT)


@program("group")
def collectives_behind_a_late_rank(group):
    """Its kernels run still when all have called; nobody's host waits, and the results are right."""
    shape, checked = (256, 256), 0
    _load_kernels(group.world_size, shape)
    loaded = torch.zeros(1, device=GPU)
    with _stream(group) as (stream, _):
        for collective in COLLECTIVES:
            _copied(collective.call(group, torch.zeros(shape, device=GPU)))  # memory
            stream.synchronize()

        for number, collective in enumerate(COLLECTIVES * 2):
            late = number % group.world_size
            xs = _inputs(group, shape, torch.float32, number)
            x = torch.zeros(shape, device=GPU)
            if group.rank == late:
                torch.cuda._sleep(LONG)

            x.copy_(coded(10 * number + group.rank, shape, GPU))
            before = len(launcher._compiled)
            got = collective.call(group, x)
            busy = _busy(stream)
            loaded.fill_(len(launcher._compiled) - before)
            copies = _copied(got)
            x.fill_(-1)
            stream.synchronize()
            assert same_bits(_on_cpu(copies), collective.wanted(xs, group.rank)), collective.name
            # Memory of another process may take another kernel, which is loaded then.
            if not group.all_reduce(loaded).item() and (group.rank == late or collective.root is None):
                assert busy, f"{collective.name}, call {number}: the host waited"
                checked += 1

    assert checked >= len(COLLECTIVES), "kernels were loaded in nearly all calls"


@program("group")
def buffers_again_and_again(group):
    turns = 30
    with _stream(group) as (stream, _):
        buffer, out = torch.zeros(64, device=GPU), torch.zeros(32 * group.world_size, device=GPU)
        kept = torch.zeros(turns, 2, 64, device=GPU)
        gathered = torch.zeros(turns, 32 * group.world_size, device=GPU)
        for turn in range(turns):
            torch.cuda._sleep(2_000_000 if turn % group.world_size == group.rank else 100)
            torch.arange(64, out=buffer).add_(1000 * turn + group.rank)
            kept[turn, 0].copy_(group.all_reduce(buffer))
            gathered[turn].copy_(group.all_gather(buffer[:32], out=out))
            kept[turn, 1].copy_(group.all_reduce(buffer, "max", out=buffer))

        stream.synchronize()
        for turn in range(turns):
            xs = [torch.arange(64.0) + 1000 * turn + rank for rank in range(group.world_size)]
            assert same(kept[turn, 0].cpu(), sum(xs[1:], xs[0])), turn
            assert same(gathered[turn].cpu(), torch.cat([x[:32] for x in xs])), turn
            assert same(kept[turn, 1].cpu(), xs[-1]), turn


@program("group")
def many_in_flight(group):
    """Waited for in another order, on other streams, or not at all."""
    with _stream(group) as (stream, _):
        xs = [coded(group.rank + number, (1000 + number,), GPU) for number in range(24)]
        works = [group.all_reduce(x, async_op=True) for x in xs]
        other = torch.cuda.Stream()
        kept = {}
        for number in reversed(range(24)):
            if number % 3 == 0:
                works[number] = None
            elif number % 3 == 1:
                works[number].wait()
                kept[number] = _copied(works[number].result())
            else:
                with torch.cuda.stream(other):
                    works[number].wait()
                    kept[number] = _copied(works[number].result())

        del works, xs
        trash = [torch.full((1000 + number,), -1.0, device=GPU) for number in range(24)]
        stream.synchronize()
        other.synchronize()
        del trash
        for number, got in kept.items():
            wanted = [coded(rank + number, (1000 + number,)) for rank in range(group.world_size)]
            got = got[0] if isinstance(got, list) else got
            assert same(got.cpu(), sum(wanted[1:], wanted[0])), number

        group.barrier()


@program("group")
def calls_that_do_not_match(group):
    """Every rank raises, and the group goes on."""
    for turn in range(3):
        x = coded(group.rank, (8 + (group.rank == group.world_size - 1), 4), GPU)
        with pytest.raises(CollectiveMismatchError, match=f"rank {group.world_size - 1}"):
            group.all_reduce(x)

        with pytest.raises(CollectiveMismatchError):
            group.all_reduce(x[:8], "max" if group.rank == 0 else "sum")

        xs = _inputs(group, (8, 4), torch.float32, turn)
        assert same(group.all_reduce(xs[group.rank].to(GPU)).cpu(), sum(xs[1:], xs[0]))


@program("group")
def timeout_names_who_has_not_come(group):
    last = group.world_size - 1
    if group.rank == last:
        time.sleep(1.5)
        return

    with pytest.raises(StoreTimeoutError, match=f"rank {last}") as caught:
        group.all_reduce(coded(group.rank, SIZE, GPU), timeout=0.5)

    assert "had not come" in str(caught.value)
    torch.cuda.synchronize()
    time.sleep(1.0)


@program("group")
def messages(group):
    """Around the ring, of many sizes and layouts, reused in place at once, behind late kernels."""
    after, before = (group.rank + 1) % group.world_size, (group.rank - 1) % group.world_size
    with _stream(group) as (stream, _):
        for number, shape in enumerate([(), (7,), (0, 3), (300, 1000), (64, 64)]):
            x = coded(10 * number + group.rank, shape, GPU)
            if number % group.world_size == group.rank:
                torch.cuda._sleep(LONG // 8)

            sent = x.t() if len(shape) == 2 else x
            group.send(sent, after)
            x.fill_(-1)
            got = group.recv(before).clone()
            wanted = coded(10 * number + before, shape)
            stream.synchronize()
            assert same(got.cpu(), wanted.t() if len(shape) == 2 else wanted), shape

        if group.rank == 0:
            got = [group.recv(None) for _ in range(2 * (group.world_size - 1))]
            found = sorted(float(tensor[3]) for tensor in got)
            assert found == sorted(float(coded(tag, (7,))[3]) for tag in range(2, 2 * group.world_size))
        else:
            for tag in range(2):
                group.send(coded(2 * group.rank + tag, (7,), GPU), 0)

        group.barrier()


@program("group")
def messages_of_several_threads(group):
    """To and fro at once; the tags tell them apart."""
    torch.cuda.synchronize()
    peer = group.rank ^ 1
    failed = []

    def use(tag):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for turn in range(10):
                    group.send(coded(10 * tag + turn + 100 * group.rank, (5000,), GPU), peer, tag=tag)
                    wanted = coded(10 * tag + turn + 100 * peer, (5000,), GPU)
                    assert same(group.recv(peer, tag=tag), wanted)
        except BaseException:
            failed.append(traceback.format_exc())

    if peer < group.world_size:
        threads = [threading.Thread(target=use, args=(tag,)) for tag in range(3)]
        for thread in threads:
            thread.start()

        for thread in threads:
            thread.join(LIMIT)

    assert not failed, failed[0]
    group.barrier()


@program("group")
def collectives_through_the_host(group):
    from dtorch_file_store.gpu import Gpu

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gpu, "why_host_together", lambda self: "rank 1: on purpose")
        patch.setattr(Gpu, "why_host", lambda self, device: "rank 1: on purpose")
        group.barrier()
        for collective in COLLECTIVES:
            xs = _inputs(group, (33, 70), torch.float32)
            got = _on_cpu(collective.call(group, xs[group.rank].to(GPU)))
            assert same_bits(got, collective.wanted(xs, group.rank)), collective.name

        xs = _inputs(group, (33, 70), torch.float32)
        group.send(xs[group.rank].to(GPU), (group.rank + 1) % group.world_size)
        assert same(group.recv((group.rank - 1) % group.world_size).cpu(), xs[group.rank - 1])
        group.barrier()
