"""The samedevice group: the contract of every group, and what is this one's own: its c10d surface."""

import inspect
import os
import random
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from dtorch_core import (
    AbortedError,
    CollectiveMismatchError,
    PeerLostError,
    StoreTimeoutError,
    UnsupportedOperationError,
    UnsupportedTensorError,
    streams,
)
from dtorch_core.testing import Background, ThreadGroupTests, run_ranks

LIMIT = 20.0
LARGE = 1_200_001


class TestSameDeviceGroupConforms(ThreadGroupTests):
    backend = "samedevice"


def on_ranks(body, world_size=2, timeout=LIMIT):
    """``body(process_group, group)`` on every rank."""

    def rank(ctx):
        with ctx.open_group("own", backend="samedevice", timeout=timeout) as group:
            return body(group.process_group, group)

    return run_ranks(rank, world_size, 2 * LIMIT)


def part(rank, *shape, dtype=torch.float32):
    """Values that differ by position and rank."""
    return torch.arange(torch.Size(shape).numel()).add(1000 * (rank + 1)).to(dtype).reshape(shape)


def options(name, **values):
    made = getattr(c10d, name)()
    for key, value in values.items():
        setattr(made, key, value)

    return made


def newest(module, *names):
    """The function under the newest of its names that this torch has; the older ones warn."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


class TestCollectivesInPlace:
    """As c10d has them: results go into the tensors given."""

    @pytest.mark.parametrize(("world_size", "size"), [(1, 5), (2, 5), (3, 5), (8, 5), (2, LARGE), (3, LARGE // 2)])
    def test_every_collective_under_every_name(self, world_size, size):
        def body(pg, group):
            rank, n = pg.rank(), pg.size()
            xs = [part(r, size) for r in range(n)]

            def check(work, outputs, wanted):
                assert work.wait()
                for output, value in zip(outputs, wanted, strict=True):
                    assert torch.equal(output, value)

            x = xs[rank].clone()
            check(pg.allreduce([x]), [x], [sum(xs)])
            x, y = xs[rank].clone(), xs[rank] * 2
            check(pg.allreduce_coalesced([x, y], options("AllreduceCoalescedOptions")), [x, y], [sum(xs), 2 * sum(xs)])
            x = xs[rank].clone()
            check(
                pg.reduce([x], options("ReduceOptions", rootRank=n - 1)),
                [x],
                [sum(xs) if rank == n - 1 else xs[rank]],
            )
            x = xs[rank].clone()
            check(pg.broadcast([x], options("BroadcastOptions", rootRank=n - 1)), [x], [xs[-1]])
            outs = [torch.zeros(size) for _ in range(n)]
            check(pg.allgather([outs], [xs[rank]]), outs, xs)
            twice = [[torch.zeros(size), torch.zeros(2)] for _ in range(n)]
            check(
                pg.allgather_coalesced(twice, [xs[rank], xs[rank][:2] + 1]),
                [t for row in twice for t in row],
                [t for x in xs for t in (x, x[:2] + 1)],
            )
            outs = [torch.zeros(size) for _ in range(n)]
            check(pg.gather([outs] if rank == 0 else [], [xs[rank]]), outs, xs if rank == 0 else outs)
            out = torch.zeros(n * size if rank == n - 1 else 0)
            check(
                pg.gather_single(out, xs[rank], options("GatherOptions", rootRank=n - 1)),
                [out],
                [torch.cat(xs) if rank == n - 1 else out],
            )
            out = torch.zeros(size)
            check(pg.scatter([out], [xs] if rank == 0 else []), [out], [xs[rank]])
            outs = [torch.zeros(size) for _ in range(n)]
            check(pg.alltoall(outs, [xs[rank] + r for r in range(n)]), outs, [x + rank for x in xs])
            out = torch.zeros(size)
            check(pg.reduce_scatter([out], [[xs[rank] * (r + 1) for r in range(n)]]), [out], [sum(xs) * (rank + 1)])

            whole = torch.cat([xs[rank] * (r + 1) for r in range(n)])
            for name in ("all_gather_single", "_allgather_base"):
                for shape in ((n * size,), (n, size)):
                    out = torch.zeros(shape)
                    check(getattr(pg, name)(out, xs[rank]), [out], [torch.cat(xs).reshape(shape)])

            for name in ("reduce_scatter_single", "_reduce_scatter_base"):
                for given in (whole, whole.reshape(n, size)):
                    out = torch.zeros(size)
                    check(getattr(pg, name)(out, given), [out], [sum(xs) * (rank + 1)])

            for name in ("all_to_all_single", "alltoall_base"):
                out = torch.zeros(n * size)
                check(getattr(pg, name)(out, whole, [], []), [out], [torch.cat([x * (rank + 1) for x in xs])])

            for name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"):
                outs = [torch.zeros(n * size), torch.zeros(n, 2)]
                wanted = [torch.cat(xs), torch.stack([x[:2] for x in xs])]
                check(getattr(pg, name)(outs, [xs[rank], xs[rank][:2]]), outs, wanted)

            for name in ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"):
                outs = [torch.zeros(size), torch.zeros(1)]
                inputs = [whole, xs[rank][:n] if size >= n else part(rank, n)]
                wanted = [sum(xs) * (rank + 1), sum(part(r, n) for r in range(n))[rank : rank + 1]]
                check(getattr(pg, name)(outs, inputs), outs, wanted)

            assert pg.barrier().wait()
            assert pg.barrier(opts=options("BarrierOptions")).wait()

        on_ranks(body, world_size)

    def test_all_to_all_single_with_split_sizes(self):
        def body(pg, group):
            rank, n = pg.rank(), pg.size()
            sizes = [[src + dst for dst in range(n)] for src in range(n)]
            xs = [part(src, sum(sizes[src]), 2) for src in range(n)]
            got = torch.zeros(sum(sizes[src][rank] for src in range(n)), 2)
            pg.all_to_all_single(got, xs[rank], [row[rank] for row in sizes], sizes[rank]).wait()
            assert torch.equal(got, torch.cat([x.split(row)[rank] for x, row in zip(xs, sizes, strict=True)]))

        on_ranks(body, 3)

    def test_outputs_of_any_layout(self):
        def body(pg, group):
            rank = pg.rank()
            x = part(rank, 4, 6)
            storage = torch.zeros(6, 8)
            outs = [storage[:, :4].t(), storage[:, 4:].t()]
            pg.allgather([outs], [x]).wait()
            assert torch.equal(outs[0], part(0, 4, 6))
            assert torch.equal(outs[1], part(1, 4, 6))
            strided = torch.stack([x, x], 2)[..., 0]
            pg.allreduce([strided]).wait()
            assert torch.equal(strided, part(0, 4, 6) + part(1, 4, 6))
            columns = torch.zeros(2, 8)[:, ::2]
            pg.reduce_scatter([columns], [[x[:2, :4], x[2:, 2:]]]).wait()
            both = part(0, 4, 6) + part(1, 4, 6)
            assert torch.equal(columns, both[:2, :4] if rank == 0 else both[2:, 2:])
            conjugate = torch.complex(x, x + 1).conj()
            pg.allreduce([conjugate]).wait()
            assert torch.equal(conjugate.resolve_conj(), torch.complex(both, -both - 2))

        on_ranks(body)

    def test_in_place_forms(self):
        """An input that is its own part of the output, and an output that is its own part of the input."""

        def body(pg, group):
            rank, n = pg.rank(), pg.size()
            for size in (4, LARGE):
                whole = torch.zeros(n * size)
                whole[rank * size :][:size] = part(rank, size)
                pg.all_gather_single(whole, whole[rank * size :][:size]).wait()
                assert torch.equal(whole, torch.cat([part(r, size) for r in range(n)]))
                whole = part(rank, n * size)
                mine = whole[rank * size :][:size]
                pg.reduce_scatter_single(mine, whole).wait()
                assert torch.equal(mine, sum(part(r, n * size) for r in range(n))[rank * size :][:size])

        on_ranks(body, 3)

    def test_ops_and_factors(self):
        def body(pg, group):
            rank = pg.rank()
            xs = [part(r, 6) for r in range(3)]
            wanted = {
                dist.ReduceOp.SUM: xs[0] + xs[1] + xs[2],
                dist.ReduceOp.AVG: (xs[0] + xs[1] + xs[2]) / 3,
                dist.ReduceOp.PRODUCT: xs[0] * xs[1] * xs[2],
                dist.ReduceOp.MIN: xs[0],
                dist.ReduceOp.MAX: xs[2],
            }
            for op, value in wanted.items():
                for given in (options("AllreduceOptions", reduceOp=op), op, dist.ReduceOp(op)):
                    x = xs[rank].clone()
                    pg.allreduce([x], given).wait()
                    assert torch.equal(x, value), op

            for dtype in (torch.float32, torch.float16, torch.complex64):
                whole = [part(r, 3, 4, dtype=dtype) / 4 for r in range(3)]
                premul = dist._make_nccl_premul_sum(0.5)
                x, out = whole[rank].clone(), torch.zeros(4, dtype=dtype)
                pg.reduce_scatter_single(out, x, options("ReduceScatterOptions", reduceOp=premul)).wait()
                assert torch.equal(out, sum(t / 2 for t in whole)[rank])
                pg.allreduce([x], options("AllreduceOptions", reduceOp=premul)).wait()
                assert torch.equal(x, sum(t / 2 for t in whole))

            x, premul = part(rank, 2), dist._make_nccl_premul_sum(torch.tensor([2.0]))
            pg.allreduce([x], options("AllreduceOptions", reduceOp=premul)).wait()
            assert torch.equal(x, sum(2 * part(r, 2) for r in range(3)))
            with pytest.raises(UnsupportedTensorError, match="premul_sum"):
                pg.allreduce([part(rank, 2, dtype=torch.int32)], dist._make_nccl_premul_sum(0.5))

            with pytest.raises(CollectiveMismatchError, match="premul_sum by 0.5"):
                pg.allreduce([x], dist._make_nccl_premul_sum(0.5 if rank == 0 else 0.25)).wait()

            bits = [part(r, 5, dtype=torch.int16) for r in range(3)]
            x = bits[rank].clone()
            pg.allreduce([x], dist.ReduceOp.BXOR).wait()
            assert torch.equal(x, bits[0] ^ bits[1] ^ bits[2])

        on_ranks(body, 3)

    def test_short_forms_of_the_bindings(self):
        """One tensor for a list, a root, an op or a timeout for the options; by position or by name."""

        def body(pg, group):
            rank, n = pg.rank(), pg.size()
            xs = [part(r, 3) for r in range(n)]
            soon = timedelta(seconds=LIMIT)
            x = xs[rank].clone()
            pg.allreduce(x, dist.ReduceOp.MAX, soon).wait()
            assert torch.equal(x, xs[-1])
            x = xs[rank].clone()
            pg.allreduce(x, op=dist.ReduceOp.MIN, timeout=soon).wait()
            assert torch.equal(x, xs[0])
            x = xs[rank].clone()
            pg.broadcast(x, 1).wait()
            assert torch.equal(x, xs[1])
            x = xs[rank].clone()
            pg.broadcast(x, root=0, timeout=soon).wait()
            assert torch.equal(x, xs[0])
            x = xs[rank].clone()
            pg.reduce(x, 1, dist.ReduceOp.MAX).wait()
            assert torch.equal(x, xs[-1] if rank == 1 else xs[rank])
            outs = [torch.zeros(3) for _ in range(n)]
            pg.allgather(outs, xs[rank], soon).wait()
            assert torch.equal(torch.stack(outs), torch.stack(xs))
            outs = [torch.zeros(3) for _ in range(n)]
            pg.gather(outs if rank == 1 else [], xs[rank], 1).wait()
            assert torch.equal(torch.stack(outs), torch.stack(xs) if rank == 1 else torch.zeros(n, 3))
            out = torch.zeros(3)
            pg.scatter(out, xs if rank == 1 else [], 1, soon).wait()
            assert torch.equal(out, xs[rank])
            out = torch.zeros(3)
            pg.reduce_scatter(out, [xs[rank]] * n, dist.ReduceOp.MAX).wait()
            assert torch.equal(out, xs[-1])
            outs = [torch.zeros(3) for _ in range(n)]
            pg.alltoall(outs, [xs[rank]] * n, soon).wait()
            assert torch.equal(torch.stack(outs), torch.stack(xs))
            out = torch.zeros(n * 3)
            pg.all_to_all_single(out, torch.cat([xs[rank]] * n), [], [], soon).wait()
            assert torch.equal(out, torch.cat(xs))
            pg.barrier(soon).wait()
            pg.barrier(timeout=soon).wait()

        on_ranks(body)


def four():
    return torch.zeros(4)


class TestArguments:
    """What is wrong with one rank's call is raised there, and told to the others."""

    WRONG = {
        "no list for each rank": lambda pg: pg.allgather([[torch.zeros(2)]], [torch.zeros(2)]),
        "an output of another shape": lambda pg: pg.allgather([[torch.zeros(3), torch.zeros(3)]], [torch.zeros(2)]),
        "an output of another dtype": lambda pg: pg.reduce_scatter([torch.zeros(2).half()], [[torch.zeros(2)] * 2]),
        "an output of another size": lambda pg: pg.all_gather_single(torch.zeros(5), torch.zeros(2)),
        "an output of another size to gather": lambda pg: pg.gather_single(torch.zeros(5), torch.zeros(2), 1),
        "an output that cannot be cut": lambda pg: pg.all_gather_single(torch.zeros(4, 2).t(), torch.zeros(2, 2)),
        "split sizes that do not add up": lambda pg: pg.all_to_all_single(four(), four(), [1, 2], [2, 2]),
        "split sizes below zero": lambda pg: pg.all_to_all_single(four(), four(), [5, -1], [2, 2]),
        "too many split sizes": lambda pg: pg.all_to_all_single(four(), four(), [2, 1, 1], [2, 2]),
        "a size that does not divide": lambda pg: pg.all_to_all_single(torch.zeros(3), torch.zeros(3), [], []),
        "nothing to cut": lambda pg: pg.all_to_all_single(torch.tensor(1.0), torch.tensor(1.0), [], []),
        "a root that is not there": lambda pg: pg.broadcast([torch.zeros(2)], 2),
        "two tensors": lambda pg: pg.reduce([torch.zeros(2), torch.zeros(2)]),
        "no tensor": lambda pg: pg.allreduce([]),
        "no tensor to broadcast": lambda pg: pg.broadcast([], 0),
        "two dtypes": lambda pg: pg.allreduce([torch.zeros(2), torch.zeros(2).half()]),
        "lists of two lengths": lambda pg: pg.all_gather_single_coalesced([torch.zeros(4)], [torch.zeros(2)] * 2),
        "an expanded output": lambda pg: pg.allreduce([torch.zeros(1).expand(2)]),
        "a sparse tensor": lambda pg: pg.broadcast([torch.zeros(2).to_sparse()], 0),
        "two sparse tensors": lambda pg: pg.allreduce([torch.zeros(2).to_sparse()] * 2),
        "too few inputs": lambda pg: pg.alltoall([torch.zeros(2)] * 2, [torch.zeros(2)]),
    }

    @pytest.mark.parametrize("wrong", WRONG)
    def test_wrong_arguments_are_raised_at_once_and_told(self, wrong):
        def body(pg, group):
            x = part(pg.rank(), 3)
            if pg.rank() == 1:
                with pytest.raises((ValueError, UnsupportedTensorError)):
                    self.WRONG[wrong](pg)
            else:
                with pytest.raises(CollectiveMismatchError, match="rank 1: .* raised"):
                    pg.allreduce([x]).wait()

                assert torch.equal(x, part(0, 3))

            pg.allreduce([x]).wait()
            assert torch.equal(x, part(0, 3) + part(1, 3))

        on_ranks(body)

    def test_error_says_that_a_tensor_is_missing(self):
        def body(pg, group):
            with pytest.raises(ValueError, match="at least one tensor"):
                pg.allreduce([])

        on_ranks(body)

    def test_op_without_a_reduction(self):
        def body(pg, group):
            with pytest.raises((UnsupportedOperationError, UnsupportedTensorError)):
                pg.allreduce([part(0, 2)], dist.ReduceOp.BAND)

            for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
                with pytest.raises(UnsupportedTensorError, match="float8"):
                    pg.allreduce([torch.zeros(2).to(dtype)])

            pg.barrier().wait()

        on_ranks(body)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.11 says so, and checks
