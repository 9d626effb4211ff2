"""Every collective as c10d has it, under every name: results go into the tensors given."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtorch_core import CollectiveMismatchError, UnsupportedTensorError

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from samedevice_ranks import LARGE, LIMIT, on_ranks, options, part


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
