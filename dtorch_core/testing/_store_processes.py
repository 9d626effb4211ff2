"""Ranks that are processes. What they do is at this module's level, so that it reaches them; they are few: to start
one takes seconds."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dtorch_core.errors import PeerLostError, RankFailedError
from dtorch_core.launcher import RankContext
from dtorch_core.store import TensorStore
from dtorch_core.testing._harness import requires, run_ranks
from dtorch_core.testing._layouts import DTYPES, LAYOUTS, moved, of_dtype
from dtorch_core.testing._store_base import HUGE, StoreConformance, coded, same, take

LARGE = (300, 1000)


def _open(ctx: RankContext, backend: str, timeout: float) -> TensorStore:
    return ctx.open_store("kit", backend=backend, timeout=timeout)


def _values(ctx: RankContext, backend: str, timeout: float, zero_copy: bool, dtypes: Sequence[torch.dtype]) -> int:
    """Rank 0 publishes a tensor of each kind; how many this rank has seen."""
    sent = {f"{dtype}": of_dtype(dtype, str(ctx.device)) for dtype in dtypes}
    sent |= {layout: moved(make(), str(ctx.device)) for layout, make in LAYOUTS.items()}
    sent["large"] = coded(0, HUGE, str(ctx.device))
    with _open(ctx, backend, timeout) as store:
        if store.rank == 0:
            for key, tensor in sent.items():
                store.src_set(key, tensor, store.world_size - 1)

            for key in sent:
                store.src_wait_until_get_finished(key)
        else:
            for key, wanted in sent.items():
                got = store.dest_get(key)
                assert (got.dtype, got.shape, got.device) == (wanted.dtype, wanted.shape, wanted.device), key
                if key in LAYOUTS or key == "large":
                    assert same(got, wanted), key
                else:
                    assert torch.equal(got.cpu().view(torch.uint8), wanted.cpu().view(torch.uint8)), key

                store.dest_finish_get(key)

        if zero_copy:
            _shared_memory(store)

        return len(sent)


def _shared_memory(store: TensorStore) -> None:
    """Each consumer writes where the producer reads."""
    consumers, device = store.world_size - 1, str(store.device)
    if store.rank == 0:
        memory = store.empty((consumers, 7), dtype=torch.float32)
        store.src_set("k", memory.copy_(coded(0, (consumers, 7), device)), consumers, writable=True)
        store.src_wait_until_get_finished("k")
        assert same(memory, torch.stack([coded(rank + 1, (7,), device) for rank in range(consumers)]))
    else:
        part = store.dest_get("k")[store.rank - 1]
        assert same(part, coded(0, (consumers, 7), device)[store.rank - 1])
        part.copy_(coded(store.rank, (7,), device))
        store.dest_finish_get("k")


def _rounds(ctx: RankContext, backend: str, timeout: float) -> int:
    """Every rank to every rank, small and large, with barriers and resets between; the process."""
    device = str(ctx.device)
    with _open(ctx, backend, timeout) as store:
        others = [rank for rank in range(store.world_size) if rank != store.rank]
        for number in range(10):
            shape = LARGE if number % 3 == 2 else (7,)
            store.src_set(f"{store.rank}", coded(100 * number + store.rank, shape, device), len(others))
            for rank in others:
                take(store, f"{rank}", coded(100 * number + rank, shape, device))

            if number % 4 == 3:
                store.reset()  # instead of the wait
            else:
                store.src_wait_until_get_finished(f"{store.rank}")
                store.barrier()

        return os.getpid()


def _ends(ctx: RankContext, backend: str, timeout: float, how: str, folder: str) -> None:
    """Rank 1 ends, as it is told; the others say in the folder what their waits raised."""
    store = _open(ctx, backend, timeout)
    if store.rank == 1:
        Path(folder, "1").write_text(f"{os.getpid()}")
        store.barrier()
        if how == "it raises":
            raise KeyError("on purpose")

        if how == "it is killed":
            os.kill(os.getpid(), signal.SIGKILL)

        store.close()
        return

    store.barrier()
    waits = store.barrier if how == "it returns" else lambda: store.dest_get("never")
    try:
        waits()
    except PeerLostError as error:
        Path(folder, f"{store.rank}").write_text(str(error))

    store.close()


class ProcessRankTests(StoreConformance):
    """The four steps between processes, as between threads."""

    @requires("multi_process")
    def test_process_ranks_exchange_values_of_every_kind(self, device: str) -> None:
        dtypes = self.carried(DTYPES)
        args = self.backend, self.patience / 2, "zero_copy" in self.declared, dtypes
        seen = run_ranks(_values, 2, self.patience, args=args, devices=device, ranks_as="processes")
        assert seen == [len(dtypes) + len(LAYOUTS) + 1] * 2

    @requires("multi_process")
    def test_ranks_of_several_processes_with_several_threads(self, device: str) -> None:
        args = self.backend, self.patience / 2
        pids = run_ranks(
            _rounds, 4, self.patience, args=args, devices=device, ranks_as="processes", threads_per_process=2
        )
        assert pids[0] == pids[1] != pids[2] == pids[3]
        assert os.getpid() not in pids

    @requires("multi_process")
    @pytest.mark.parametrize("how", ["it raises", "it is killed", "it returns"])
    def test_process_rank_ends_and_the_others_learn_it(self, how: str, tmp_path: Path) -> None:
        args = self.backend, self.patience / 2, how, str(tmp_path)
        try:
            run_ranks(_ends, 3, self.patience, args=args, devices=self.home, ranks_as="processes")
        except RankFailedError as failure:
            assert how != "it returns", failure
            assert failure.rank == 1
            assert how != "it raises" or "on purpose" in str(failure)
        else:
            assert how == "it returns"

        said = {int(path.name): path.read_text() for path in tmp_path.iterdir()}
        pid = said.pop(1)
        assert set(said) == {0, 2}, "a wait ended otherwise than by a PeerLostError"
        for rank, text in said.items():
            # Of two that have returned, either can be heard first.
            gone = [1] if how != "it returns" else [1, 2 - rank]
            assert any(f"rank {other}" in text for other in gone), f"rank {rank} heard: {text}"
            assert how == "it returns" or pid in text, f"rank {rank} was not told of pid {pid}: {text}"
