"""Steps that break the protocol: they raise in the caller, and harm nothing."""

from __future__ import annotations

import pytest

from dtorch_core.errors import KeyInUseError, ProtocolError
from dtorch_core.store import TensorStore
from dtorch_core.testing._store_base import WORLDS, StoreConformance, coded, take


class MistakeTests(StoreConformance):
    """Who takes the steps in a wrong order is told so."""

    def test_live_key_refuses_a_second_set(self) -> None:
        """By whichever rank, and until its producer has waited; the first value is unharmed."""

        def body(store: TensorStore) -> None:
            value, other = coded(0, device=self.home), coded(1, device=self.home)
            if store.rank == 0:
                store.src_set("k", value, 1)

            store.barrier()
            with pytest.raises(KeyInUseError, match="'k'"):
                store.src_set("k", other, 1)

            store.barrier()
            if store.rank == 1:
                take(store, "k", value)

            store.barrier()
            with pytest.raises(KeyInUseError):
                store.src_set("k", other, 1)

            store.barrier()
            if store.rank == 0:
                store.src_wait_until_get_finished("k")
                store.src_set("k", other, 1)
                store.src_wait_until_get_finished("k")
            else:
                take(store, "k", other)

        self.ranks(body, 2)

    def test_finish_without_a_get_is_an_error(self) -> None:
        def body(store: TensorStore) -> None:
            with pytest.raises(ProtocolError):
                store.dest_finish_get("never set")

            store.barrier()
            if store.rank == 0:
                store.src_set("k", coded(0, device=self.home), 2)

            store.barrier()
            if store.rank == 1:
                with pytest.raises(ProtocolError, match="rank 1"):
                    store.dest_finish_get("k")

                take(store, "k", coded(0, device=self.home))
                with pytest.raises(ProtocolError, match="rank 1"):
                    store.dest_finish_get("k")

            store.barrier()
            if store.rank == 2:
                take(store, "k", coded(0, device=self.home))
            elif store.rank == 0:
                store.src_wait_until_get_finished("k")

        self.ranks(body, 3)

    def test_wait_for_a_key_never_set_is_an_error(self) -> None:
        def body(store: TensorStore) -> None:
            with pytest.raises(ProtocolError, match="'never set'"):
                store.src_wait_until_get_finished("never set")

            store.barrier()
            if store.rank == 0:
                store.src_set("k", coded(0, device=self.home), 1)

            store.barrier()
            if store.rank == 1:
                with pytest.raises(ProtocolError):  # only the producer waits
                    store.src_wait_until_get_finished("k")

                take(store, "k", coded(0, device=self.home))
                return

            store.src_wait_until_get_finished("k")
            with pytest.raises(ProtocolError):  # free again
                store.src_wait_until_get_finished("k")

        self.ranks(body, 2)

    @pytest.mark.parametrize("get_count", [0, -1, 1.0, True, None], ids=str)
    def test_get_count_below_one_is_an_error(self, get_count: int) -> None:
        def body(store: TensorStore) -> None:
            with pytest.raises(ProtocolError, match="get_count"):
                store.src_set("k", coded(0, device=self.home), get_count)

            store.src_set("k", coded(1, device=self.home), 1)  # the key is free
            take(store, "k", coded(1, device=self.home))
            store.src_wait_until_get_finished("k")

        self.ranks(body, 1)

    @WORLDS
    def test_get_count_above_the_number_of_ranks_is_an_error(self, world_size: int) -> None:
        """Each rank gets it at most once, so that the wait could never end. All of them may, the producer too."""

        def body(store: TensorStore) -> None:
            if store.rank == 0:
                with pytest.raises(ProtocolError, match=rf"'k'.*get_count is {world_size + 1}.*{world_size} ranks"):
                    store.src_set("k", coded(0, device=self.home), world_size + 1)

                store.src_set("k", coded(1, device=self.home), world_size)  # the key is free

            take(store, "k", coded(1, device=self.home))
            if store.rank == 0:
                store.src_wait_until_get_finished("k")

        self.ranks(body, world_size)
