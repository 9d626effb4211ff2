"""The same call again: what was planned for the first one is used for the next, and for no other."""

import gc
import threading
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from dtorch_samedevice_group.options import PREMUL_SUM, number_of
from torch.distributed import distributed_c10d as c10d

from dtorch_core import CollectiveMismatchError, StoreTimeoutError, UnsupportedTensorError
from dtorch_core.testing import run_ranks

LIMIT = 20.0
SIZE = 6


def on_ranks(body, world_size=2):
    """``body(process_group)`` on every rank."""

    def rank(ctx):
        with ctx.open_group("repeats", backend="samedevice", timeout=LIMIT) as group:
            return body(group.process_group)

    return run_ranks(rank, world_size, 2 * LIMIT)


def part(rank, turn=0, size=SIZE, dtype=torch.float32):
    """Values that differ by position, rank and turn."""
    return torch.arange(size).add(1000 * (rank + 1) + 100 * turn).to(dtype)


def options(name, **values):
    made = getattr(c10d, name)()
    for key, value in values.items():
        setattr(made, key, value)

    return made


def test_number_of_an_operation_is_that_of_c10d():
    kinds = dist.ReduceOp.RedOpType.__members__.values()
    ops = [dist.ReduceOp(kind) for kind in kinds if kind.value < PREMUL_SUM]
    ops += [dist._make_nccl_premul_sum(2.0), dist._make_nccl_premul_sum(torch.tensor([0.5]))]
    assert [number_of(op) for op in ops] == [op.op.value for op in ops] == [*range(PREMUL_SUM), PREMUL_SUM, PREMUL_SUM]


class TestTheSameCallAgain:
    @pytest.mark.parametrize("size", [SIZE, 1_500_000], ids=["small", "large"])
    def test_each_collective_three_times_with_other_tensors(self, size):
        def body(group):
            rank, ranks = group.rank(), range(group.size())
            for turn in range(3):
                x = part(rank, turn, size)
                group.allreduce([x], c10d.AllreduceOptions()).wait()
                assert torch.equal(x, sum(part(r, turn, size) for r in ranks))

                outputs = [torch.empty(size) for _ in ranks]
                group.allgather([outputs], [part(rank, turn, size)], c10d.AllgatherOptions()).wait()
                assert all(torch.equal(outputs[r], part(r, turn, size)) for r in ranks)

                out = torch.empty(size)
                inputs = [part(rank, turn, size) + 7 * to for to in ranks]
                group.reduce_scatter([out], [inputs], c10d.ReduceScatterOptions()).wait()
                assert torch.equal(out, sum(part(r, turn, size) + 7 * rank for r in ranks))

                outputs = [torch.empty(size) for _ in ranks]
                group.alltoall(outputs, inputs, c10d.AllToAllOptions()).wait()
                assert all(torch.equal(outputs[r], part(r, turn, size) + 7 * rank) for r in ranks)

                x = part(rank, turn, size)
                group.broadcast([x], c10d.BroadcastOptions()).wait()
                assert torch.equal(x, part(0, turn, size))
                group.barrier(c10d.BarrierOptions()).wait()

        on_ranks(body)

    @pytest.mark.parametrize("size", [SIZE, 1_500_000], ids=["small", "large"])
    def test_each_collective_of_one_tensor_three_times_with_others(self, size):
        def body(group):
            rank, ranks = group.rank(), range(group.size())
            for turn in range(3):
                whole = torch.empty(len(ranks) * size)
                group._allgather_base(whole, part(rank, turn, size), c10d.AllgatherOptions()).wait()
                assert torch.equal(whole, torch.cat([part(r, turn, size) for r in ranks]))

                whole[rank * size : (rank + 1) * size] = part(rank, turn, size) + 1  # in place
                mine = whole[rank * size : (rank + 1) * size]
                group._allgather_base(whole, mine, c10d.AllgatherOptions()).wait()
                assert torch.equal(whole, torch.cat([part(r, turn, size) + 1 for r in ranks]))

                out = torch.empty(size)
                given = torch.cat([part(rank, turn, size) + 7 * to for to in ranks])
                group._reduce_scatter_base(out, given, c10d.ReduceScatterOptions()).wait()
                assert torch.equal(out, sum(part(r, turn, size) + 7 * rank for r in ranks))

                group.alltoall_base(whole, given, [], [], c10d.AllToAllOptions()).wait()
                assert torch.equal(whole, torch.cat([part(r, turn, size) + 7 * rank for r in ranks]))

        on_ranks(body)

    def test_results_are_in_the_tensors_of_the_call(self):
        def body(group):
            for turn in range(2):
                x = part(group.rank(), turn)
                work = group.allreduce([x], c10d.AllreduceOptions())
                work.wait()
                assert work.result()[0] is x

        on_ranks(body)

    def test_a_call_in_place_teaches_nothing_about_one_that_is_not(self):
        def body(group):
            rank, ranks = group.rank(), range(group.size())
            shared = [part(rank) + to for to in ranks]
            group.alltoall(shared, shared, c10d.AllToAllOptions()).wait()
            inputs, outputs = [part(rank, 1) + to for to in ranks], [torch.zeros(SIZE) for _ in ranks]
            group.alltoall(outputs, inputs, c10d.AllToAllOptions()).wait()
            assert all(torch.equal(outputs[r], part(r, 1) + rank) for r in ranks)
            assert all(torch.equal(inputs[r], part(rank, 1) + r) for r in ranks)

        on_ranks(body)

    def test_no_tensor_of_an_earlier_call_is_kept(self):
        def body(group):
            x = part(group.rank())
            group.allreduce([x], c10d.AllreduceOptions()).wait()
            gone = weakref.ref(x)
            del x
            group.barrier().wait()
            gc.collect()
            return gone() is None

        assert on_ranks(body) == [True, True]


