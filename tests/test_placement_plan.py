"""Who gives what to whom, without a store: what can't be seen from results on one device."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from dtorch_core.placement._hello import Hello
from dtorch_core.placement._mesh import Mesh
from dtorch_core.placement._placements import read_placements
from dtorch_core.placement._plan import Plan, Side
from dtorch_core.placement._shards import chunk_box, fit


def side(mesh, *placements, devices=None):
    """A layout as the functions make it."""
    grid = Mesh.read(mesh, 8, "test")
    specs = read_placements(placements, grid, "test")
    return Side(grid, specs, tuple(devices or ["cpu"] * len(grid.ranks)))


class TestPlan:
    def test_replicas_serve_themselves_and_one_serves_the_rest(self):
        plan = Plan(side([0, 1, 2], Replicate()), side([4, 2, 5], Shard(0)))
        assert [plan.served(rank) for rank in range(6)] == [[], [], [4, 5], [], [], []]
        assert [plan.hears(rank) for rank in range(6)] == [[], [], [], [], [2], [2]]
        assert plan.heard_by(2) == [4, 5]

    def test_sender_to_an_uncut_target_hears_only_who_may_fail_it(self):
        plan = Plan(side([0, 1, 2], Shard(0)), side([1], Replicate()))
        assert plan.hears(0) == plan.hears(2) == [1]
        assert plan.hears(1) == [0, 2]

    def test_all_hear_all_where_pieces_are_cut_anew(self):
        plan = Plan(side([0, 1], Shard(0)), side([2, 3, 0], Shard(1)))
        assert [plan.hears(rank) for rank in range(4)] == [[1], [0], [0, 1], [0, 1]]

    def test_neutral_places_of_a_partial_are_sent_nothing(self):
        assert Plan(side([0], Replicate()), side([[1, 2], [3, 4]], Partial(), Shard(0))).readers == [1, 2]
        assert Plan(side([0], Replicate()), side([[1, 2], [3, 4]], Partial(), Partial())).readers == [1]
        assert Plan(side([0], Replicate()), side([1, 2], Partial("avg"))).readers == [1, 2]

    def test_data_moves_on_the_senders_side_only_between_kinds_of_device(self):
        plan = Plan(side([0], Replicate()), side([1, 2, 3], Replicate(), devices=["cuda:0", "cuda:1", "cpu"]))
        assert [plan.moved_to("cpu", reader) for reader in (1, 2, 3)] == ["cuda:0", "cuda:1", ""]
        assert [plan.moved_to("cuda", reader) for reader in (1, 2, 3)] == ["", "", "cpu"]


class TestBoxes:
    @pytest.mark.parametrize("size", [0, 1, 5, 7, 8, 9])
    @pytest.mark.parametrize("mesh", [[0, 1, 2], [[0, 1], [2, 3], [4, 5]]], ids=str)
    def test_chunks_fit_together_again(self, size, mesh):
        layout = side(mesh, *([Shard(0)] * torch.tensor(mesh).ndim))
        places = list(layout.mesh.coordinates())
        boxes = {place: chunk_box((size,), layout.mesh, layout.specs, place) for place in places}
        shapes = {place: (box[0][1] - box[0][0],) for place, box in boxes.items()}
        total, fitted = fit(
            shapes, layout.mesh, layout.specs, dict(zip(places, layout.mesh.ranks, strict=True)), "test"
        )
        assert total == (size,)
        assert {place: box for place, box in fitted.items() if shapes[place] != (0,)} == {
            place: box for place, box in boxes.items() if shapes[place] != (0,)
        }


class TestHello:
    def test_comes_back_as_it_was(self):
        hello = Hello.of("call", torch.empty(2, 0, 3, dtype=torch.float8_e5m2))
        assert Hello.decode(hello.encode()) == hello

    def test_error_keeps_its_kind_only_if_it_is_a_known_one(self):
        known, unknown = Hello.failed("call", ValueError("why")), Hello.failed("call", ZeroDivisionError("why"))
        assert type(Hello.decode(known.encode()).refusal("here", 3, "call")) is ValueError
        error = Hello.decode(unknown.encode()).refusal("here", 3, "call")
        assert type(error).__name__ == "DtorchError"
        assert str(error) == "here: rank 3 has raised ZeroDivisionError: why"

    def test_silly_error_names_are_not_looked_up(self):
        hello = Hello("call", (), torch.uint8, "cpu", ("annotations", "x"))
        assert type(hello.refusal("here", 0, "call")).__name__ == "DtorchError"
