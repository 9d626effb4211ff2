"""Ranks that do not call the same: never a hang, never wrong data, and the message says who called what."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dtorch_core.errors import CollectiveMismatchError
from dtorch_core.group import ThreadGroup
from dtorch_core.testing._group_base import GroupConformance, coded, same
from dtorch_core.testing._harness import requires

Do = Callable[[ThreadGroup, Tensor], object]

# (a 4 x 4 tensor is given): what one rank calls, and what the others do.
DIFFERENT: dict[str, tuple[Do, Do]] = {
    "operation": (lambda g, x: g.all_reduce(x), lambda g, x: g.all_gather(x)),
    "operation without sizes": (lambda g, x: g.all_reduce(x), lambda g, x: g.broadcast(x)),
    "operation with sizes": (lambda g, x: g.all_gather(x), lambda g, x: g.all_gather_list(x)),
    "a barrier": (lambda g, x: g.barrier(), lambda g, x: g.all_reduce(x)),
    "a barrier and sizes": (lambda g, x: g.barrier(), lambda g, x: g.all_to_all(x, 0, 1)),
    "shape of all_reduce": (lambda g, x: g.all_reduce(x), lambda g, x: g.all_reduce(x[:3])),
    "dims of all_reduce": (lambda g, x: g.all_reduce(x), lambda g, x: g.all_reduce(x.reshape(2, 2, 4))),
    "dtype of all_reduce": (lambda g, x: g.all_reduce(x), lambda g, x: g.all_reduce(x.double())),
    "reduce op of all_reduce": (lambda g, x: g.all_reduce(x, "max"), lambda g, x: g.all_reduce(x)),
    "root of reduce": (lambda g, x: g.reduce(x, 0), lambda g, x: g.reduce(x, 1)),
    "reduce op of reduce": (lambda g, x: g.reduce(x, 0, "min"), lambda g, x: g.reduce(x, 0, "sum")),
    "root of broadcast": (lambda g, x: g.broadcast(x, 1), lambda g, x: g.broadcast(x, 0)),
    "shape of broadcast": (lambda g, x: g.broadcast(x[0]), lambda g, x: g.broadcast(x)),
    "dtype of broadcast": (lambda g, x: g.broadcast(x.long()), lambda g, x: g.broadcast(x)),
    "dim of all_gather": (lambda g, x: g.all_gather(x, 1), lambda g, x: g.all_gather(x, 0)),
    "other dims of all_gather": (lambda g, x: g.all_gather(x[:, :2]), lambda g, x: g.all_gather(x)),
    "number of dims of all_gather": (lambda g, x: g.all_gather(x[0]), lambda g, x: g.all_gather(x)),
    "dtype of all_gather": (lambda g, x: g.all_gather(x.half()), lambda g, x: g.all_gather(x)),
    "dtype of all_gather_list": (lambda g, x: g.all_gather_list(x.half()), lambda g, x: g.all_gather_list(x)),
    "shape of reduce_scatter": (lambda g, x: g.reduce_scatter(x[:, 1:]), lambda g, x: g.reduce_scatter(x)),
    "dim of reduce_scatter": (lambda g, x: g.reduce_scatter(x[:3], 1), lambda g, x: g.reduce_scatter(x[:3], 0)),
    "reduce op of reduce_scatter": (
        lambda g, x: g.reduce_scatter(x, 0, "product"),
        lambda g, x: g.reduce_scatter(x),
    ),
    "dims of all_to_all": (lambda g, x: g.all_to_all(x, 0, 1), lambda g, x: g.all_to_all(x, 1, 0)),
    "split size of all_to_all": (lambda g, x: g.all_to_all(x[:2], 0, 1), lambda g, x: g.all_to_all(x, 0, 1)),
    "dtype of all_to_all": (lambda g, x: g.all_to_all(x.half(), 0, 1), lambda g, x: g.all_to_all(x, 0, 1)),
    "dtype of all_to_all_list": (
        lambda g, x: g.all_to_all_list([x.half()] * g.world_size),
        lambda g, x: g.all_to_all_list([x] * g.world_size),
    ),
    "root of gather": (lambda g, x: g.gather(x, 1), lambda g, x: g.gather(x, 0)),
    "dtype of gather": (lambda g, x: g.gather(x.half()), lambda g, x: g.gather(x)),
    "root of scatter": (
        lambda g, x: g.scatter([x] * g.world_size, g.rank),
        lambda g, x: g.scatter([x] * g.world_size if g.rank == 0 else None, 0),
    ),
}

# A call that is wrong by itself.
WRONG: dict[str, tuple[Do, type[Exception], Do]] = {
    "a dim that is not there": (lambda g, x: g.all_gather(x, 2), ValueError, lambda g, x: g.all_gather(x, 1)),
    "a dim of reduce_scatter": (lambda g, x: g.reduce_scatter(x, -3), ValueError, lambda g, x: g.reduce_scatter(x, 1)),
    "a dim that is no number": (lambda g, x: g.all_to_all(x, "0", 1), TypeError, lambda g, x: g.all_to_all(x, 0, 1)),  # type: ignore[arg-type]
    "a rank that is not there": (lambda g, x: g.broadcast(x, 9), ValueError, lambda g, x: g.broadcast(x, 0)),
    "a rank below zero": (lambda g, x: g.gather(x, -1), ValueError, lambda g, x: g.gather(x, 1)),
    "a rank that is no number": (lambda g, x: g.reduce(x, "0"), TypeError, lambda g, x: g.reduce(x, 0)),  # type: ignore[arg-type]
    "an op that does not exist": (
        lambda g, x: g.all_reduce(x, "mean"),
        NotImplementedError,
        lambda g, x: g.all_reduce(x),
    ),
    "an op without a meaning": (
        lambda g, x: g.all_reduce(x.bool(), "avg"),
        TypeError,
        lambda g, x: g.all_reduce(x.long(), "avg"),
    ),
    "too few tensors": (
        lambda g, x: g.all_to_all_list([x]),
        ValueError,
        lambda g, x: g.all_to_all_list([x] * g.world_size),
    ),
    "no tensors": (
        lambda g, x: g.all_to_all_list(None),  # type: ignore[arg-type]
        ValueError,
        lambda g, x: g.all_to_all_list([x] * g.world_size),
    ),
    "tensors of two dtypes": (
        lambda g, x: g.all_to_all_list([x, *[x.half()] * (g.world_size - 1)]),
        TypeError,
        lambda g, x: g.all_to_all_list([x] * g.world_size),
    ),
    "a source without tensors": (lambda g, x: g.scatter(None, g.rank), ValueError, lambda g, x: g.scatter(None, 1)),
    "no tensor": (lambda g, x: g.all_reduce(None), TypeError, lambda g, x: g.all_reduce(x)),  # type: ignore[arg-type]
    "a sparse tensor": (lambda g, x: g.all_gather(x.to_sparse()), TypeError, lambda g, x: g.all_gather(x)),
    "a timeout that is none": (
        lambda g, x: g.all_reduce(x, timeout="soon"),  # type: ignore[arg-type]
        ValueError,
        lambda g, x: g.all_reduce(x),
    ),
}


class MismatchTests(GroupConformance):
    """Every rank raises at the same call, and the group goes on."""

    def _still_right(self, group: ThreadGroup) -> None:
        xs = [coded(rank, (3, 2), group.device) for rank in range(group.world_size)]
        assert same(group.all_gather(xs[group.rank]), torch.cat(xs))
        assert same(group.all_reduce(xs[group.rank]), sum(xs, torch.zeros_like(xs[0])))

    @requires("mismatch")
    def test_mismatch_has_the_methods_that_it_takes(self) -> None:
        self.has_methods_for("mismatch", "without them the ranks are told nothing of a call that is wrong by itself")

    @requires("mismatch")
    @pytest.mark.parametrize("different", DIFFERENT)
    def test_mismatch_raises_on_every_rank(self, different: str) -> None:
        odd_call, call = DIFFERENT[different]

        def body(group: ThreadGroup) -> str:
            x = coded(group.rank, (4, 4), group.device)
            for _ in range(2):
                with pytest.raises(CollectiveMismatchError, match=f"rank {1}") as caught:
                    (odd_call if group.rank == 1 else call)(group, x)

                self._still_right(group)

            return str(caught.value)

        for world_size in (2, 4):
            for text in self.ranks(body, world_size):
                assert all(f"rank {rank}" in text for rank in range(world_size)), f"no table of the ranks: {text}"
                if world_size > 2:
                    head = text.partition("\n")[0].removeprefix("group 'kit', rank")
                    assert "rank 1" in head, f"the odd rank is not named first: {text}"

    @requires("mismatch")
    @pytest.mark.parametrize("wrong", WRONG)
    def test_wrong_call_raises_there_and_is_told_to_the_others(self, wrong: str) -> None:
        wrong_call, error, call = WRONG[wrong]

        def body(group: ThreadGroup) -> None:
            x = coded(group.rank, (4, 4), group.device)
            for _ in range(2):
                if group.rank == 1:
                    with pytest.raises(error):
                        wrong_call(group, x)
                else:
                    with pytest.raises(CollectiveMismatchError, match="rank 1.*raised"):
                        call(group, x)

                self._still_right(group)

        self.ranks(body, 3)

    @requires("mismatch")
    def test_mismatch_of_every_rank_with_every_other(self) -> None:
        def body(group: ThreadGroup) -> None:
            x = coded(group.rank, (4, 4), group.device)
            calls: list[Callable[[], object]] = [
                lambda: group.all_reduce(x),
                lambda: group.all_gather(x),
                lambda: group.barrier(),
                lambda: group.scatter(None, 0),
            ]
            with pytest.raises(CollectiveMismatchError) as caught:
                calls[group.rank]()

            text = str(caught.value)
            assert "all_reduce(float32[4, 4], sum)" in text
            assert "all_gather(float32[4, 4], dim=0)" in text
            assert "barrier" in text
            assert "scatter" in text
            self._still_right(group)

        self.ranks(body, 4)

    @requires("mismatch", "async")
    def test_mismatch_among_many_in_flight(self) -> None:
        """Only the call that does not fit fails."""

        def body(group: ThreadGroup) -> None:
            xs = [coded(rank, (4, 4), group.device) for rank in range(2)]
            works = []
            for turn in range(12):
                op = "max" if turn % 4 == 3 and group.rank == 0 else "sum"
                works.append(group.all_reduce(xs[group.rank], op, async_op=True))
                works.append(group.all_gather(xs[group.rank][:, turn % 2 * group.rank :], async_op=True))

            for turn in range(12):
                for work, fits, wanted in (
                    (works[2 * turn], turn % 4 != 3, xs[0] + xs[1]),
                    (works[2 * turn + 1], turn % 2 == 0, torch.cat(xs)),
                ):
                    if fits:
                        assert same(work.result(), wanted)
                    else:
                        with pytest.raises(CollectiveMismatchError):
                            work.result()

        self.ranks(body, 2)

    @requires("mismatch", "split")
    def test_mismatch_of_splits(self) -> None:
        def body(group: ThreadGroup) -> None:
            with pytest.raises(CollectiveMismatchError, match=r"split\(\[0, 1\]\)"):
                group.split([0, 1] if group.rank == 0 else [1, 0])

            with pytest.raises(CollectiveMismatchError, match="split"):
                group.split([0, 1]) if group.rank == 0 else group.all_reduce(coded(0, device=group.device))

            self._still_right(group)

        self.ranks(body, 2)
