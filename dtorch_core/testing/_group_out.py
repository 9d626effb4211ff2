"""``out=``: memory that the caller gives, which may be the input itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dtorch_core.errors import CollectiveMismatchError, UnsupportedTensorError
from dtorch_core.group import ThreadGroup
from dtorch_core.testing._group_base import COLLECTIVES, Collective, GroupConformance, chunks, coded, same
from dtorch_core.testing._harness import requires

TAKES_OUT = pytest.mark.parametrize("collective", [c for c in COLLECTIVES if c.out], ids=str)

MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda wanted: torch.full_like(wanted, -1),
    "transposed": lambda wanted: torch.full_like(wanted.mT.contiguous(), -1).mT if wanted.dim() > 1 else wanted * 0,
    "every second": lambda wanted: torch.full((*wanted.shape, 2), -1.0, device=wanted.device)[..., 0],
    "requires_grad": lambda wanted: torch.full_like(wanted, -1).requires_grad_(),
}

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "conjugate": Tensor.conj,
    "negative": torch._neg_view,
    "conjugate and negative": lambda memory: torch._neg_view(memory.conj()),
}


class OutTests(GroupConformance):
    """The result is in it, and it is what is returned."""

    @TAKES_OUT
    @pytest.mark.parametrize("memory", MEMORY)
    def test_out_holds_the_result(self, memory: str, collective: Collective, device: str) -> None:
        def body(group: ThreadGroup) -> None:
            xs = [coded(rank, (4, 2), group.device) for rank in range(2)]
            x = xs[group.rank].clone()
            wanted = collective.wanted(xs, group.rank)
            out = MEMORY[memory](torch.zeros(4, 2, device=group.device) if wanted is None else wanted)
            got = collective.call(group, x, out=out)
            assert same(x, xs[group.rank])
            if wanted is None:
                assert got is None
            else:
                assert got is out
                assert same(out, wanted)

        self.ranks(body, 2, device)

    @TAKES_OUT
    @pytest.mark.parametrize("view", VIEWS)
    def test_out_may_be_a_view_whose_memory_has_other_values(
        self, view: str, collective: Collective, device: str
    ) -> None:
        def body(group: ThreadGroup) -> None:
            xs = [torch.complex(coded(rank, (4, 2)), coded(rank + 7, (4, 2))).to(group.device) for rank in range(2)]
            wanted = collective.wanted(xs, group.rank)
            out = VIEWS[view](torch.zeros_like(xs[0] if wanted is None else wanted))
            collective.call(group, xs[group.rank], out=out if group.rank == 1 else None)
            if group.rank == 1:
                assert same(out, wanted)

        self.ranks(body, 2, device)

    @pytest.mark.parametrize("view", VIEWS)
    @pytest.mark.parametrize("op", ["all_reduce", "broadcast", "reduce"])
    def test_input_that_is_such_a_view_may_be_out(self, op: str, view: str, device: str) -> None:
        (collective,) = [c for c in COLLECTIVES if c.name == op]

        def body(group: ThreadGroup) -> None:
            xs = [torch.complex(coded(rank), coded(rank + 7)).to(group.device) for rank in range(2)]
            wanted = collective.wanted(xs, group.rank)
            x = VIEWS[view](torch.empty_like(xs[0])).copy_(xs[group.rank])
            collective.call(group, x, out=x)
            assert same(x, xs[group.rank] if wanted is None else wanted)

        self.ranks(body, 2, device)

    @pytest.mark.parametrize("op", ["all_reduce", "broadcast", "reduce"])
    @pytest.mark.parametrize("size", [6, 1_200_001])
    def test_out_may_be_the_input(self, op: str, size: int, device: str) -> None:
        (collective,) = [c for c in COLLECTIVES if c.name == op]

        def body(group: ThreadGroup) -> None:
            for layout in (lambda t: t, lambda t: torch.stack([t, t], 1)[:, 0]):
                xs = [coded(rank, (size,), group.device) for rank in range(3)]
                x = layout(xs[group.rank].clone())
                wanted = collective.wanted(xs, group.rank)
                got = collective.call(group, x, out=x)
                assert got is (None if wanted is None else x)
                assert same(x, xs[group.rank] if wanted is None else wanted)

        self.ranks(body, 3, device)

    @pytest.mark.parametrize("n", [1, 300])
    def test_out_of_all_to_all_may_be_the_input(self, n: int, device: str) -> None:
        """What arrives lies where what is sent was: nothing may be overwritten before it is read."""

        def body(group: ThreadGroup) -> None:
            for split_dim, concat_dim in ((0, 0), (1, 1)):
                xs = [coded(rank, (3 * n, 3 * n), group.device) for rank in range(3)]
                x = xs[group.rank].clone()
                wanted = torch.cat([chunks(y, 3, split_dim)[group.rank] for y in xs], concat_dim)
                assert group.all_to_all(x, split_dim, concat_dim, out=x) is x
                assert same(x, wanted)

        self.ranks(body, 3, device)

    @pytest.mark.parametrize("n", [1, 500_003])
    def test_out_may_be_a_part_of_the_input(self, n: int, device: str) -> None:
        """reduce_scatter into any chunk of its input, all_gather from any chunk of its output."""

        def body(group: ThreadGroup) -> None:
            for place in range(3):
                xs = [coded(rank, (3 * n,), group.device) for rank in range(3)]
                x = xs[group.rank].clone()
                chunk = x[n * place :][:n]
                assert group.reduce_scatter(x, out=chunk) is chunk
                assert same(chunk, chunks(xs[0] + xs[1] + xs[2], 3, 0)[group.rank])

                whole = torch.full((3 * n,), -1.0, device=group.device)
                chunk = whole[n * place :][:n]
                chunk.copy_(coded(group.rank, (n,), group.device))
                assert group.all_gather(chunk, out=whole) is whole
                assert same(whole, torch.cat([coded(rank, (n,), group.device) for rank in range(3)]))

                # In its own place, as c10d's in-place forms want it.
                whole = torch.full((3 * n,), -1.0, device=group.device)
                chunk = whole[n * group.rank :][:n]
                chunk.copy_(coded(group.rank, (n,), group.device))
                group.all_gather(chunk, out=whole)
                assert same(whole, torch.cat([coded(rank, (n,), group.device) for rank in range(3)]))

        self.ranks(body, 3, device)

    def test_out_of_scatter_may_be_any_of_the_inputs(self, device: str) -> None:
        def body(group: ThreadGroup) -> None:
            for place in range(3):
                xs = [coded(rank, (5,), group.device) for rank in range(3)]
                out = xs[place] if group.rank == 1 else torch.empty(5, device=group.device)
                wanted = xs[group.rank].clone()
                assert group.scatter(xs if group.rank == 1 else None, 1, out=out) is out
                assert same(out, wanted)

        self.ranks(body, 3, device)

    def test_out_that_overlaps_its_input(self, device: str) -> None:
        def body(group: ThreadGroup) -> None:
            storage = coded(group.rank, (8,), group.device)
            x, out = storage[:6], storage[1:7]
            wanted = coded(0, (6,), group.device) + coded(1, (6,), group.device)
            assert same(group.all_reduce(x, out=out), wanted)

        self.ranks(body, 2, device)

    @TAKES_OUT
    @requires("mismatch")
    def test_out_that_does_not_fit_is_refused_and_the_others_learn_it(self, collective: Collective) -> None:
        def body(group: ThreadGroup) -> None:
            x = coded(group.rank, (4, 2), group.device)
            guilty = group.world_size - 1  # the root, where there is one
            memory = torch.empty(9, 9, device=group.device)
            for out in (memory, torch.empty(4, 2, device=group.device, dtype=torch.int64)):
                if group.rank == guilty:
                    with pytest.raises(UnsupportedTensorError, match="out="):
                        collective.call(group, x, out=out)
                else:
                    with pytest.raises(CollectiveMismatchError, match=f"rank {guilty}.*out="):
                        collective.call(group, x)

            xs = [coded(rank, (4, 2), group.device) for rank in range(2)]
            assert same(collective.call(group, x), collective.wanted(xs, group.rank))

        self.ranks(body, 2)