class TestSparse:
    """all_reduce of tensors that hold values at some places only; other ones on each rank."""

    @staticmethod
    def sparse(rank, rows=4):
        """Row ``rank`` twice, and the last one."""
        values = torch.arange(6.0).view(3, 2) + 100 * (rank + 1)
        return torch.sparse_coo_tensor([[rank, rank, rows - 1]], values, (rows, 2), check_invariants=True)

    @pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG])
    def test_values_at_one_place_are_added(self, op):
        def body(pg, group):
            x = self.sparse(pg.rank())
            work = pg.allreduce([x], op)
            work.wait()
            expected = sum(self.sparse(rank).to_dense() for rank in (0, 1))
            assert torch.equal(x.to_dense(), expected / 2 if op == dist.ReduceOp.AVG else expected)
            assert work.is_completed() and work.result()[0] is x

        on_ranks(body)

    def test_rank_without_values(self):
        def body(pg, group):
            x = self.sparse(0) if pg.rank() == 0 else torch.zeros(4, 2).to_sparse(1)
            pg.allreduce([x]).wait()
            assert torch.equal(x.to_dense(), self.sparse(0).to_dense())

        on_ranks(body)

    def test_future_without_a_wait(self):
        def body(pg, group):
            x, y = self.sparse(pg.rank()), part(pg.rank(), 3)
            future = pg.allreduce([x]).get_future()
            pg.allreduce([y]).wait()  # another call, before anybody waits for the first one
            (result,) = future.wait()
            assert torch.equal(result.to_dense(), sum(self.sparse(rank).to_dense() for rank in (0, 1)))
            assert torch.equal(y, part(0, 3) + part(1, 3))

        on_ranks(body)

    def test_streams_of_all_who_wait(self, monkeypatch):
        """The call, a future and a wait may be on three streams."""
        kept, ordered = [], []
        monkeypatch.setattr(streams, "keep_until_done", lambda tensor: kept.append(tensor.shape))
        monkeypatch.setattr(streams, "record", lambda tensor: "added up")
        monkeypatch.setattr(streams, "order_after", lambda event, tensor: ordered.append((event, tensor)))

        def body(pg, group):
            x = self.sparse(pg.rank())
            work = pg.allreduce([x])
            work.wait()
            work.wait()
            assert [tensor is x for event, tensor in ordered if event == "added up"] == [True]

        on_ranks(body, 1)
        assert kept == [(1, 2), (2, 2)], "what has been gathered"

    def test_op_that_needs_a_value_everywhere(self):
        def body(pg, group):
            with pytest.raises(UnsupportedOperationError, match="sum and avg, not max"):
                pg.allreduce([self.sparse(pg.rank())], dist.ReduceOp.MAX)

            pg.barrier().wait()

        on_ranks(body)

    OTHERS = {
        "dense": lambda: torch.zeros(4, 2),
        "another shape": lambda: torch.zeros(5, 2).to_sparse(1),
        "other sparse dims": lambda: torch.zeros(4, 2).to_sparse(),
    }

    @pytest.mark.parametrize("other", OTHERS)
    def test_ranks_that_do_not_fit(self, other):
        def body(pg, group):
            x = self.sparse(0) if pg.rank() == 0 else self.OTHERS[other]()
            with pytest.raises(CollectiveMismatchError):
                pg.allreduce([x]).wait()

            pg.barrier().wait()

        on_ranks(body)