class TestACallThatDiffers:
    """In one thing only, from one that was made before."""

    def test_reduce_ops_and_factors(self):
        def body(group):
            rank, ranks = group.rank(), range(group.size())
            for op, wanted in (
                (dist.ReduceOp.SUM, sum(part(r) for r in ranks)),
                (dist.ReduceOp.MAX, part(1)),
                (dist.ReduceOp.MIN, part(0)),
                (dist._make_nccl_premul_sum(2.0), 2 * sum(part(r) for r in ranks)),
                (dist._make_nccl_premul_sum(3.0), 3 * sum(part(r) for r in ranks)),
                (dist.ReduceOp.SUM, sum(part(r) for r in ranks)),
            ):
                x = part(rank)
                group.allreduce([x], options("AllreduceOptions", reduceOp=op)).wait()
                assert torch.equal(x, wanted)

        on_ranks(body)

    def test_roots(self):
        def body(group):
            for root in (0, 1, 0):
                x = part(group.rank())
                group.broadcast([x], options("BroadcastOptions", rootRank=root)).wait()
                assert torch.equal(x, part(root))

        on_ranks(body)

    def test_dtypes_and_shapes(self):
        def body(group):
            rank, ranks = group.rank(), range(group.size())
            for dtype, size in ((torch.float32, 6), (torch.int64, 6), (torch.float32, 5), (torch.bfloat16, 6)):
                x = part(rank, size=size, dtype=dtype)
                group.allreduce([x], c10d.AllreduceOptions()).wait()
                wanted = sum(part(r, size=size, dtype=dtype).double() for r in ranks).to(dtype)
                assert torch.equal(x, wanted)

        on_ranks(body)

    def test_strides(self):
        def body(group):
            rank, ranks = group.rank(), range(group.size())
            for step in (1, 2, 3):
                x = part(rank, size=step * SIZE)[::step]
                group.allreduce([x], c10d.AllreduceOptions()).wait()
                assert torch.equal(x, sum(part(r, size=step * SIZE)[::step] for r in ranks))

        on_ranks(body)

    def test_ways_to_cut_a_tensor(self):
        def body(group):
            rank, ranks = group.rank(), range(group.size())
            wanted = torch.stack([part(r) for r in ranks])
            for turn in range(2):
                for whole in (
                    torch.zeros(2 * SIZE),
                    torch.zeros(2, SIZE),
                    torch.zeros(SIZE, 2).t(),
                    torch.zeros(2, 2 * SIZE)[:, ::2],
                    torch.zeros(2 * SIZE, 2)[:, turn],
                    torch.zeros(2, 2, SIZE // 2),
                ):
                    group._allgather_base(whole, part(rank), c10d.AllgatherOptions()).wait()
                    assert torch.equal(whole.reshape(2, SIZE), wanted), whole.stride()

                with pytest.raises(ValueError, match="contiguous"):
                    group._allgather_base(torch.zeros(2, 2, SIZE)[..., ::2], part(rank), c10d.AllgatherOptions())

        on_ranks(body)

    def test_split_sizes(self):
        def body(group):
            rank = group.rank()
            for turn, first in ((0, 2), (1, 5), (2, 2), (3, 0), (4, 5)):
                sizes, given = [first, SIZE - first], part(rank, turn)
                out = torch.empty(2 * sizes[rank])
                group.alltoall_base(out, given, [sizes[rank]] * 2, sizes, c10d.AllToAllOptions()).wait()
                assert torch.equal(out, torch.cat([part(r, turn).split(sizes)[rank] for r in (0, 1)]))

        on_ranks(body)

    def test_an_expanded_tensor_is_still_refused(self):
        def body(group):
            group.allreduce([part(group.rank())], c10d.AllreduceOptions()).wait()
            with pytest.raises(UnsupportedTensorError, match="expanded"):
                group.allreduce([torch.zeros(1).expand(SIZE)], c10d.AllreduceOptions())

        on_ranks(body)

    def test_a_layout_that_cannot_be_carried_is_still_refused(self):
        def body(group):
            group.allreduce([part(group.rank())], c10d.AllreduceOptions()).wait()
            with pytest.raises(UnsupportedTensorError, match="can't be carried"):
                group.allreduce([part(group.rank()).to_mkldnn()], c10d.AllreduceOptions())

        on_ranks(body)

    def test_a_tensor_that_requires_grad_arrives_detached(self):
        def body(group):
            ranks = range(group.size())
            for requires in (False, True, False):
                x = part(group.rank()).requires_grad_(requires)
                group.allreduce([x], c10d.AllreduceOptions()).wait()
                assert torch.equal(x.detach(), sum(part(r) for r in ranks))
                assert x.grad_fn is None

        on_ranks(body)

    def test_views_made_without_grad_and_tensors_of_inference_mode_are_written(self):
        def body(group):
            ranks = range(group.size())
            weight = torch.nn.Parameter(part(group.rank()))
            with torch.no_grad():
                view = weight.view(-1)

            with torch.inference_mode():
                frozen = part(group.rank())

            for x in (view, frozen, part(group.rank())):
                group.allreduce([x], c10d.AllreduceOptions()).wait()
                assert torch.equal(x, sum(part(r) for r in ranks))

        on_ranks(body)

    def test_a_rank_that_calls_something_else_is_told(self):
        def body(group):
            group.allreduce([part(group.rank())], c10d.AllreduceOptions()).wait()
            group.allreduce([part(group.rank(), size=5)], c10d.AllreduceOptions()).wait()
            with pytest.raises(CollectiveMismatchError, match="float32"):
                group.allreduce([part(group.rank(), size=5 + group.rank())], c10d.AllreduceOptions()).wait()

        on_ranks(body)

    def test_timeouts(self):
        come = threading.Event()

        def body(group):
            group.barrier(c10d.BarrierOptions()).wait()
            if group.rank() == 1:
                assert come.wait(LIMIT)
                return

            short = options("BarrierOptions", timeout=timedelta(milliseconds=50))
            with pytest.raises(StoreTimeoutError, match="rank 1"):
                group.barrier(short).wait()

            come.set()

        on_ranks(body)
