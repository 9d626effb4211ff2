"""Calls that fail on some ranks or on all, and what the others are told. torch's Gloo takes NCCL's place."""

import importlib.util
import threading
from pathlib import Path

import pytest
import torch
from dtorch_nccl_group import group as factory

from dtorch_core import AbortedError, CollectiveMismatchError, RankFailedError, StoreTimeoutError
from dtorch_core.testing import run_ranks

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


class TestFailure:
    def test_timeout_shows_who_called_what(self):
        over = threading.Event()

        def body(group):
            group.all_reduce(part(group.rank, 3))
            if group.rank == 0:
                group.barrier()
                with pytest.raises(StoreTimeoutError) as caught:
                    group.all_gather(part(0, 3), timeout=0.2)

                over.set()
                return str(caught.value)

            group.barrier()
            assert over.wait(LIMIT)
            return ""

        text = on_ranks(body)[0]
        assert "rank 1 had not come after 0.2 s" in text
        assert "last calls (late: rank 1):" in text
        assert "rank 0: #3 all_gather(float32[3], dim=0)" in text
        assert "rank 1: #2 barrier" in text

    def test_timeout_of_the_collective_itself_shows_who_called_what(self):
        over = threading.Event()

        def body(group):
            if group.rank == 1:
                assert over.wait(LIMIT)
                with pytest.raises(AbortedError, match=r"rank 0 gave up on all_reduce\(float32\[3\], sum\)"):
                    group.all_reduce(part(1, 3))

                return ""

            with pytest.raises(StoreTimeoutError) as caught:
                group.all_reduce(part(0, 3), timeout=0.2)

            over.set()
            return str(caught.value)

        text = on_ranks(body)[0]
        assert "rank 0: #1 all_reduce(float32[3], sum)" in text
        assert "rank 1: #0 nothing" in text

    def test_ranks_that_are_out_of_step_are_told(self):
        def body(group):
            if group.rank == 0:
                group.all_reduce(part(0, 3), async_op=True, timeout=0.5)

            with pytest.raises(CollectiveMismatchError, match="#2 barrier") as caught:
                group.barrier()

            assert "#1 barrier" in str(caught.value)
            group.abort("out of step")

        on_ranks(body)

    def test_call_that_one_rank_refuses_ends_the_others(self):
        refused = threading.Event()

        def body(group):
            if group.rank == 1:
                with pytest.raises(TypeError):
                    group.all_reduce("text")

                refused.set()
                return

            assert refused.wait(LIMIT)
            with pytest.raises(CollectiveMismatchError, match=r"rank 1 refused its part: all_reduce\(str"):
                group.all_reduce(part(0, 3))

            with pytest.raises(CollectiveMismatchError, match="rank 1"):
                group.barrier()

        on_ranks(body, timeout=ranks.GLOO_BRIEF)

    def test_call_that_every_rank_refuses_late_ends_no_later_one(self):
        """One rank has made its next call by then, which is not the one that it refuses."""
        called, refused = threading.Event(), threading.Event()

        def body(group):
            rank = group.rank
            if rank == 0:
                gathered = group.all_gather(part(0, 2, 3), async_op=True)
                reduced = group.all_reduce(part(0, 3), async_op=True)
                called.set()
                with pytest.raises(CollectiveMismatchError, match="do not fit"):
                    gathered.result()

                refused.set()
                assert torch.equal(reduced.result(), part(0, 3) + part(1, 3))
            else:
                assert called.wait(LIMIT)
                with pytest.raises(CollectiveMismatchError, match="do not fit"):
                    group.all_gather(part(1, 2, 4))

                assert refused.wait(LIMIT)
                assert torch.equal(group.all_reduce(part(1, 3)), part(0, 3) + part(1, 3))

            assert torch.equal(group.all_reduce(part(rank, 3)), part(0, 3) + part(1, 3))

        on_ranks(body)

    def test_call_that_every_rank_refuses_ends_nobody(self):
        def body(group):
            for _ in range(3):
                with pytest.raises(TypeError):
                    group.all_reduce("text")

                with pytest.raises(ValueError, match="dim 3"):
                    group.all_gather(part(group.rank, 3), 3)

            assert torch.equal(group.all_reduce(part(group.rank, 3)), part(0, 3) + part(1, 3))
            assert torch.equal(group.all_gather(part(group.rank, 3)), torch.cat([part(0, 3), part(1, 3)]))

        on_ranks(body)

    def test_group_that_cannot_be_built_fails_on_every_rank(self, monkeypatch):
        seam = ranks.gloo()

        def connect(backend, device, timeout):
            raise RuntimeError("no route")

        seam.connect = connect
        monkeypatch.setattr(factory, "nccl", seam)

        def rank(ctx):
            ctx.open_group(backend="gloo", timeout=LIMIT)

        with pytest.raises(RankFailedError, match="no route"):
            run_ranks(rank, 2, 2 * LIMIT)
