"""As across hosts: nobody can be asked, and the group carries sizes and messages. torch's Gloo takes NCCL's place."""

import importlib.util
import threading
from pathlib import Path

import pytest
import torch
from dtorch_nccl_group import group as factory

from dtorch_core import StoreTimeoutError
from dtorch_core._groups import c10d
from dtorch_core._groups import notes as _notes

_spec = importlib.util.spec_from_file_location("nccl_ranks", Path(__file__).with_name("nccl_ranks.py"))
ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ranks)
LIMIT = ranks.GLOO_LIMIT


@pytest.fixture(scope="module", autouse=True)
def registered():
    with ranks.over_gloo():
        yield


def on_ranks(body, world_size=2, timeout=LIMIT):
    return ranks.on_threads(body, world_size, timeout)


def part(rank, *shape):
    return ranks.part(rank, "cpu", *shape)


class TestWithoutAStore:
    @pytest.fixture(autouse=True)
    def alone(self, monkeypatch):
        monkeypatch.setattr(factory, "_stores", lambda ctx: None)

    def test_calls_and_messages_work(self):
        def body(group):
            rank = group.rank
            xs = [part(r, 2 + r, 3) for r in range(2)]
            assert torch.equal(group.all_gather(xs[rank]), torch.cat(xs))
            assert torch.equal(group.all_reduce(part(rank, 3)), part(0, 3) + part(1, 3))
            group.barrier()
            group.send(xs[rank], rank)
            assert torch.equal(group.recv(rank), xs[rank])
            if rank:
                group.send(xs[1], 0)
            else:
                assert torch.equal(group.recv(1), xs[1])

        on_ranks(body)

    def test_timeout_says_what_is_known(self):
        over = threading.Event()

        def body(group):
            if group.rank == 1:
                assert over.wait(LIMIT)
                return ""

            with pytest.raises(StoreTimeoutError, match="other hosts can't be asked"):
                group.all_reduce(part(0, 3), timeout=0.2)

            over.set()

        on_ranks(body)

    def test_sizes_may_take_no_longer_than_their_call(self, monkeypatch):
        limits, began = {0: [], 1: []}, []
        seam, all_gather = ranks.gloo(), c10d.all_gather
        seam.limit = lambda backend, seconds: limits[backend.rank()].append(seconds)

        def gathering(group, *args):
            began.append(limits[group.rank()][-1:])
            return all_gather(group, *args)

        monkeypatch.setattr(factory, "nccl", seam)
        monkeypatch.setattr(c10d, "all_gather", gathering)

        def body(group):
            gathered = group.all_gather(part(group.rank, 1 + group.rank), timeout=7)
            assert torch.equal(gathered, torch.cat([part(0, 1), part(1, 2)]))

        on_ranks(body)
        assert began == [[7]] * 6, "lengths, texts, and the call"
        assert [each[-1] for each in limits.values()] == [LIMIT] * 2

    def test_sizes_that_never_came_are_not_read(self, monkeypatch):
        """NCCL's kernel ends when its time is over, and has written nothing."""

        class Ended:
            def wait(self):
                return True

            def check_end(self):
                raise RuntimeError("torch's watchdog has ended it: its time was over")

        def body(group):
            with monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "is_cuda", True)
                patch.setattr(c10d, "all_gather", lambda *args: Ended())
                with pytest.raises(RuntimeError, match="its time was over"):
                    _notes._as_bytes(group.process_group, "cpu", "text", 1.0)

        on_ranks(body, 1)
