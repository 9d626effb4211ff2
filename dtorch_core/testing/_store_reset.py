"""Reset: it drops every key, on all ranks together, and wakes who waits."""

from __future__ import annotations

import threading

import pytest

from dtorch_core.errors import AbortedError, DtorchError, ProtocolError, StoreTimeoutError
from dtorch_core.store import TensorStore
from dtorch_core.testing._harness import Background, asleep
from dtorch_core.testing._store_base import StoreConformance, coded, take
from dtorch_core.testing._store_waits import WAITS, Wait, set_unread


class ResetTests(StoreConformance):
    """After it the store is as new."""

    def test_reset_drops_every_key(self) -> None:
        def body(store: TensorStore) -> None:
            for turn in range(3):
                own = f"of {store.rank}"
                store.src_set(own, coded(turn, device=self.home), 2)
                borrowed = f"of {(store.rank + 1) % 3}"
                store.dest_get(borrowed)
                store.reset()
                with pytest.raises(DtorchError):
                    store.dest_finish_get(borrowed)

                with pytest.raises(ProtocolError):
                    store.src_wait_until_get_finished(own)

                with pytest.raises(StoreTimeoutError):
                    store.dest_get(borrowed, timeout=0.01)

                store.barrier()

            if store.rank == 0:
                store.src_set("of 0", coded(9, device=self.home), 2)
                store.src_wait_until_get_finished("of 0")
            else:
                take(store, "of 0", coded(9, device=self.home))

        self.ranks(body, 3)

    @WAITS
    def test_reset_wakes_pending_waits(self, wait: Wait) -> None:
        """Of the ranks that reset, in other threads of theirs."""

        def body(store: TensorStore) -> None:
            set_unread(store, 1)
            pending = Background(lambda: wait(store)) if store.rank == 1 else None
            if pending is not None:
                asleep(pending)

            store.reset()
            if pending is not None:
                with pytest.raises(AbortedError):
                    pending.result()

            store.barrier()
            if store.rank == 0:
                store.src_set("wanted", coded(0, device=self.home), 2)
                store.src_wait_until_get_finished("wanted")
            else:
                take(store, "wanted", coded(0, device=self.home))

        self.ranks(body, 3)

    def test_reset_is_collective(self) -> None:
        """No key goes before the last rank has come."""
        begun = threading.Event()

        def body(store: TensorStore) -> None:
            if store.rank == 0:
                store.src_set("k", coded(0, device=self.home), 1)
                early = Background(store.reset)
                asleep(early)
                begun.set()
                early.result()
                return

            assert begun.wait(self.patience)
            take(store, "k", coded(0, device=self.home))
            store.reset()

        self.ranks(body, 2)