class TestMonitoredBarrier:
    def test_rank_that_is_late_is_named_and_the_group_goes_on(self):
        def body(pg, group):
            if pg.rank() == 2:
                pg.barrier().wait()
            else:
                words = "Rank 2 failed to pass" if pg.rank() == 0 else "Rank 1 successfully reached"
                with pytest.raises(StoreTimeoutError, match=words):
                    pg.monitored_barrier(timedelta(seconds=0.1))

                pg.barrier().wait()

        on_ranks(body, 3)

    def test_all_that_are_late_are_named(self):
        def body(pg, group):
            if pg.rank() == 0:
                with pytest.raises(StoreTimeoutError, match="Ranks 1, 2 failed to pass"):
                    pg.monitored_barrier(0.1, wait_all_ranks=True)

            pg.barrier().wait()

        on_ranks(body, 3)

    def test_the_end_of_the_group_is_told_and_no_rank_is_blamed_for_it(self):
        def body(pg, group):
            if pg.rank() == 2:
                group.abort("no more data")
                return

            for _ in range(2):  # one that it ends, and one that comes after the end
                with pytest.raises(AbortedError, match="monitored_barrier.*no more data") as caught:
                    pg.monitored_barrier(LIMIT, wait_all_ranks=True)

                assert "failed to pass" not in str(caught.value)

        on_ranks(body, 3)

    def test_nobody_passes_before_all_are_there(self):
        here = []

        def body(pg, group):
            pg.barrier().wait()
            here.append(pg.rank())
            pg.monitored_barrier()
            assert len(here) == 3

        on_ranks(body, 3)


