"""What ranks on one GPU do in a group: collectives and messages."""

from __future__ import annotations

import threading
import time
import traceback

import pytest
import torch
from dtorch_samedevice_group.fused_launch import launcher
from file_cuda_programs import GPU, LIMIT, LONG, SIZE, is_busy, own_stream, program

from dtorch_core import CollectiveMismatchError, StoreTimeoutError, spawn
from dtorch_core.testing._group_base import COLLECTIVES
from dtorch_core.testing._group_base import same as same_bits
from dtorch_core.testing._store_base import coded, same


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
    with own_stream(group) as (stream, _):
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
            busy = is_busy(stream)
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
    with own_stream(group) as (stream, _):
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
    with own_stream(group) as (stream, _):
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
    with own_stream(group) as (stream, _):
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
