"""Outputs that lie across inputs: no rank gets other data for it, and gathering in place copies nothing."""

from pathlib import Path

import pytest
import torch
from dtorch_samedevice_group.overlaps import Roles, clear_in_lists, clear_of_each_other, guarded, meet

from dtorch_core import spawn
from dtorch_core.testing import run_ranks

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import samedevice_overlap_ranks as ranks

BIG = 1 << 18


class TestValues:
    @pytest.mark.parametrize(("world_size", "sizes"), [(1, (4,)), (2, (4, BIG)), (3, (4, BIG)), (5, (4,))])
    def test_threads(self, world_size, sizes):
        found = run_ranks(lambda ctx: ranks.wrong(ctx, sizes), world_size, 2 * ranks.LIMIT)
        assert found == [[]] * world_size

    def test_processes(self, monkeypatch):
        monkeypatch.syspath_prepend(str(Path(__file__).parent))
        found = spawn(ranks.wrong, 3, args=((4, BIG),), ranks_as="processes", timeout=2 * ranks.LIMIT)
        assert found == [[]] * 3

    @pytest.mark.parametrize("size", [4, 3 * BIG])
    def test_one_tensor_of_several_threads(self, size):
        x = torch.arange(size, dtype=torch.float32)
        wanted = x * 3

        def body(ctx):
            with ctx.open_group("one", backend="samedevice", timeout=ranks.LIMIT) as group:
                group.process_group.allreduce([x]).wait()

        run_ranks(body, 3, 2 * ranks.LIMIT)
        assert torch.equal(x, wanted)


def harmless(output, given, piece):
    return clear_of_each_other(output, given, piece)([output, given])


class TestCopies:
    def test_input_in_its_own_place_is_not_copied(self):
        whole = torch.arange(12.0)
        pieces = list(whole.split(4))
        for rank, roles in enumerate(Roles(range(3), [(3, rank)], piece=rank) for rank in range(3)):
            tensors = [*pieces, pieces[rank].view(4)]
            assert all(a is b for a, b in zip(guarded(tensors, roles), tensors, strict=True))
            assert clear_in_lists(tensors, roles)(tensors)
            assert not clear_in_lists(tensors, roles)([*pieces, pieces[rank - 1]])
            assert harmless(whole, pieces[rank], rank)
            assert harmless(pieces[rank], whole, rank)
            assert not harmless(whole, pieces[rank], (rank + 1) % 3)
            assert not harmless(whole, pieces[rank], None)

    def test_only_what_is_at_risk_is_copied(self):
        inputs = list(torch.arange(12.0).split(4))
        kept = guarded([inputs[1], *inputs], Roles([0], [(1, 0), (2, None), (3, None)]))
        assert [a is b for a, b in zip(kept, [inputs[1], *inputs], strict=True)] == [True, True, False, True]
        assert torch.equal(kept[2], inputs[1])
        assert kept[2].data_ptr() != inputs[1].data_ptr()

    def test_strided_memory_is_looked_at_to_its_end(self):
        table = torch.zeros(4, 6)
        left, right = table[:, :3], table[1:, 3:]
        assert not harmless(left, right, None)
        assert meet([left, right])
        assert harmless(table[:2], table[2:], None)
        assert harmless(table[2:], table[:2], None)
        assert not meet([table[:2], table[2:], table[:0]])

    def test_conjugate_in_its_own_place_is_another_value(self):
        whole = torch.zeros(4, dtype=torch.complex64)
        assert harmless(whole, whole[2:], 1)
        assert not harmless(whole, whole[2:].conj(), 1)
        roles = Roles([0], [(1, 0)])
        assert clear_in_lists([whole, whole], roles)([whole, whole])
        assert not clear_in_lists([whole, whole], roles)([whole, whole.conj()])
