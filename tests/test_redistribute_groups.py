"""The groups that a redistribution runs over: lines of a mesh, and the manager that makes each once."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from dtorch_core import AbortedError, ThreadGroupManager, redistribute, redistribute_mesh, spawn
from dtorch_core.placement._mesh import Mesh


def coded(shape):
    """Every element tells where it is."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


class Named:
    """As much of a DeviceMesh as is read."""

    mesh = torch.tensor([[0, 1], [2, 3]])
    mesh_dim_names = ("dp", "tp")

    def __repr__(self):  # an id of a test, the same in every process
        return "Named()"


class TestLines:
    @pytest.mark.parametrize(
        ("rank", "dim", "line"),
        [(5, 0, [5, 2, 0]), (5, 1, [5, 3]), (2, -1, [2, 4]), (4, -2, [3, 4, 1]), (0, 1, [0, 1])],
    )
    def test_ranks_that_differ_in_one_dimension(self, rank, dim, line):
        assert Mesh.read([[5, 3], [2, 4], [0, 1]], 6, "test").line(rank, dim) == line

    def test_three_dimensions_and_names(self):
        mesh = Mesh.read(torch.arange(8).reshape(2, 2, 2), None, "test")
        assert [mesh.line(5, dim) for dim in range(3)] == [[1, 5], [5, 7], [4, 5]]
        named = Mesh.read(Named(), None, "test")
        assert named.line(3, "dp") == [1, 3]
        assert named.line(3, "tp") == [2, 3]

    def test_places_and_ranks(self):
        mesh = Mesh.read([[[4, 2, 0]], [[1, 5, 3]]], None, "test")
        for rank, place in zip(mesh.ranks, mesh.coordinates(), strict=True):
            assert mesh.place(rank) == place
            assert mesh.rank_at(place) == rank

        assert mesh.places_along((1, 0, 2), [0, 2]) == list(mesh.coordinates())
        assert mesh.places_along((1, 0, 2), []) == [(1, 0, 2)]

    @pytest.mark.parametrize(
        ("mesh", "rank", "dim", "error", "says"),
        [
            ([0, 2], 1, 0, ValueError, "rank 1 is not in the mesh [0, 2]"),
            ([0, 1], 0, 1, ValueError, "has no dimension 1, but -1 to 0"),
            ([0, 1], 0, "tp", ValueError, "has no names"),
            (Named(), 0, "tpp", ValueError, "Did you mean 'tp'?"),
            ([0, 1], 0, 0.0, TypeError, "not 0.0"),
            ([0, 1], 0, True, TypeError, "not True"),
        ],
        ids=str,
    )
    def test_what_is_not_there(self, mesh, rank, dim, error, says):
        with pytest.raises(error) as raised:
            Mesh.read(mesh, None, "test").line(rank, dim)

        assert says in str(raised.value)


class TestManager:
    def test_groups_for_a_mesh_dimension(self):
        def run(ctx):
            with ctx.open_manager(timeout=20) as manager:
                assert isinstance(manager, ThreadGroupManager)
                x = torch.tensor([ctx.rank])
                groups = [manager.groups_for(Named(), dim) for dim in ("dp", "tp", 0, -1)]
                assert groups[0] is groups[2] is manager.get([ctx.rank % 2, ctx.rank % 2 + 2])
                assert groups[1] is groups[3]
                return [redistribute(x, group, Shard(0), Replicate()).tolist() for group in groups[:2]]

        assert spawn(run, 4, timeout=30) == [[[r % 2, r % 2 + 2], [r // 2 * 2, r // 2 * 2 + 1]] for r in range(4)]

    def test_mistakes_name_the_manager(self):
        def run(ctx):
            manager = ctx.open_manager("mine", timeout=20)
            for mesh, dim, error, says in [
                ([0, 1], 0, ValueError, "rank 2 is not in"),
                ([0, 3], 0, ValueError, "has rank 3, but there are rank 0 to rank 2"),
                ([0, 1, 2], 1, ValueError, "no dimension 1"),
                (2, 0, TypeError, "nested"),
                ([0, 1, 2], None, TypeError, "not None"),
            ]:
                if ctx.rank == 2:
                    with pytest.raises(error) as raised:
                        manager.groups_for(mesh, dim)

                    assert says in str(raised.value)
                    assert "ThreadGroupManager 'mine' rank 2 of 3" in str(raised.value)

        spawn(run, 3, timeout=30)

    def test_a_redistribution_uses_the_groups_that_others_use(self):
        def run(ctx):
            manager = ctx.open_manager(timeout=20)
            column, everybody = manager.groups_for([[0, 1], [2, 3]], 0), manager.get(range(4))
            redistribute_mesh(coded((4,)), manager, [[0, 1], [2, 3]], [Partial(), Replicate()], [Replicate()] * 2)
            redistribute_mesh(coded((4,)), manager, [[0, 1], [2, 3]], [Partial(), Partial()], [Replicate()] * 2)
            assert manager.groups_for([[0, 1], [2, 3]], 0) is column
            assert manager.get([0, 1, 2, 3]) is everybody
            manager.close()
            with pytest.raises(AbortedError, match="closed"):
                redistribute_mesh(coded((4,)), manager, [[0, 1], [2, 3]], [Partial(), Partial()], [Replicate()] * 2)

        spawn(run, 4, timeout=30)

    def test_threads_that_ask_at_once_get_one_group(self):
        def run(ctx):
            manager, begin, groups = ctx.open_manager(timeout=20), threading.Barrier(4), []

            def ask():
                begin.wait(20)
                groups.append(manager.groups_for([[0, 1]], 1))

            threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
            for thread in threads:
                thread.start()

            for thread in threads:
                thread.join(30)

            assert len(groups) == 4
            assert len(set(groups)) == 1
            return redistribute(coded((2,)), groups[0], Partial(), Replicate()).tolist()

        assert spawn(run, 2, timeout=60) == [[0, 2]] * 2

    def test_several_threads_of_each_rank_at_once(self):
        layouts = [([Partial(), Replicate()], 0), ([Replicate(), Partial()], 1), ([Partial(), Partial()], 2)]

        def run(ctx):
            manager = ctx.open_manager(timeout=20)
            results, begin = {}, threading.Barrier(len(layouts))

            def work(src, number):
                begin.wait(20)
                results[number] = [
                    redistribute_mesh(coded((5,)) + n, manager, [[0, 1], [2, 3]], src, [Replicate()] * 2).tolist()
                    for n in range(20)
                ]

            threads = [threading.Thread(target=work, args=layout, daemon=True) for layout in layouts]
            for thread in threads:
                thread.start()

            for thread in threads:
                thread.join(30)

            return results

        for results in spawn(run, 4, timeout=60):
            for number, factor in enumerate([2, 2, 4]):
                assert results[number] == [((coded((5,)) + n) * factor).tolist() for n in range(20)]
