"""Groups made of a group's ranks."""

from __future__ import annotations

import random

import pytest

from dtorch_core.errors import AbortedError, CollectiveMismatchError, UnsupportedOperationError
from dtorch_core.group import ThreadGroup
from dtorch_core.testing._group_base import GroupConformance, coded, same
from dtorch_core.testing._harness import requires, undeclared


class SplitTests(GroupConformance):
    """split: rank i of the new group is ``ranks[i]``."""

    def _works(self, group: ThreadGroup, members: list[int], me: int) -> None:
        """It is a group of ``members``, ranks of the world, in that order."""
        xs = [coded(member, (4, 4), group.device) for member in members]
        assert (group.rank, group.world_size) == (members.index(me), len(members))
        assert group.backend == self.backend or group.selection.asked_by != "argument"
        assert same(group.all_gather_list(xs[group.rank]), xs)
        assert same(group.all_reduce(xs[group.rank]), sum(xs, xs[0] * 0))
        assert same(group.broadcast(xs[group.rank], len(members) - 1), xs[-1])

    @requires("split")
    @pytest.mark.parametrize("members", [[0, 1, 2], [2, 0], [1], [2, 1, 0]])
    def test_split_orders_the_ranks_as_given(self, members: list[int], device: str) -> None:
        def body(group: ThreadGroup) -> None:
            part = group.split(members)
            if group.rank not in members:
                assert part is None
            else:
                assert part is not None
                with part:
                    self._works(part, members, group.rank)

            self._works(group, [0, 1, 2], group.rank)

        self.ranks(body, 3, device)

    @requires("split")
    def test_split_parts_are_independent(self) -> None:
        """Two disjoint ones, two that overlap, and their parent, used in any order."""

        def body(group: ThreadGroup) -> None:
            wanted = {"low": [0, 1], "high": [3, 2], "ends": [0, 3], "all": [3, 1, 2, 0]}
            parts = {name: group.split(members) for name, members in wanted.items()}
            names = [name for name, part in parts.items() if part is not None]
            assert names == [name for name, members in wanted.items() if group.rank in members]
            for turn in range(10):
                for name in ("ends", "low", "all", "high"):
                    part = parts[name]
                    if part is not None:
                        self._works(part, wanted[name], group.rank)

                if turn % 3 == 0:
                    self._works(group, [0, 1, 2, 3], group.rank)

        self.ranks(body, 4)

    @requires("split", "async")
    def test_split_parts_at_the_same_time(self) -> None:
        def body(group: ThreadGroup) -> None:
            first, second = group.split([0, 1, 2]), group.split([2, 1, 0])
            assert first is not None and second is not None
            xs = [coded(rank, (5,), group.device) for rank in range(3)]
            works = []
            for number in range(20):
                for part in (first, second, group):
                    works.append((part.all_reduce(xs[group.rank] + number, async_op=True), number))

            random.Random(group.rank).shuffle(works)
            for work, number in works:
                assert same(work.result(), xs[0] + xs[1] + xs[2] + 3 * number)

        self.ranks(body, 3)

    @requires("split")
    def test_split_of_a_split(self) -> None:
        def body(group: ThreadGroup) -> None:
            part = group.split([3, 1, 2])
            if part is not None:
                # Ranks of the part: rank 0 is the world's rank 3.
                inner = part.split([2, 0])
                assert (inner is None) == (group.rank == 1)
                if inner is not None:
                    self._works(inner, [2, 3], group.rank)

            self._works(group, [0, 1, 2, 3], group.rank)

        self.ranks(body, 4)

    @requires("split")
    def test_split_of_the_same_ranks_again_is_another_group(self) -> None:
        def body(group: ThreadGroup) -> None:
            groups = [group.split([0, 1]) for _ in range(3)]
            for part in groups:
                assert part is not None
                self._works(part, [0, 1], group.rank)

            for part in groups[:2]:
                assert part is not None
                part.close()

            assert groups[2] is not None
            self._works(groups[2], [0, 1], group.rank)

        self.ranks(body, 2)

    @requires("split")
    def test_split_outlives_nothing_but_itself(self) -> None:
        """A part's end is not its parent's, and the other way round."""

        def body(group: ThreadGroup) -> None:
            first, second = group.split([0, 1]), group.split([1, 0])
            assert first is not None and second is not None
            group.barrier()
            first.abort("enough of the first")
            with pytest.raises(AbortedError, match="enough"):
                first.barrier()

            self._works(second, [1, 0], group.rank)
            self._works(group, [0, 1], group.rank)
            group.close()
            self._works(second, [1, 0], group.rank)

        self.ranks(body, 2)

    @requires("split", "mismatch")
    @pytest.mark.parametrize("ranks", [[0, 0], [0, 2], [-1], [], [0.0], "01", None])
    def test_split_into_ranks_that_are_not_there_is_refused(self, ranks: object) -> None:
        def body(group: ThreadGroup) -> None:
            if group.rank == 0:
                with pytest.raises((ValueError, TypeError)):
                    group.split(ranks)  # type: ignore[arg-type]
            else:
                with pytest.raises(CollectiveMismatchError, match="rank 0"):
                    group.split([0, 1])

            part = group.split([1, 0])
            assert part is not None
            self._works(part, [1, 0], group.rank)

        self.ranks(body, 2)

    @undeclared("split")
    def test_split_is_refused(self) -> None:
        def body(group: ThreadGroup) -> None:
            with pytest.raises(UnsupportedOperationError, match="split"):
                group.split([0, 1])

        self.ranks(body, 2)