class TestMessages:
    """They speak of the group that the ranks opened, not of the store under it."""

    def test_late_rank_is_late_for_the_group(self):
        def body(pg, group):
            if group.rank == 0:
                with pytest.raises(StoreTimeoutError, match="^group 'own', rank 0, .*rank 1 had not come") as caught:
                    group.all_reduce(part(0, 3), timeout=0.1)

                assert "store" not in str(caught.value).partition("\n")[0]
                done.set()

            assert done.wait(LIMIT)

        done = threading.Event()
        on_ranks(body)

    def test_rank_that_left_has_left_the_group(self):
        def body(pg, group):
            if group.rank == 0:
                said = rf"^group 'own', rank 0, .*rank 1 \(pid {os.getpid()}\) has left group 'own' \(closed it or ret"
                with pytest.raises(PeerLostError, match=said):
                    group.all_reduce(part(0, 3))

                with pytest.raises(PeerLostError, match="^group 'own', rank 0, recv from rank 1 .*has left group"):
                    group.recv(src=1)

        on_ranks(body)


    def test_work_says_which_call_it_is_and_whether_it_is_over(self):
        def body(pg, group):
            here.wait(LIMIT)
            if group.rank == 1:
                assert told.wait(LIMIT)

            work = group.all_reduce(part(group.rank, 3), async_op=True)
            if group.rank == 0:
                assert repr(work) == "<Work all_reduce(float32[3], sum): under way>"
                told.set()

            work.wait()
            assert repr(work) == "<Work all_reduce(float32[3], sum): over>"
            gathered = group.all_gather(part(0, 2 + group.rank, 3 + group.rank), async_op=True)
            with pytest.raises(CollectiveMismatchError):
                gathered.wait()

            assert repr(gathered).endswith(", dim=0): failed with CollectiveMismatchError>")

        here, told = threading.Barrier(2), threading.Event()
        on_ranks(body)


