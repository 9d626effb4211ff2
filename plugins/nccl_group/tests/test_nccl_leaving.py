"""Ranks that leave: who is told, and what is waited for before. torch's Gloo takes NCCL's place."""

import importlib.util
import threading
from pathlib import Path

import pytest
import torch
from dtorch_nccl_group import group as factory
from dtorch_nccl_group.companion import NcclCompanion

from dtorch_core import PeerLostError, StoreTimeoutError
from dtorch_core.extras import companion
from dtorch_core.testing import run_ranks

_spec = importlib.util.spec_from_file_location("nccl_ranks", Path(__file__).with_name("nccl_ranks.py"))
ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ranks)
LIMIT = ranks.GLOO_LIMIT


@pytest.fixture(scope="module", autouse=True)
def registered():
    with ranks.over_gloo():
        yield


@pytest.fixture
def queued(monkeypatch):
    """Calls are over only when somebody has looked, as on a GPU."""
    monkeypatch.setattr(factory, "nccl", ranks.gloo(queued=True))


def on_ranks(body, world_size=2, timeout=LIMIT):
    return ranks.on_threads(body, world_size, timeout)


def part(rank, *shape):
    return ranks.part(rank, "cpu", *shape)


class TestLeaving:
    def test_rank_that_left_is_named_in_every_later_collective(self):
        left = threading.Event()

        def body(group):
            group.barrier()
            if group.rank == 1:
                group.close()
                left.set()
                return

            assert left.wait(LIMIT)
            for call in (lambda: group.all_reduce(part(0, 3)), group.barrier):
                with pytest.raises(PeerLostError, match=r"rank 1 .* has left group '\w+' .* after its call #1"):
                    call()

        on_ranks(body)

    def test_rank_that_leaves_while_a_call_begins_is_named(self, monkeypatch):
        begun, left = threading.Event(), threading.Event()
        turn, heard = NcclCompanion.turn, NcclCompanion._on_leaving

        def on_leaving(self, *args):
            heard(self, *args)
            left.set()

        def late(self, call, ticket):
            begun.set()
            assert left.wait(LIMIT)
            return turn(self, call, ticket)

        monkeypatch.setattr(NcclCompanion, "_on_leaving", on_leaving)
        monkeypatch.setattr(NcclCompanion, "turn", late)

        def body(group):
            if group.rank == 1:
                assert begun.wait(LIMIT)
                return

            with pytest.raises(PeerLostError, match=r"rank 1 .* has left group '\w+' .* after its call #0"):
                group.all_reduce(part(0, 4))

        on_ranks(body, timeout=ranks.GLOO_BRIEF)

    @pytest.mark.parametrize("is_queued", [False, True])
    def test_rank_that_ends_after_the_last_barrier_is_not_missed(self, monkeypatch, is_queued):
        """The one that is slower learns of its end before it is through: all had come, so that all was well."""
        launched = NcclCompanion.launched

        def late(self, *args):
            if self._ctx.rank == 1:
                assert self._is_over.wait(LIMIT)

            launched(self, *args)

        monkeypatch.setattr(NcclCompanion, "launched", late)
        monkeypatch.setattr(factory, "nccl", ranks.gloo(queued=is_queued))

        def rank(ctx):
            group = ctx.open_group(backend="gloo", timeout=LIMIT)
            group.barrier()
            if ctx.rank == 0:  # as at the end of a process that has not closed it
                for store in companion(group.process_group)._stores:
                    store.close()

        run_ranks(rank, 2, 2 * LIMIT)

    def test_result_that_never_comes_is_raised_at_the_end(self, queued):
        """Nobody has waited for it, and nobody may take it for a good one."""
        over = threading.Event()

        def rank(ctx):
            group = ctx.open_group(backend="gloo", timeout=LIMIT)
            if ctx.rank == 1:
                assert over.wait(LIMIT)
                group.abort("rank 1 has seen enough")
                group.close()
                return

            with pytest.raises(StoreTimeoutError, match="rank 1: #0 nothing"), group:
                group.all_reduce(part(0, 3), async_op=True, timeout=0.3)

            over.set()

        run_ranks(rank, 2, 2 * LIMIT)

    def test_close_waits_for_those_who_still_read(self, monkeypatch):
        """A rank can be done with its part before the others are: its memory has to stay until then."""
        released = threading.Event()
        seam = ranks.gloo(queued=True)
        helper = "settles"  # of a rank that is asked whether it is done
        seam.finish = lambda _: released.wait(LIMIT) if helper in threading.current_thread().name else None
        monkeypatch.setattr(factory, "nccl", seam)
        over = threading.Event()

        def body(group):
            assert torch.equal(group.all_reduce(part(group.rank, 3)), part(0, 3) + part(1, 3))
            if group.rank == 0:
                group.close()
                over.set()
                return released.is_set()

            assert not over.wait(0.2)
            released.set()
            return over.wait(LIMIT)

        assert on_ranks(body) == [True, True]
