"""Tensors that autograd or inference mode know something of."""

from pathlib import Path

import pytest
import torch

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from samedevice_ranks import LARGE, on_ranks, part


class TestTensors:
    def test_leaf_that_requires_grad_is_written_in_place(self):
        """As an optimizer does it: autograd sees a changed tensor, no history."""

        def body(pg, group):
            parameter = torch.nn.Parameter(part(pg.rank(), 3))
            loss = (parameter**2).sum()
            pg.allreduce([parameter]).wait()
            assert torch.equal(parameter.detach(), part(0, 3) + part(1, 3))
            assert parameter.is_leaf and parameter.requires_grad and parameter.grad_fn is None
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()

            (parameter**2).sum().backward()
            assert torch.equal(parameter.grad, 2 * parameter.detach())

        with torch.autograd.set_multithreading_enabled(False):
            on_ranks(body)

    @pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=["in a row", "stacked"])
    @pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
    def test_leaf_that_is_cut_into_one_piece_for_each_rank_is_written_in_place(self, grad, shape):
        def body(pg, group):
            ranks, given = (part(r, 4) for r in range(2)), part(pg.rank(), 4)
            wanted = torch.cat(list(ranks)).view(shape)
            calls = {"_allgather_base": [given], "allgather_into_tensor_coalesced": [given]}
            if len(shape) == 1:
                calls["alltoall_base"] = [given.repeat(2), [], []]

            for name, others in calls.items():
                for _ in range(2):
                    leaf = torch.nn.Parameter(torch.zeros(shape))
                    loss = (leaf**2).sum()
                    whole, others_of = ([leaf], [others]) if "coalesced" in name else (leaf, others)
                    with torch.set_grad_enabled(grad):
                        getattr(pg, name)(whole, *others_of).wait()

                    assert torch.equal(leaf.detach(), wanted), name
                    assert leaf.is_leaf and leaf.requires_grad and leaf.grad_fn is None
                    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                        loss.backward()

        with torch.autograd.set_multithreading_enabled(False):
            on_ranks(body)

    def test_tensors_made_in_inference_mode(self):
        """Some of them, in either role, whoever does the work; large ones too."""

        def body(pg, group):
            for turn in range(12):
                size = LARGE if turn % 3 == 0 else 4
                with torch.inference_mode((pg.rank() + turn) % 2 == 0):
                    x = part(pg.rank(), size)

                pg.allreduce([x]).wait()
                assert torch.equal(x, part(0, size) + part(1, size))
                outs = [torch.zeros(size), torch.zeros(size)]
                pg.allgather([outs], [x]).wait()
                assert torch.equal(outs[0], x) and torch.equal(outs[1], x)

        on_ranks(body)

    def test_computed_tensor_is_written_unseen_by_autograd(self):
        def body(pg, group):
            w = part(pg.rank(), 4).requires_grad_()
            saved = w.relu()
            split = saved.split(2)
            pg.allreduce([saved]).wait()
            assert torch.equal(saved, part(0, 4) + part(1, 4))
            pg.broadcast([saved], 1).wait()
            pg.send([w], 1 - pg.rank(), 0)
            pg.recv([saved], 1 - pg.rank(), 0).wait()
            assert torch.equal(split[1] + 0, part(1 - pg.rank(), 4)[2:])
            saved.sum().backward()
            assert torch.equal(w.grad, torch.ones(4))

        with torch.autograd.set_multithreading_enabled(False):
            on_ranks(body)

    @pytest.mark.parametrize("viewed", [torch.no_grad, torch.inference_mode, torch.enable_grad])
    def test_view_of_what_was_computed_since(self, viewed):
        """Autograd refuses to say of what such a view is computed: on one rank alone, the others must not wait."""

        def body(pg, group):
            x = part(pg.rank(), 4)
            with viewed():
                view, _ = x.split(2)

            if pg.rank() == 0:
                x *= torch.ones(4, requires_grad=True)

            pg.allreduce([view]).wait()
            assert torch.equal(x[:2], part(0, 4)[:2] + part(1, 4)[:2])
            pg.send([torch.zeros(2)], 1 - pg.rank(), 0)
            assert pg.recv([view], 1 - pg.rank(), 0).wait() and torch.equal(x[:2], torch.zeros(2))

        on_ranks(body)

    def test_received_tensor_of_a_sender_in_inference_mode(self):
        def body(pg, group):
            if pg.rank() == 0:
                with torch.inference_mode():
                    group.send(part(0, 3), 1)
            else:
                got = group.recv(0)
                assert not got.is_inference()
                got.add_(1)

        on_ranks(body)