class TestMisfits:
    """Shapes that only the peers know."""

    def test_message_that_does_not_fit_its_receiver(self):
        def body(pg, group):
            rank, n = pg.rank(), pg.size()
            three, same = torch.zeros(3), [torch.zeros(2) for _ in range(n)]
            odd = [torch.zeros(2 + (r == 1)) for r in range(n)]
            calls = [
                lambda: pg.gather([same] if rank == 0 else [], [part(rank, 2 + (rank == 1))]),
                lambda: pg.scatter([torch.zeros(2)], [odd] if rank == 0 else []),
                lambda: pg.alltoall(same, odd if rank == 0 else [torch.zeros(2)] * n),
                lambda: pg.all_to_all_single(torch.zeros(3), three, [1, 1, 1], [0, 2, 1] if rank else [1, 1, 1]),
                # One element would fill them all, and a float turn into an int.
                lambda: pg.gather([same] if rank == 0 else [], [torch.zeros(1 if rank == 1 else 2)]),
                lambda: pg.alltoall(same, [part(rank, 2, dtype=torch.int64 if rank == 1 else torch.float32)] * n),
            ]
            for call in calls:
                with pytest.raises(CollectiveMismatchError, match=r"rank \d sends .* to rank \d, which expects"):
                    call().wait()

                x = part(rank, 2)
                pg.allreduce([x]).wait()
                assert torch.equal(x, sum(part(r, 2) for r in range(n)))

        on_ranks(body, 3)

    def test_fingerprint_has_what_must_be_equal(self):
        def body(pg, group):
            rank = pg.rank()
            calls = [
                lambda: pg.allreduce([part(0, 2 + rank)]),
                lambda: pg.allreduce([part(0, 2, dtype=torch.float64 if rank else torch.float32)]),
                lambda: pg.allreduce([part(0, 2)] * (1 + rank)),
                lambda: pg.allreduce([part(0, 2)], dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM),
                lambda: pg.broadcast([part(0, 2)], rank),
                lambda: pg.reduce([part(0, 2)], rank),
                lambda: pg.allgather([[torch.zeros(2 + rank)] * 2], [torch.zeros(2 + rank)]),
                lambda: pg.reduce_scatter([torch.zeros(2 + rank)], [[torch.zeros(2 + rank)] * 2]),
                lambda: pg.barrier() if rank else pg.allreduce([part(0, 2)]),
                lambda: pg.gather([[torch.zeros(2)] * 2], [torch.zeros(2)], rank),
                lambda: pg.all_gather_single_coalesced([torch.zeros(4)] * (1 + rank), [torch.zeros(2)] * (1 + rank)),
            ]
            for number, call in enumerate(calls):
                with pytest.raises(CollectiveMismatchError, match=f"group 'own', collective #{number + 1}"):
                    call().wait()

        on_ranks(body)


