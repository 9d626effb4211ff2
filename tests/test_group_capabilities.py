"""What a ThreadGroup over torch's Gloo takes and what it refuses: by what is declared, arguments, and reduce ops."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtorch_core import UnsupportedOperationError, UnsupportedTensorError

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import gloo_groups
    from gloo_groups import on_ranks, part

registered = gloo_groups.registered


class TestCapabilities:
    """What is not declared is refused, on every rank alike and before anything is sent."""

    REFUSED = {
        "uneven": [
            lambda g: g.all_gather(part(0, 2 + g.rank)),
            lambda g: g.all_gather_list(part(0, 2 + g.rank)),
            lambda g: g.gather(part(0, 2 + g.rank)),
            lambda g: g.reduce_scatter(part(0, 3)),
            lambda g: g.all_to_all(part(0, 3, 2), 0, 1),
            # Even for rank 0, uneven for rank 1.
            lambda g: g.all_to_all_list([part(0, 2), part(0, 2 + g.rank)]),
            lambda g: g.scatter([part(0, 2), part(0, 3)] if g.rank == 0 else None),
        ],
        "bitwise_ops": [
            lambda g: g.all_reduce(part(0, 2, dtype=torch.int32), "bor"),
            lambda g: g.reduce(part(0, 2, dtype=torch.int32), 0, "band"),
            lambda g: g.reduce_scatter(part(0, 2, dtype=torch.int32), 0, "bxor"),
        ],
        "any_source": [lambda g: g.recv()],
        "self_send": [lambda g: g.send(part(0, 2), g.rank), lambda g: g.recv(g.rank)],
        "split": [lambda g: g.split([0, 1])],
    }
    BARE = {
        "p2p": [lambda g: g.send(part(0, 2), 1 - g.rank), lambda g: g.recv(1 - g.rank)],
        "async": [
            lambda g: g.all_reduce(part(0, 2), async_op=True),
            lambda g: g.all_gather(part(0, 2), async_op=True),
            lambda g: g.barrier(async_op=True),
            lambda g: g.send(part(0, 2), 1 - g.rank, async_op=True),
        ],
    }

    @pytest.mark.parametrize("backend", ["gloo", "bare"])
    def test_undeclared_use_is_refused(self, backend):
        refused = self.REFUSED if backend == "gloo" else self.REFUSED | self.BARE

        def body(group):
            for word, calls in refused.items():
                first = "p2p" if backend == "bare" and word in ("any_source", "self_send") else word
                for call in calls:
                    says = f"{backend!r} does not declare {first!r}; .*dtorch explain --kind group"
                    with pytest.raises(UnsupportedOperationError, match=says):
                        call(group)

            assert torch.equal(group.all_reduce(part(group.rank, 3)), part(0, 3) + part(1, 3))

        on_ranks(body, backend=backend)

    def test_tags_are_refused_where_they_are_not_declared(self):
        def body(group):
            with pytest.raises(UnsupportedOperationError, match="p2p"):
                group.send(part(0, 2), 1, 3)

        on_ranks(body, backend="bare")

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    def test_wrong_arguments_are_raised_there(self):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])

        def body(group):
            for call, error in (
                (lambda: group.all_reduce(part(0, 3).to_sparse()), UnsupportedTensorError),
                (lambda: group.all_reduce(nested), UnsupportedTensorError),
                (lambda: group.all_reduce("text"), UnsupportedTensorError),
                (lambda: group.all_reduce(part(0, 3), out=torch.zeros(2)), UnsupportedTensorError),
                (lambda: group.all_reduce(part(0, 3), "average"), UnsupportedOperationError),
                (lambda: group.all_gather(part(0, 3), 1), ValueError),
                (lambda: group.broadcast(part(0, 3), 2), ValueError),
            ):
                with pytest.raises(error, match="group 'foreign', rank"):
                    call()

            assert torch.equal(group.all_reduce(part(group.rank, 3)), part(0, 3) + part(1, 3))

        on_ranks(body)


class TestOps:
    @pytest.mark.parametrize("op", [dist.ReduceOp.MAX, dist.ReduceOp(dist.ReduceOp.MAX), "max"])
    def test_torchs_reduce_ops_stand_for_their_words(self, op):
        def body(group):
            x = torch.arange(4.0) * (1 - 2 * group.rank)
            reduced, scattered = group.reduce(x, op=op), group.reduce_scatter(x, op=op)
            assert (reduced is None) == (group.rank == 1)
            return group.all_reduce(x, op).tolist(), scattered.tolist()

        assert on_ranks(body) == [([0.0, 1.0, 2.0, 3.0], [0.0, 1.0]), ([0.0, 1.0, 2.0, 3.0], [2.0, 3.0])]

    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32], ids=str)
    def test_bitwise_ops(self, dtype):
        """By the rules of the table; of bool they are the logical ones."""
        raw = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 1, 0]])

        def body(group):
            return [group.all_reduce(raw[group.rank].to(dtype), op) for op in ("band", "bor", "bxor")]

        wanted = [torch.tensor(bits).to(dtype) for bits in ([1, 0, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0])]
        for found in on_ranks(body, 3, "bitwise"):
            assert all(map(torch.equal, found, wanted))

    @pytest.mark.parametrize(
        ("op", "error", "match"),
        [
            ("SUM", UnsupportedOperationError, "Did you mean 'sum'"),
            ("mean", UnsupportedOperationError, "Did you mean 'avg'"),
            ("prod", UnsupportedOperationError, "Did you mean 'product'"),
            ("nonsense", UnsupportedOperationError, "no reduce op 'nonsense'. Known: sum, .*bxor$"),
            (dist.ReduceOp.PREMUL_SUM, UnsupportedOperationError, "needs its factor"),
            (None, TypeError, "op must be a string .*, not None"),
            (["sum"], TypeError, "op must be a string"),
        ],
    )
    def test_other_ops_are_refused(self, op, error, match):
        def body(group):
            for call in (group.all_reduce, group.reduce, group.reduce_scatter):
                with pytest.raises(error, match=match):
                    call(torch.arange(4.0), op=op)

        on_ranks(body)
