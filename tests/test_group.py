"""ThreadGroup over a process group that is not ours: torch's Gloo, which has no notes and takes dense tensors only."""

import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtorch_core import CollectiveMismatchError, PluginError, StoreTimeoutError, use_backend
from dtorch_core._memory import Memory, own_bytes
from dtorch_core._shapes import Shape
from dtorch_core.testing import run_ranks

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import gloo_groups
    from gloo_groups import LIMIT, on_ranks, part

registered = gloo_groups.registered

LAYOUTS = {
    "contiguous": lambda rank: part(rank, 6, 6),
    "transposed": lambda rank: part(rank, 6, 6).t(),
    "columns": lambda rank: part(rank, 6, 12)[:, ::2],
    "expanded": lambda rank: part(rank, 6, 1).expand(6, 6),
    "negative": lambda rank: torch.complex(part(rank, 6, 6), part(rank, 6, 6)).conj().imag,
    "whole numbers": lambda rank: part(rank, 6, 6, dtype=torch.int64).t(),
}


def test_out_that_overlaps_the_input_through_another_storage_is_written_last():
    whole = part(0, 10)
    x, out = own_bytes(whole[2:8]), whole[:6]
    memory = Memory("all_reduce", out, Shape.of(x), x.device, (x,))
    memory.tensor.fill_(-1)
    assert torch.equal(x, part(0, 10)[2:8])
    assert memory.result() is out
    assert torch.equal(out, torch.full((6,), -1.0))


class TestValues:
    @pytest.mark.parametrize("world_size", [1, 2, 3])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_every_collective_of_any_layout(self, layout, world_size):
        """Gloo takes what it is given for contiguous, and would be wrong in silence."""

        def body(group):
            rank, n = group.rank, group.world_size
            xs = [LAYOUTS[layout](r) for r in range(n)]
            x, total = xs[rank], sum(xs)
            assert torch.equal(group.all_reduce(x), total)
            assert torch.equal(group.all_reduce(x, "max"), torch.stack(xs).amax(0))
            reduced = group.reduce(x, n - 1)
            assert torch.equal(reduced, total) if rank == n - 1 else reduced is None
            assert torch.equal(group.broadcast(x, n - 1), xs[-1])
            for dim in (0, 1, -1):
                assert torch.equal(group.all_gather(x, dim), torch.cat(xs, dim))
                assert torch.equal(group.reduce_scatter(x, dim), total.chunk(n, dim)[rank])
                assert torch.equal(group.all_to_all(x, dim, 0), torch.cat([y.chunk(n, dim)[rank] for y in xs]))

            for got, wanted in (
                (group.all_gather_list(x), xs),
                (group.all_to_all_list([x + r for r in range(n)]), [y + rank for y in xs]),
                (group.gather(x, n - 1), xs if rank == n - 1 else None),
            ):
                assert wanted is None if got is None else all(map(torch.equal, got, wanted))

            scattered = group.scatter([x + r for r in range(n)] if rank == n - 1 else None, n - 1)
            assert torch.equal(scattered, xs[-1] + rank)
            assert torch.equal(x, LAYOUTS[layout](rank)), "an input was changed"
            assert group.barrier() is None

        on_ranks(body, world_size)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_all_to_all_of_a_group_that_exchanges_parts_of_one_tensor(self, layout, monkeypatch):
        """As torch 2.11's with Gloo, which takes no lists of tensors."""

        def alltoall(*args):
            raise RuntimeError("Backend gloo does not support alltoall")

        monkeypatch.setattr(dist.ProcessGroup, "alltoall", alltoall)

        def body(group):
            rank = group.rank
            xs = [LAYOUTS[layout](r) for r in range(2)]
            wanted = torch.cat([x.chunk(2, 1)[rank] for x in xs])
            assert torch.equal(group.all_to_all(xs[rank], 1, 0), wanted)
            out = torch.zeros(3, 12, dtype=xs[0].dtype).t()
            assert group.all_to_all(xs[rank], 1, 0, out=out) is out
            assert torch.equal(out, wanted)
            uneven = [x[: 2 * (r + s)] for r, x in enumerate(xs) for s in range(2)]
            got = group.all_to_all_list(uneven[2 * rank : 2 * rank + 2])
            assert [tensor.shape for tensor in got] == [(2 * rank, 6), (2 * rank + 2, 6)]
            assert all(map(torch.equal, got, uneven[rank::2]))

        on_ranks(body, backend="uneven")

    def test_results_go_into_any_memory(self):
        def body(group):
            rank = group.rank
            xs = [part(r, 4, 6) for r in range(2)]
            x, total = xs[rank].clone(), xs[0] + xs[1]
            strided = torch.zeros(6, 4).t()
            assert group.all_reduce(x, out=strided) is strided
            assert torch.equal(strided, total)
            for call, wanted in (
                (lambda out: group.all_gather(x, 1, out=out), torch.cat(xs, 1)),
                (lambda out: group.reduce_scatter(x, 1, out=out), total.chunk(2, 1)[rank]),
                (lambda out: group.all_to_all(x, 1, 0, out=out), torch.cat([y.chunk(2, 1)[rank] for y in xs])),
                (lambda out: group.broadcast(x, 1, out=out), xs[1]),
                (lambda out: group.scatter(xs if rank == 0 else None, out=out), xs[rank]),
            ):
                out = torch.zeros(wanted.shape[::-1]).t()
                assert call(out) is out
                assert torch.equal(out, wanted)

            leaf = x.clone().requires_grad_()
            assert group.all_reduce(leaf, out=leaf) is leaf
            assert torch.equal(leaf.detach(), total)

        on_ranks(body)

    def test_works_and_futures(self):
        def body(group):
            xs = [part(r, 4, 6).t() for r in range(2)]
            works = [
                (group.all_reduce(xs[group.rank], async_op=True), xs[0] + xs[1]),
                (group.all_gather(xs[group.rank], 1, async_op=True), torch.cat(xs, 1)),
                (group.broadcast(xs[group.rank], 1, async_op=True), xs[1]),
            ]
            for work, wanted in reversed(works):
                assert work.wait(LIMIT)
                assert work.wait(timedelta(seconds=LIMIT))
                assert torch.equal(work.result(), wanted)
                assert work.is_completed()
                assert work.exception() is None

            out = torch.zeros(4, 6).t()
            future = group.all_reduce(xs[group.rank], out=out, async_op=True).get_future()
            assert torch.equal(future.wait(), xs[0] + xs[1])
            assert torch.equal(out, xs[0] + xs[1])

        on_ranks(body)

    def test_sizes_are_exchanged_over_the_group(self):
        """Where backends take uneven shards. Gloo takes them in all_to_all alone, and these are even."""

        def body(group):
            rank = group.rank
            x, rows = part(rank, 2, 3), [part(r, 2, 3)[rank : rank + 1] for r in range(2)]
            assert torch.equal(group.all_to_all(x, 0, 1), torch.cat(rows, 1))
            assert torch.equal(group.scatter([part(0, 3), part(1, 3)] if rank else None, 1), part(rank, 3))
            with pytest.raises(CollectiveMismatchError, match="they may differ along dim 0 only"):
                group.all_gather(part(rank, 2, 2 + rank))

            with pytest.raises(CollectiveMismatchError, match="one dtype"):
                group.gather(part(rank, 2, dtype=torch.float64 if rank else torch.float32))

            assert torch.equal(group.all_gather(x), torch.cat([part(0, 2, 3), part(1, 2, 3)]))

        on_ranks(body, backend="all")


