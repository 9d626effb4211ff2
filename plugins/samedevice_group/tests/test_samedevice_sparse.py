"""all_reduce of sparse tensors."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtorch_core import CollectiveMismatchError, UnsupportedOperationError, streams

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from samedevice_ranks import on_ranks, part


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
