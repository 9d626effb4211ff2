"""What each collective gives: every shape, every world size, every layout, and nobody else's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from dtorch_core.errors import UnsupportedOperationError, UnsupportedTensorError
from dtorch_core.group import ThreadGroup
from dtorch_core.testing._group_base import (
    COLLECTIVES,
    EACH,
    PAIR_AND_MORE,
    WORLDS,
    Collective,
    GroupConformance,
    all_dtypes,
    bits,
    chunks,
    coded,
    of_dtype,
    same,
)
from dtorch_core.testing._harness import requires, undeclared
from dtorch_core.testing._subclasses import loud, quiet

LARGE = 1_200_001
"""Elements, an odd number: more than a backend would handle in one piece."""


def _even(world_size: int) -> list[tuple[int, ...]]:
    """Shapes whose first and last dims divide."""
    n = world_size
    return [(n,), (2 * n, 3, n), (n, 0, 2 * n), (n, n, 1, n)]


ODD = [(7,), (5, 3), (1, 2, 3), (0,), (3, 0, 2), (2, 1, 1, 9)]

_complex = torch.complex(torch.arange(48.0), torch.arange(48.0) + 500).reshape(8, 6)

LAYOUTS: dict[str, Callable[[int], Tensor]] = {
    "transposed": lambda rank: coded(rank, (8, 8)).t(),
    "every second column": lambda rank: coded(rank, (8, 16))[:, ::2],
    "permuted": lambda rank: coded(rank, (2, 8, 8)).permute(2, 0, 1),
    "slice of a large storage": lambda rank: coded(rank, (100, 8))[40:48],
    "expanded": lambda rank: coded(rank, (8, 1)).expand(8, 8),
    "overlapping": lambda rank: coded(rank, (20,)).as_strided((8, 8), (1, 1)),
    "conjugate": lambda rank: (_complex[:, :4] + rank).conj(),
    "negative": lambda rank: (_complex[:, :4] + 1j * rank).conj().imag,
    "conjugate and transposed": lambda rank: (_complex[:4, :4] * (rank + 1)).t().conj(),
    "requires_grad": lambda rank: coded(rank, (8, 8)).requires_grad_(),
    "of an inference tensor": lambda rank: _in_inference_mode(rank),
}


def _in_inference_mode(rank: int) -> Tensor:
    with torch.inference_mode():
        return coded(rank, (8, 8))


class CollectiveTests(GroupConformance):
    """Values, shapes and memory."""

    def _all_right(
        self,
        collectives: Sequence[Collective],
        inputs: Callable[[int], Tensor],
        world_size: int,
        device: str,
    ) -> None:
        """Every collective, with rank r's input ``inputs(r)``: the right result, and the input as it was."""

        def body(group: ThreadGroup) -> None:
            xs = [inputs(rank).to(group.device) for rank in range(world_size)]
            for collective in collectives:
                x = inputs(group.rank).to(group.device)
                got, wanted = collective.call(group, x), collective.wanted(xs, group.rank)
                assert same(got, wanted), f"{collective} of {x.shape}: got {got}, not {wanted}"
                assert same(x, xs[group.rank]), f"{collective} of {x.shape} changed its input"

        with torch.no_grad():
            self.ranks(body, world_size, device)

    @WORLDS
    def test_collective_of_even_shapes(self, world_size: int, device: str) -> None:
        for shape in _even(world_size):
            self._all_right(COLLECTIVES, lambda rank, s=shape: coded(rank, s), world_size, device)  # type: ignore[misc]

    @requires("uneven")
    @WORLDS
    def test_collective_of_odd_and_empty_shapes(self, world_size: int, device: str) -> None:
        for shape in ODD:
            self._all_right(COLLECTIVES, lambda rank, s=shape: coded(rank, s), world_size, device)  # type: ignore[misc]

    @WORLDS
    def test_collective_of_0_dim_tensors(self, world_size: int, device: str) -> None:
        scalars = [collective for collective in COLLECTIVES if collective.scalar]
        self._all_right(scalars, lambda rank: coded(rank, ()), world_size, device)

    @PAIR_AND_MORE
    def test_collective_that_needs_a_dim_refuses_0_dim_tensors(self, world_size: int) -> None:
        def body(group: ThreadGroup) -> None:
            for collective in COLLECTIVES:
                if not collective.scalar and "all_gather" not in collective.name:
                    with pytest.raises(ValueError, match="dim"):
                        collective.call(group, coded(group.rank, (), group.device))

            assert same(group.all_gather(coded(group.rank, (), group.device), -1).cpu(), coded(0, ()).add(
                torch.arange(float(world_size)) * 1000
            ))

        self.ranks(body, world_size)

    @requires("uneven")
    @PAIR_AND_MORE
    def test_collective_of_large_tensors(self, world_size: int, device: str) -> None:
        self._all_right(COLLECTIVES, lambda rank: coded(rank, (LARGE,)), world_size, device)

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_collective_of_any_layout(self, layout: str, device: str) -> None:
        self._all_right(COLLECTIVES, LAYOUTS[layout], 4 if "conjugate" in layout or "negative" in layout else 2, device)

    @requires("uneven")
    def test_all_gather_of_shards_that_differ(self, device: str) -> None:
        def body(group: ThreadGroup) -> None:
            for dim in (0, 1, 2, -1, -2, -3):
                for lengths in ([3, 1, 2], [0, 4, 0], [0, 0, 0], [1, 0, 5]):
                    shapes = [[2, 3, 2] for _ in lengths]
                    for shape, length in zip(shapes, lengths, strict=True):
                        shape[dim] = length

                    xs = [coded(rank, shape, group.device) for rank, shape in enumerate(shapes)]
                    got = group.all_gather(xs[group.rank], dim)
                    assert same(got, torch.cat(xs, dim)), f"lengths {lengths} along dim {dim}"

        self.ranks(body, 3, device)

    @requires("uneven")
    def test_all_gather_of_scalars_and_vectors(self) -> None:
        """A 0-dim tensor is one element."""

        def body(group: ThreadGroup) -> None:
            x = coded(group.rank, () if group.rank == 0 else (2,), group.device)
            assert group.all_gather(x).tolist() == [1000, 2000, 2001]

        self.ranks(body, 2)

    @requires("uneven")
    def test_list_collectives_of_shapes_that_differ(self, device: str) -> None:
        def body(group: ThreadGroup) -> None:
            shapes = [(2, 3), (), (0, 4)]
            xs = [coded(rank, shape, group.device) for rank, shape in enumerate(shapes)]
            assert same(group.all_gather_list(xs[group.rank]), xs)
            assert same(group.gather(xs[group.rank], 1), xs if group.rank == 1 else None)
            assert same(group.scatter(xs if group.rank == 2 else None, 2), xs[group.rank])
            sent = [[coded(10 * src + dst, (src, dst + 1), group.device) for dst in range(3)] for src in range(3)]
            assert same(group.all_to_all_list(sent[group.rank]), [row[group.rank] for row in sent])

        self.ranks(body, 3, device)

    @requires("uneven")
    @PAIR_AND_MORE
    def test_all_to_all_along_every_pair_of_dims(self, world_size: int, device: str) -> None:
        def body(group: ThreadGroup) -> None:
            for split_dim in range(-3, 3):
                for concat_dim in range(-3, 3):
                    # Sizes along the dim that is put together may differ.
                    shapes = [[4, 5, 3] for _ in range(world_size)]
                    if (split_dim - concat_dim) % 3:
                        for rank, shape in enumerate(shapes):
                            shape[concat_dim] = rank

                    xs = [coded(rank, shape, group.device) for rank, shape in enumerate(shapes)]
                    got = group.all_to_all(xs[group.rank], split_dim, concat_dim)
                    wanted = torch.cat([chunks(x, world_size, split_dim)[group.rank] for x in xs], concat_dim)
                    assert same(got, wanted), f"split_dim {split_dim}, concat_dim {concat_dim}"

        self.ranks(body, world_size, device)

    @requires("uneven")
    @WORLDS
    def test_reduce_scatter_along_every_dim(self, world_size: int, device: str) -> None:
        def body(group: ThreadGroup) -> None:
            xs = [coded(rank, (5, 2, 9), group.device) for rank in range(world_size)]
            for dim in range(-3, 3):
                got = group.reduce_scatter(xs[group.rank], dim)
                assert same(got, chunks(sum(xs, torch.zeros_like(xs[0])), world_size, dim)[group.rank]), f"dim {dim}"

        self.ranks(body, world_size, device)

    @EACH
    def test_subclass_is_taken_as_the_plain_tensor_that_it_is(self, collective: Collective, device: str) -> None:
        """The ranks' classes differ, and none of them is asked anything. What is given as ``out`` is returned."""

        def body(group: ThreadGroup) -> None:
            xs = [coded(rank, (4, 2), group.device) for rank in range(2)]
            wanted = collective.wanted(xs, group.rank)
            x = loud(xs[group.rank].clone(), group.rank)
            got = collective.call(group, x)
            if wanted is not None:
                assert {type(tensor) for tensor in (got if isinstance(got, list) else [got])} == {Tensor}

            assert same(got, wanted)
            assert same(quiet(x), xs[group.rank])
            if collective.out:
                out = loud(torch.zeros_like(xs[0] if wanted is None else wanted), group.rank)
                got = collective.call(group, x, out=out)
                assert got is (None if wanted is None else out)
                assert wanted is None or same(quiet(out), wanted)

        self.ranks(body, 2, device)

    @pytest.mark.parametrize("op", ["all_reduce", "broadcast", "reduce"])
    def test_subclass_may_be_reduced_in_place(self, op: str, device: str) -> None:
        (collective,) = [c for c in COLLECTIVES if c.name == op]

        def body(group: ThreadGroup) -> None:
            xs = [coded(rank, (4, 2), group.device) for rank in range(2)]
            wanted = collective.wanted(xs, group.rank)
            for _ in range(3):
                x = loud(xs[group.rank].clone(), group.rank)
                assert collective.call(group, x, out=x) is (None if wanted is None else x)
                assert same(quiet(x), xs[group.rank] if wanted is None else wanted)

        self.ranks(body, 2, device)

    @pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
    @pytest.mark.parametrize("dtype", all_dtypes(), ids=lambda dtype: str(dtype).removeprefix("torch."))
    def test_dtype_arrives_bit_for_bit(self, dtype: torch.dtype, device: str) -> None:
        """Every collective that moves values and computes none."""

        def body(group: ThreadGroup) -> None:
            xs = [of_dtype(rank, dtype, group.device) for rank in range(2)]
            mine = xs[group.rank]
            assert same(group.broadcast(mine, 1), xs[1])
            assert torch.equal(bits(group.all_gather(mine)), torch.cat([bits(x) for x in xs]))
            assert same(group.all_gather_list(mine), xs)
            assert same(group.gather(mine, 1), xs if group.rank == 1 else None)
            assert same(group.scatter(xs if group.rank == 1 else None, 1), mine)
            assert torch.equal(
                bits(group.all_to_all(mine, 0, 0)), torch.cat([bits(x[3 * group.rank :][:3]) for x in xs])
            )
            assert same(group.all_to_all_list([mine, mine[:2]] if group.rank else [mine[1:], mine[:2]]), [
                x for x in ([xs[0][1:], xs[1]] if group.rank == 0 else [xs[0][:2], xs[1][:2]])
            ])

        if "uneven" not in self.declared:
            pytest.skip("the lists differ in shape")

        if not self.carried([dtype]):
            pytest.skip("torch itself can't copy it")

        self.ranks(body, 2, device)

    @EACH
    def test_result_shares_no_memory(self, collective: Collective) -> None:
        """Writing into one's own result, or input, changes nobody else's."""

        def body(group: ThreadGroup) -> None:
            world_size = group.world_size
            x = coded(group.rank, (world_size, world_size), group.device)
            got = collective.call(group, x)
            group.barrier()
            x.fill_(-7)
            for tensor in got if isinstance(got, list) else [got]:
                if tensor is not None and group.rank % 2 == 0:
                    tensor.fill_(-1 - group.rank)

            group.barrier()
            if group.rank % 2:
                xs = [coded(rank, (world_size, world_size), group.device) for rank in range(world_size)]
                assert same(got, collective.wanted(xs, group.rank))
            elif got is not None:
                for tensor in got if isinstance(got, list) else [got]:
                    assert tensor.eq(-1 - group.rank).all()

        self.ranks(body, 4)

    @requires("uneven")
    @EACH
    def test_result_shares_no_memory_where_tensors_are_large(self, collective: Collective) -> None:
        def body(group: ThreadGroup) -> None:
            x = coded(group.rank, (LARGE,), group.device)
            got = collective.call(group, x)
            group.barrier()
            x.fill_(-7)
            if got is not None and group.rank == 0:
                for tensor in got if isinstance(got, list) else [got]:
                    tensor.fill_(-1)

            group.barrier()
            if group.rank == 1:
                assert same(got, collective.wanted([coded(rank, (LARGE,), group.device) for rank in range(2)], 1))

        self.ranks(body, 2)

    @requires("rank_order")
    @pytest.mark.parametrize("size", [5, LARGE])
    def test_floats_are_added_in_rank_order_on_every_rank_and_in_every_run(self, size: int, device: str) -> None:
        def values(rank: int) -> Tensor:
            generator = torch.Generator().manual_seed(rank)
            return (torch.randn(size, generator=generator) * 10.0 ** (3 * rank)).to(device)

        wanted = values(0)
        for rank in range(1, 3):
            wanted = wanted + values(rank)

        def body(group: ThreadGroup) -> None:
            x = values(group.rank)
            for _ in range(3):
                assert same(group.all_reduce(x), wanted)
                assert same(group.reduce(x, 1), wanted if group.rank == 1 else None)
                if "uneven" in self.declared:
                    assert same(group.reduce_scatter(x), chunks(wanted, 3, 0)[group.rank])

        self.ranks(body, 3, device)

    def test_result_does_not_require_grad(self) -> None:
        def body(group: ThreadGroup) -> None:
            x = coded(group.rank, (2, 2), group.device).requires_grad_()
            for collective in COLLECTIVES:
                got = collective.call(group, x * 1.0)
                for tensor in got if isinstance(got, list) else [got]:
                    assert tensor is None or not tensor.requires_grad, collective.name

        self.ranks(body, 2)

    def test_result_is_of_its_own_ranks_inference_mode(self) -> None:
        """Whichever thread does the work."""

        def body(group: ThreadGroup) -> None:
            for turn in range(20):
                for collective in COLLECTIVES:
                    with torch.inference_mode((group.rank + turn) % 2 == 0):
                        got = collective.call(group, coded(group.rank, (2, 2), group.device))

                    for tensor in got if isinstance(got, list) else [got]:
                        if tensor is not None:
                            assert tensor.is_inference() == ((group.rank + turn) % 2 == 0), collective.name

        self.ranks(body, 2)

    @undeclared("uneven")
    def test_uneven_shapes_are_refused_on_every_rank(self) -> None:
        def body(group: ThreadGroup) -> None:
            x = coded(group.rank, (group.rank + 1,), group.device)
            even = coded(group.rank, (3, 2), group.device)
            calls: list[tuple[Callable[..., object], tuple[object, ...]]] = [
                (group.all_gather, (x,)),
                (group.all_gather_list, (x,)),
                (group.gather, (x,)),
                (group.all_to_all_list, ([x, x],)),
                (group.scatter, ([x, even[0]] if group.rank == 0 else None,)),
                (group.reduce_scatter, (even,)),
                (group.all_to_all, (even, 0, 1)),
            ]
            for call, arguments in calls:
                with pytest.raises(UnsupportedOperationError, match="uneven"):
                    call(*arguments)

            assert same(group.all_reduce(coded(0, device=group.device)), coded(0, device=group.device) * 2)

        self.ranks(body, 2)

    @pytest.mark.parametrize("kind", ["sparse", "expanded out", "not a tensor"])
    def test_what_cannot_be_exchanged_is_refused(self, kind: str) -> None:
        def body(group: ThreadGroup) -> None:
            good = coded(group.rank, (2, 2), group.device)
            for collective in COLLECTIVES:
                if kind == "expanded out":
                    if collective.name in ("all_reduce", "broadcast"):
                        out = torch.zeros(1, 2, device=group.device).expand(2, 2)
                        with pytest.raises(UnsupportedTensorError, match="expanded"):
                            collective.call(group, good, out=out)
                elif collective.name not in ("scatter", "all_to_all_list"):
                    with pytest.raises(UnsupportedTensorError):
                        collective.call(group, good.to_sparse() if kind == "sparse" else "text")

            assert same(group.all_reduce(good), coded(0, (2, 2), group.device) + coded(1, (2, 2), group.device))

        self.ranks(body, 2)