class TestWorks:
    def test_work_follows_c10d(self):
        begun = threading.Event()

        def body(pg, group):
            x = part(pg.rank(), 3)
            if pg.rank() == 1:
                assert begun.wait(LIMIT)

            work = pg.allreduce([x])
            if pg.rank() == 0:
                assert not work.is_completed()
                assert work.exception() is None
                future = work.get_future()
                begun.set()
                (got,) = future.wait()
                assert got.data_ptr() == x.data_ptr()

            assert isinstance(work, dist._Work)
            assert work.wait(timedelta(seconds=LIMIT))
            assert work.wait(LIMIT)
            work.synchronize()
            assert work.is_completed()
            assert work.is_success()
            assert work.result()[0] is x
            assert torch.equal(x, part(0, 3) + part(1, 3))
            doubled = work.get_future().then(lambda done: done.value()[0] * 2).wait()
            assert torch.equal(doubled, 2 * x)

        on_ranks(body)

    def test_work_of_a_message_knows_its_source(self):
        def body(pg, group):
            if pg.rank() == 0:
                buffer = torch.zeros(3)
                work = pg.recv_anysource([buffer], 4)
                pg.barrier().wait()
                assert work.wait()
                assert work._source_rank() == work.source_rank() == 2
                assert torch.equal(buffer, part(2, 3))
                assert pg.recv([buffer], 2, 4).wait()
                assert torch.equal(buffer, part(3, 3))
                work = pg.recv([buffer], 2, 4)
                future = work.get_future()
                pg.barrier().wait()
                assert future.wait()[0].data_ptr() == buffer.data_ptr()
                assert torch.equal(buffer, part(4, 3))
                return

            pg.barrier().wait()
            if pg.rank() == 2:
                sent = pg.send([part(2, 3)], 0, 4)
                assert sent.wait() and sent.is_completed() and sent.get_future().wait() == []
                pg.send(part(3, 3), 0, 4).wait()

            pg.barrier().wait()
            if pg.rank() == 2:
                pg.send([part(4, 3)], 0, 4).wait()

        on_ranks(body, 3)

    def test_message_of_as_many_elements_fits_the_buffer_of_c10d(self):
        """torch.distributed.pipelining sends a number without dimensions, and receives one element."""

        def body(pg, group):
            if pg.rank() == 1:
                for message in (torch.tensor(7.0), part(1, 6).view(2, 3).t(), part(2, 6).view(2, 3)):
                    pg.send([message], 0).wait()

                group.send(torch.tensor(7.0), 0)
                return

            number, columns, rows = torch.zeros(1), torch.zeros(6), torch.zeros(6, 1)
            assert pg.recv([number], 1).wait() and number.tolist() == [7.0]
            assert pg.recv_anysource([columns]).wait() and torch.equal(columns.view(3, 2), part(1, 6).view(2, 3).t())
            assert pg.recv([rows], 1).wait() and torch.equal(rows.flatten(), part(2, 6))
            with pytest.raises(CollectiveMismatchError, match=r"rank 1 sent float32\[\].*float32\[1\]"):
                group.recv(1, out=number)

        on_ranks(body)

    def test_message_that_does_not_fit_the_buffer_fails_its_work(self):
        def body(pg, group):
            if pg.rank() == 1:
                pg.send([part(1, 4)], 0).wait()
                return

            work = pg.recv([torch.zeros(3)], 1)
            future = work.get_future()
            with pytest.raises(CollectiveMismatchError, match=r"rank 1 sent float32\[4\]"):
                future.wait()

            assert work.is_completed()
            assert not work.is_success()
            assert isinstance(work.exception(), CollectiveMismatchError)

        on_ranks(body)

    def test_callback_of_a_future_calls_a_collective_and_waits(self):
        asked = threading.Event()

        def body(pg, group):
            if pg.rank() == 1:
                assert asked.wait(LIMIT)  # the other rank's callback is there when this rank's call ends the first

            first = pg.allreduce([part(pg.rank(), 3)]).get_future()
            then = first.then(lambda done: pg.allreduce([done.value()[0] + pg.rank()]).get_future().wait()[0])
            asked.set()
            assert torch.equal(then.wait(), 2 * (part(0, 3) + part(1, 3)) + 1)

        on_ranks(body)

    def test_future_knows_the_timeout(self):
        over = threading.Event()

        def body(pg, group):
            if pg.rank() == 1:
                assert over.wait(LIMIT)
                return

            opts = options("AllreduceOptions", timeout=timedelta(seconds=0.1))
            try:
                with pytest.raises(StoreTimeoutError, match="rank 1 had not come after 0.1 s"):
                    pg.allreduce([part(0, 2)], opts).get_future().wait()
            finally:
                over.set()

        on_ranks(body)

    def test_timeout_of_the_options_and_of_the_wait(self):
        over = threading.Event()

        def body(pg, group):
            if pg.rank() == 1:
                assert over.wait(LIMIT)
                with pytest.raises(AbortedError, match="rank 0 gave up on collective #1, all_reduce"):
                    pg.allreduce([part(1, 2)])

                return

            first = pg.allreduce([part(0, 2)])
            second = pg.allreduce([part(0, 2)], options("AllreduceOptions", timeout=timedelta(seconds=0.1)))
            with pytest.raises(StoreTimeoutError, match="collective #1.*rank 1 had not come after 0.05 s"):
                first.wait(timedelta(seconds=0.05))

            with pytest.raises(AbortedError, match="rank 0 gave up"):
                second.wait()

            over.set()

        on_ranks(body)

    def test_zero_is_no_timeout(self):
        """c10d writes it where a caller names none."""

        def body(pg, group):
            if pg.rank() == 1:
                threading.Event().wait(0.1)

            x = part(pg.rank(), 2)
            assert pg.allreduce([x], options("AllreduceOptions", timeout=timedelta(0))).wait(timedelta(0))
            pg.set_timeout(timedelta(seconds=LIMIT))
            assert pg.barrier().wait()

        on_ranks(body)

    def test_calls_in_flight_on_one_tensor_happen_one_after_the_other(self):
        """Large ones too, which the ranks' threads share."""

        def body(pg, group):
            for size in (3, LARGE):
                for _ in range(10):
                    x = part(pg.rank(), size, dtype=torch.int64)
                    works = []
                    for turn in range(4):
                        works.append(pg.allreduce([x]))
                        works.append(pg.broadcast([x], turn % 3))

                    for work in works if pg.rank() else reversed(works):
                        work.wait()

                    assert torch.equal(x, 27 * sum(part(r, size, dtype=torch.int64) for r in range(3)))

        on_ranks(body, 3)


