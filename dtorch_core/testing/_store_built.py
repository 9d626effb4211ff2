"""What every store has that is built on the four steps: owned copies, ``publish`` and ``borrow``."""

from __future__ import annotations

import contextlib

import pytest

from dtorch_core.errors import PeerLostError, ProtocolError, StoreTimeoutError
from dtorch_core.store import TensorStore
from dtorch_core.testing._store_base import SHORT, StoreConformance, coded, same, take


class BuiltTests(StoreConformance):
    """They end what they have begun, also where something fails."""

    def test_copy_to_a_device_is_owned(self, device: str) -> None:
        def body(store: TensorStore) -> None:
            if store.rank == 0:
                tensor = coded(0, device=device)
                store.src_set("k", tensor, 1)
                store.src_wait_until_get_finished("k")
                tensor.fill_(-1)
                store.barrier()
                store.barrier()
                assert tensor.eq(-1).all()
                return

            copy = store.dest_get_to_device("k", device)
            store.barrier()
            assert same(copy, coded(0, device=device))
            copy.zero_()
            store.barrier()
            with pytest.raises(ProtocolError):  # it ended the borrow
                store.dest_finish_get("k")

        self.ranks(body, 2, device)

    def test_copy_that_fails_ends_the_borrow(self) -> None:
        def body(store: TensorStore) -> None:
            if store.rank == 0:
                store.src_set("k", coded(0, device=self.home), 1)
                store.barrier()
                store.src_wait_until_get_finished("k")
                return

            store.barrier()
            with pytest.raises((RuntimeError, AssertionError, ValueError)):
                store.dest_get_to_device("k", "cuda:99")

            with pytest.raises(ProtocolError):
                store.dest_finish_get("k")

            # A store that refuses the device before it borrows has left the share to be taken.
            with contextlib.suppress(StoreTimeoutError, PeerLostError), store.borrow("k", timeout=0):
                pass

        self.ranks(body, 2)

    def test_publish_and_borrow_do_the_four_steps(self, device: str) -> None:
        def body(store: TensorStore) -> None:
            for turn in range(3):
                value = coded(turn, device=device)
                if store.rank == 0:
                    with store.publish("k", value, 1):
                        store.barrier()

                    value.fill_(-1)
                else:
                    store.barrier()
                    with store.borrow("k") as got:
                        assert same(got, value)

        self.ranks(body, 2, device)

    def test_publish_does_not_wait_if_its_body_raised(self) -> None:
        def body(store: TensorStore) -> None:
            with pytest.raises(ZeroDivisionError), store.publish("k", coded(0, device=self.home), 1):
                raise ZeroDivisionError

            take(store, "k", coded(0, device=self.home))
            store.src_wait_until_get_finished("k")

        self.ranks(body, 1)

    def test_borrow_finishes_if_its_body_raised(self) -> None:
        def body(store: TensorStore) -> None:
            store.src_set("k", coded(0, device=self.home), 1)
            with pytest.raises(ZeroDivisionError), store.borrow("k"):
                raise ZeroDivisionError

            store.src_wait_until_get_finished("k", timeout=SHORT)

        self.ranks(body, 1)

    def test_borrow_passes_its_timeout_on(self) -> None:
        def body(store: TensorStore) -> None:
            with pytest.raises(StoreTimeoutError), store.borrow("k", timeout=SHORT):
                pass

            store.src_set("other", coded(0, device=self.home), 1)
            with pytest.raises(StoreTimeoutError), store.publish("k", coded(0, device=self.home), 1, timeout=SHORT):
                pass

        self.ranks(body, 1)
