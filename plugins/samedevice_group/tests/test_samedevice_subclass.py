"""Tensors of a program's own classes, given to c10d's methods, which hear nothing of the classes."""

from pathlib import Path

import pytest
import torch

from dtorch_core.testing._subclasses import loud, quiet

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from samedevice_ranks import on_ranks, part


def test_collectives_write_to_them():
    def body(pg, group):
        rank = pg.rank()
        x, outputs = loud(part(rank, 3), rank), [loud(torch.empty(3), rank) for _ in range(2)]
        pg.allgather([outputs], [x]).wait()
        assert [quiet(output).tolist() for output in outputs] == [part(0, 3).tolist(), part(1, 3).tolist()]
        whole = loud(torch.empty(6), rank)
        pg._allgather_base(whole, x).wait()
        assert torch.equal(quiet(whole), torch.cat([part(0, 3), part(1, 3)]))
        pg.allreduce(x).wait()
        assert torch.equal(quiet(x), part(0, 3) + part(1, 3))
        if rank == 0:
            pg.send([x], 1, 5).wait()
        else:
            pg.recv([outputs[0]], 0, 5).wait()
            assert torch.equal(quiet(outputs[0]), quiet(x))

    on_ranks(body)


def test_autograd_hears_of_them_as_of_others():
    """A leaf counts as changed; what an operator has computed does not."""

    def body(pg, group):
        leaf = part(pg.rank(), 3).requires_grad_()
        computed = leaf * 2
        loss = (computed**2).sum()
        version = computed._version
        pg.allreduce([loud(computed)]).wait()
        assert computed._version == version
        assert torch.equal(computed.detach(), 2 * (part(0, 3) + part(1, 3)))
        loss.backward()
        loss = (leaf**2).sum()
        pg.allreduce([loud(leaf.detach())]).wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    with torch.autograd.set_multithreading_enabled(False):
        on_ranks(body)
