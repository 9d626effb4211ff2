"""What the parts of the store kit share: opening a store on every rank, and values that tell where they belong."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from dtorch_core._meeting.member import normal_device
from dtorch_core.errors import PeerLostError, RankFailedError
from dtorch_core.launcher import RankContext
from dtorch_core.store import TensorStore
from dtorch_core.testing._harness import CUDA, Background, Conformance, asleep, run_ranks

T = TypeVar("T")

SHORT = 0.1
"""Seconds for a wait that is expected to end at its deadline."""

OWN = 5 * SHORT
"""The same where it is the store's own timeout: the opening has to fit in it, too."""

HUGE = (4_202_499,)
"""Some 16 MiB of float32, which tells all its positions apart: more than a power of two, and no whole pages."""

Ending = Callable[[], object]
"""A wait that is expected to end badly."""

WORLDS = pytest.mark.parametrize("world_size", [2, 3, 4])


class StoreConformance(Conformance):
    """Base of the parts of :class:`TensorStoreTests`."""

    kind = "store"

    @property
    def home(self) -> str:
        """The device for tests where any will do."""
        return "cpu" if "cpu" in self.declared else normal_device(CUDA)

    def ranks(
        self,
        body: Callable[[TensorStore], T],
        world_size: int,
        device: str | Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> list[T]:
        """Open a store on every rank, call ``body(store)``, close it; the results by rank.

        :param timeout: the store's own, for waits that name none.
        """

        def rank(ctx: RankContext) -> T:
            own = self.patience / 2 if timeout is None else timeout
            with ctx.open_store("kit", backend=self.backend, timeout=own) as store:
                return body(store)

        return self.raw_ranks(rank, world_size, device)

    def raw_ranks(
        self, rank: Callable[[RankContext], T], world_size: int, device: str | Sequence[str] | None = None
    ) -> list[T]:
        """``rank(ctx)`` on every rank, for tests that open stores themselves."""
        return run_ranks(rank, world_size, self.patience, devices=device or self.home)

    def told_of_a_death(self, waits: Callable[[TensorStore], tuple[Ending, Sequence[Ending]]]) -> list[PeerLostError]:
        """What two survivors are told of rank 2, which dies while they wait.

        :param waits: for a survivor's store, the wait that is pending then, and those that are begun later.
        """
        ready = threading.Semaphore(0)
        expected: dict[int, int] = {}
        errors: list[PeerLostError] = []

        def body(store: TensorStore) -> None:
            if store.rank == 2:
                for _ in range(2):
                    assert ready.acquire(timeout=self.patience)

                raise ZeroDivisionError("rank 2 fails on purpose")

            own, later = waits(store)
            expected[store.rank] = 1 + len(later)
            pending = Background(own)
            asleep(pending)
            ready.release()
            for ending in (pending.result, *later):
                with pytest.raises(PeerLostError, match="rank 2") as caught:
                    ending()

                errors.append(caught.value)

        with pytest.raises(RankFailedError, match="on purpose"):
            self.ranks(body, 3)

        assert sorted(expected) == [0, 1]
        assert len(errors) == sum(expected.values()), f"of {expected} waits of the survivors {len(errors)} ended so"
        return errors


def coded(tag: int, shape: Sequence[int] = (7,), device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """Values that differ at every position and for every ``tag``: a mix-up shows."""
    return torch.arange(math.prod(shape), device=device).add(1000 * (tag + 1)).to(dtype).reshape(tuple(shape))


def same(got: Tensor, wanted: Tensor) -> bool:
    """Equal in shape, dtype, device and every value."""
    return (got.shape, got.dtype, got.device) == (wanted.shape, wanted.dtype, wanted.device) and torch.equal(
        got.resolve_conj().resolve_neg(), wanted.resolve_conj().resolve_neg()
    )


def take(store: TensorStore, key: str, wanted: Tensor) -> None:
    """Get, compare, finish."""
    got = store.dest_get(key)
    assert same(got, wanted), f"{key!r}: got {got}, not {wanted}"
    store.dest_finish_get(key)
