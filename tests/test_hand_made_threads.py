"""Ranks that are threads made by hand, without spawn: how they end, and what their peers see."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from dtorch_core import PeerLostError, open_group, open_store

LIMIT = 15.0


@pytest.fixture
def quiet(monkeypatch):
    """The hook that was there before sees every uncaught exception too; here it only counts them."""
    from dtorch_core._meeting import hand_made

    seen: list[type[BaseException]] = []
    monkeypatch.setattr(hand_made, "_before", lambda args: seen.append(args.exc_type))
    monkeypatch.setattr(hand_made, "_hooked", True)
    monkeypatch.setattr(threading, "excepthook", hand_made._on_uncaught)
    return seen


def run(*ranks):
    threads = [threading.Thread(target=rank, name=f"hand-made {number}") for number, rank in enumerate(ranks)]
    for thread in threads:
        thread.start()

    for thread in threads:
        thread.join(LIMIT)
        assert not thread.is_alive()


@pytest.mark.parametrize("kept", [False, True])
def test_uncaught_exception_is_a_death_that_every_peer_sees(quiet, kept):
    handles, errors, waiting = [], {}, threading.Barrier(3)

    def dies():
        store = open_store("dies", rank=1, world_size=3, timeout=LIMIT)
        handles.extend([store] if kept else [])
        waiting.wait(LIMIT)
        raise KeyError("lost")

    def waits(rank):
        with open_store("dies", rank=rank, world_size=3, timeout=LIMIT) as store:
            waiting.wait(LIMIT)
            started = time.monotonic()
            with pytest.raises(PeerLostError, match=r"rank 1 \(pid \d+\).*KeyError") as lost:
                store.dest_get("never")

            errors[rank] = lost.value, time.monotonic() - started

    run(lambda: waits(0), dies, lambda: waits(2))
    assert sorted(errors) == [0, 2]
    assert all(took < LIMIT / 3 for _, took in errors.values())
    assert quiet == [KeyError]


def test_uncaught_exception_ends_the_collectives_of_a_group(quiet):
    errors = []

    def dies():
        group = open_group("dies", rank=0, world_size=2, timeout=LIMIT)
        group.barrier()
        raise ValueError("lost")

    def waits():
        with open_group("dies", rank=1, world_size=2, timeout=LIMIT) as group:
            group.barrier()
            with pytest.raises(PeerLostError, match="rank 0") as lost:
                group.all_reduce(torch.arange(3))

            errors.append(lost.value)

    run(dies, waits)
    assert len(errors) == 1
    assert quiet == [ValueError]


def test_orderly_return_keeps_handles_that_others_use(quiet):
    handles = {}

    def opens(rank):
        handles[rank] = open_store("kept", rank=rank, world_size=2, timeout=LIMIT)

    run(lambda: opens(0), lambda: opens(1))
    handles[0].src_set("k", torch.arange(3), 1)
    with handles[1].borrow("k") as value:
        assert value.tolist() == [0, 1, 2]

    handles[0].src_wait_until_get_finished("k")
    for handle in handles.values():
        handle.close()

    assert quiet == []
