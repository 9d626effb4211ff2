"""What is wrong with a call, or does not fit the peers' calls: raised, and told to the others in words."""

import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtorch_core import (
    CollectiveMismatchError,
    PeerLostError,
    StoreTimeoutError,
    UnsupportedOperationError,
    UnsupportedTensorError,
)

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from samedevice_ranks import LIMIT, on_ranks, part


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