class TestTensors:
    def test_leaf_that_requires_grad_is_written_in_place(self):
        """As an optimizer does it: autograd sees a changed tensor, no history."""

        def body(pg, group):
            parameter = torch.nn.Parameter(part(pg.rank(), 3))
            loss = (parameter**2).sum()
            pg.allreduce([parameter]).wait()
            assert torch.equal(parameter.detach(), part(0, 3) + part(1, 3))
            assert parameter.is_leaf and parameter.requires_grad and parameter.grad_fn is None
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

            (parameter**2).sum().backward()
            assert torch.equal(parameter.grad, 2 * parameter.detach())

        with torch.autograd.set_multithreading_enabled(False):
            on_ranks(body)

    def test_tensors_made_in_inference_mode(self):
        """Some of them, in either role, whoever does the work; large ones too."""

        def body(pg, group):
            for turn in range(12):
                size = LARGE if turn % 3 == 0 else 4
                with torch.inference_mode((pg.rank() + turn) % 2 == 0):
                    x = part(pg.rank(), size)

                pg.allreduce([x]).wait()
                assert torch.equal(x, part(0, size) + part(1, size))
                outs = [torch.zeros(size), torch.zeros(size)]
                pg.allgather([outs], [x]).wait()
                assert torch.equal(outs[0], x) and torch.equal(outs[1], x)

        on_ranks(body)

    def test_computed_tensor_is_written_unseen_by_autograd(self):
        def body(pg, group):
            w = part(pg.rank(), 4).requires_grad_()
            saved = w.relu()
            split = saved.split(2)
            pg.allreduce([saved]).wait()
            assert torch.equal(saved, part(0, 4) + part(1, 4))
            pg.broadcast([saved], 1).wait()
            pg.send([w], 1 - pg.rank(), 0)
            pg.recv([saved], 1 - pg.rank(), 0).wait()
            assert torch.equal(split[1] + 0, part(1 - pg.rank(), 4)[2:])
            saved.sum().backward()
            assert torch.equal(w.grad, torch.ones(4))

        with torch.autograd.set_multithreading_enabled(False):
            on_ranks(body)

    @pytest.mark.parametrize("viewed", [torch.no_grad, torch.inference_mode, torch.enable_grad])
    def test_view_of_what_was_computed_since(self, viewed):
        """Autograd refuses to say of what such a view is computed: on one rank alone, the others must not wait."""

        def body(pg, group):
            x = part(pg.rank(), 4)
            with viewed():
                view, _ = x.split(2)

            if pg.rank() == 0:
                x *= torch.ones(4, requires_grad=True)

            pg.allreduce([view]).wait()
            assert torch.equal(x[:2], part(0, 4)[:2] + part(1, 4)[:2])
            pg.send([torch.zeros(2)], 1 - pg.rank(), 0)
            assert pg.recv([view], 1 - pg.rank(), 0).wait() and torch.equal(x[:2], torch.zeros(2))

        on_ranks(body)

    def test_received_tensor_of_a_sender_in_inference_mode(self):
        def body(pg, group):
            if pg.rank() == 0:
                with torch.inference_mode():
                    group.send(part(0, 3), 1)
            else:
                got = group.recv(0)
                assert not got.is_inference()
                got.add_(1)

        on_ranks(body)