class TestMessages:
    def test_shape_and_dtype_go_before_the_message(self):
        def body(group):
            sent = [part(0, 3), part(0), part(0, 2, 0, 3), part(0, 1, 2, 1, 2, 1), part(0, 5, dtype=torch.int16)]
            sent += [part(0, 4, 6).t(), torch.tensor([True, False]), torch.zeros((1,) * 40)]
            for tag, x in enumerate(sent):
                if group.rank == 0:
                    group.send(x, 1, tag)
                else:
                    got = group.recv(0, tag)
                    assert (got.shape, got.dtype) == (x.shape, x.dtype)
                    assert torch.equal(got, x)

        on_ranks(body)

    def test_received_into_out_and_from_anybody(self):
        def body(group):
            if group.rank:
                group.send(part(group.rank, 4, 6), 0)
                group.barrier()
                group.send(part(9, 4), 0)
                return

            out = torch.zeros(6, 4).t()
            assert group.recv(2, out=out) is out
            assert torch.equal(out, part(2, 4, 6))
            assert torch.equal(group.recv(), part(1, 4, 6))
            group.barrier()
            with pytest.raises(CollectiveMismatchError, match=r"rank 1 sent float32\[4\].*float32\[3\]"):
                group.recv(1, out=torch.zeros(3))

            work = group.recv(2, async_op=True)
            assert torch.equal(work.get_future().wait(), part(9, 4))
            assert torch.equal(work.result(), part(9, 4))

        on_ranks(body, 3, backend="all")


class TestEndings:
    def test_timeout_of_a_collective_is_a_store_timeout(self):
        over = threading.Event()

        def body(group):
            if group.rank == 1:
                assert over.wait(LIMIT)
            else:
                with pytest.raises(StoreTimeoutError, match="not every rank had come after 0.2 s"):
                    group.all_reduce(part(0, 3), timeout=0.2)

                over.set()

        on_ranks(body)

    def test_timeout_of_an_exchange_is_a_store_timeout(self):
        over = threading.Event()

        def body(group):
            if group.rank == 1:
                assert over.wait(LIMIT)
            else:
                with pytest.raises(StoreTimeoutError):
                    group.all_gather(part(0, 3), timeout=0.2)

                over.set()

        on_ranks(body)


class TestOpening:
    def test_factory_must_give_a_process_group(self):
        def rank(ctx):
            with pytest.raises(PluginError, match="its factory returned str, not a torch.distributed.ProcessGroup"):
                ctx.open_group("wrong", backend="text")

        run_ranks(rank, 2)

    def test_group_says_who_it_is(self):
        def body(group):
            assert (group.name, group.world_size, group.device, group.backend) == ("foreign", 2, "cpu", "gloo")
            assert group.selection.asked_by == "argument"
            assert isinstance(group.process_group, dist.ProcessGroup)
            assert repr(group) == f"<ThreadGroup 'foreign' (gloo) rank {group.rank} of 2 on cpu>"

        on_ranks(body)

    def test_foreign_group_splits_into_its_own_kind(self):
        def body(group):
            inner = group.split([1, 0])
            with inner:
                assert inner.backend == "all"
                assert inner.rank == 1 - group.rank
                assert torch.equal(inner.all_gather(part(group.rank, 2)), torch.cat([part(1, 2), part(0, 2)]))

        on_ranks(body, backend="all")

    def test_group_is_chosen_by_the_block_around_it(self):
        def rank(ctx):
            with ctx.open_group("chosen") as group:
                return group.backend

        with use_backend(group="gloo"):
            assert run_ranks(rank, 2) == ["gloo"] * 2

        assert run_ranks(rank, 2) == ["samedevice"] * 2