class TestTorchDistributed:
    """torch's own functions, which take a group that no default group knows."""

    def test_functions_with_a_group(self):
        def body(pg, group):
            rank, n = pg.rank(), pg.size()
            x = part(rank, 3)
            dist.all_reduce(x, group=pg)
            assert torch.equal(x, part(0, 3) + part(1, 3))
            work = dist.all_reduce(x, dist.ReduceOp.MAX, group=pg, async_op=True)
            assert work.wait(timedelta(seconds=LIMIT))
            x = part(rank, 3)
            dist.broadcast(x, group_src=1, group=pg)
            assert torch.equal(x, part(1, 3))
            x = part(rank, 3)
            dist.reduce(x, group_dst=1, group=pg)
            assert torch.equal(x, part(0, 3) + part(1, 3) if rank == 1 else part(0, 3))
            outs = [torch.zeros(3) for _ in range(n)]
            dist.all_gather(outs, part(rank, 3), group=pg)
            assert torch.equal(outs[1], part(1, 3))
            out = torch.zeros(6)
            newest(dist, "all_gather_single", "all_gather_into_tensor")(out, part(rank, 3), group=pg)
            assert torch.equal(out, torch.cat([part(0, 3), part(1, 3)]))
            out = torch.zeros(3)
            newest(dist, "reduce_scatter_single", "reduce_scatter_tensor")(out, part(rank, 6), group=pg)
            assert torch.equal(out, (part(0, 6) + part(1, 6))[3 * rank :][:3])
            out = torch.zeros(3)
            dist.reduce_scatter(out, list(part(rank, 6).split(3)), group=pg)
            assert torch.equal(out, (part(0, 6) + part(1, 6))[3 * rank :][:3])
            out = torch.zeros(6)
            dist.all_to_all_single(out, part(rank, 6), group=pg)
            assert torch.equal(out, torch.cat([part(0, 6)[3 * rank :][:3], part(1, 6)[3 * rank :][:3]]))
            outs = [torch.zeros(3), torch.zeros(3)]
            dist.all_to_all(outs, list(part(rank, 6).split(3)), group=pg)
            assert torch.equal(outs[0], part(0, 6)[3 * rank :][:3])
            outs = [torch.zeros(3), torch.zeros(3)] if rank == 1 else None
            dist.gather(part(rank, 3), outs, group_dst=1, group=pg)
            assert rank == 0 or torch.equal(outs[0], part(0, 3))
            out = torch.zeros(3)
            dist.scatter(out, [part(0, 3), part(1, 3)] if rank == 1 else None, group_src=1, group=pg)
            assert torch.equal(out, part(rank, 3))
            if rank == 0:
                dist.isend(part(0, 3), group_dst=1, group=pg, tag=3).wait()
            else:
                dist.irecv(out, group_src=0, group=pg, tag=3).wait()
                assert torch.equal(out, part(0, 3))

            dist.barrier(group=pg)

        on_ranks(body)

    def test_functional_collectives_find_the_group_by_name(self):
        """C++ calls the Python methods, and waits for their Works."""
        from torch.distributed import _functional_collectives as functional

        register = torch._C._distributed_c10d._register_process_group
        unregister = torch._C._distributed_c10d._unregister_process_group
        torch._C._distributed_c10d._set_thread_isolation_mode(True)

        def body(pg, group):
            rank, n = pg.rank(), pg.size()
            register("functional", pg)
            try:
                got = functional.all_reduce(part(rank, 3), "sum", "functional")
                assert torch.equal(got + 0, sum(part(r, 3) for r in range(n)))
                gather = newest(functional, "all_gather_single", "all_gather_tensor")
                got = gather(part(rank, 3), 0, "functional")
                assert torch.equal(got + 0, torch.cat([part(r, 3) for r in range(n)]))
                scatter = newest(functional, "reduce_scatter_single", "reduce_scatter_tensor")
                got = scatter(part(rank, 3 * n), "avg", 0, "functional")
                assert torch.equal(got + 0, (sum(part(r, 3 * n) for r in range(n)) / n)[3 * rank :][:3])
                got = functional.all_to_all_single(part(rank, n), None, None, "functional")
                assert torch.equal(got + 0, torch.stack([part(r, n)[rank] for r in range(n)]))
                got = functional.broadcast(part(rank, 3), 1, "functional")
                assert torch.equal(got + 0, part(1, 3))
                many = functional.all_reduce_coalesced([part(rank, 3), part(rank, 2)], "max", "functional")
                for m, size in zip(many, (3, 2), strict=True):
                    assert torch.equal(m + 0, part(n - 1, size))

                gather = newest(functional, "all_gather_single_coalesced", "all_gather_into_tensor_coalesced")
                many = gather([part(rank, 3), part(rank, 2)], "functional")
                for m, size in zip(many, (3, 2), strict=True):
                    assert torch.equal(m + 0, torch.cat([part(r, size) for r in range(n)]))

            finally:
                unregister("functional")

        try:
            on_ranks(body, 3)
        finally:
            torch._C._distributed_c10d._set_thread_isolation_mode(False)

    def test_group_says_who_it_is(self):
        def body(pg, group):
            assert (pg.rank(), pg.size()) == (group.rank, 3)
            assert (pg.getRank(), pg.getSize()) == (group.rank, 3)
            assert pg.getBackendName() == "samedevice"
            assert pg.group_name == pg.getGroupName() == "own"
            pg.setGroupName("another")
            pg.setGroupDesc("what it is for")
            assert (pg.group_name, pg.group_desc) == ("another", "what it is for")
            assert isinstance(pg, dist.ProcessGroup)

        on_ranks(body, 3)

    def test_every_public_method_of_the_surface_is_there(self):
        from dtorch_samedevice_group.group import SameDeviceProcessGroup

        names = (
            "allreduce allreduce_coalesced reduce broadcast allgather allgather_coalesced all_gather_single "
            "_allgather_base all_gather_single_coalesced allgather_into_tensor_coalesced reduce_scatter "
            "reduce_scatter_single _reduce_scatter_base reduce_scatter_single_coalesced "
            "reduce_scatter_tensor_coalesced alltoall all_to_all_single alltoall_base gather scatter barrier send recv "
            "recv_anysource abort shutdown set_timeout"
        )
        for name in names.split():
            own = inspect.getattr_static(SameDeviceProcessGroup, name)  # not torch's, which raises
            assert inspect.isfunction(own), name


class TestThreads:
    def test_several_threads_of_a_rank_call_alike(self):
        """Calls that are all alike may come from several threads of a rank: whichever meet fit each other."""

        def body(pg, group):
            def use():
                for _ in range(50):
                    x = torch.ones(5)
                    pg.allreduce([x]).wait()
                    assert torch.equal(x, torch.full((5,), 2.0))

            threads = [Background(use) for _ in range(3)]
            for thread in threads:
                thread.result(LIMIT)

        on_ranks(body)

    def test_messages_from_several_threads(self):
        def body(pg, group):
            def talk(tag):
                for number in range(30):
                    group.send(part(number, 2), 1 - group.rank, tag)
                    assert torch.equal(group.recv(1 - group.rank, tag), part(number, 2))

            threads = [Background(lambda tag=tag: talk(tag)) for tag in range(4)]
            for thread in threads:
                thread.result(LIMIT)

        on_ranks(body)

    def test_random_programs(self):
        """Every rank runs the same program of random calls, sizes and waits, each in its own time."""
        rng = random.Random(7)
        names = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
        program = [(rng.choice(names), rng.choice([1, 7, 7, 200_000]), rng.random()) for _ in range(60)]

        def body(pg, group):
            own = random.Random(group.rank)
            n, kept = group.world_size, []

            def settle(name, size, work):
                xs = [part(r, size, n) for r in range(n)]
                wanted = {
                    "all_reduce": lambda: sum(xs),
                    "all_gather": lambda: torch.cat(xs),
                    "reduce_scatter": lambda: sum(xs)[:, group.rank : group.rank + 1],
                    "all_to_all": lambda: torch.cat([x[:, group.rank : group.rank + 1] for x in xs]),
                }[name]()
                assert torch.equal(work.result(), wanted), name

            for name, size, wait in program:
                x = part(group.rank, size, n)
                dims = {"reduce_scatter": (1,), "all_to_all": (1, 0)}.get(name, ())
                kept.append((name, size, getattr(group, name)(x, *dims, async_op=True)))
                while kept and wait < own.random():
                    settle(*kept.pop(own.randrange(len(kept))))

            for entry in kept:
                settle(*entry)

        on_ranks(body, 4)
