"""Keys that ranks on several nodes set, take, free and reset."""

import threading
from pathlib import Path

import pytest
import torch

from dtorch_core import KeyInUseError, PeerLostError

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import file_store_ranks as ranks
    from file_store_ranks import LIMIT, on_ranks, values

node_each = ranks.node_each  # a fixture


@pytest.mark.usefixtures("node_each")
class TestKeys:
    def test_key_that_is_free_can_be_set_by_another_rank_at_once(self):
        """That it is free is told with the next message; a rank that needs it asks."""
        free = threading.Barrier(3)

        def body(store):
            for number in range(20):
                source = number % 3
                if store.rank == source:
                    store.src_set("k", values(number), 1)
                    store.src_wait_until_get_finished("k")
                elif store.rank == (source + 1) % 3:
                    assert torch.equal(store.dest_get("k"), values(number))
                    store.dest_finish_get("k")

                free.wait(LIMIT)  # no message: the threads are beside each other

        on_ranks(body, 3)

    @pytest.mark.parametrize("word", ["set", "barrier"])
    def test_that_a_key_is_free_is_heard_with_the_next_word_of_any_kind(self, word):
        looked = threading.Barrier(2)

        def body(store):
            if store.rank == 0:
                store.src_set("k", values(0), 1)
                store.src_wait_until_get_finished("k")
            else:
                store.dest_get("k")
                store.dest_finish_get("k")

            if word == "barrier":
                store.barrier()
            elif store.rank == 0:
                store.src_set("next", values(1), 1)
                store.src_wait_until_get_finished("next")
            else:
                store.dest_get("next")
                store.dest_finish_get("next")

            live = store._session.keys._table.in_use("k")
            looked.wait(LIMIT)  # a goodbye would tell it too
            return live

        assert on_ranks(body, 2) == [None, None]

    def test_key_in_use_is_refused_once_the_producer_has_said_so(self):
        def body(store):
            if store.rank == 0:
                store.src_set("k", values(0), 1)

            store.barrier()
            if store.rank == 1:
                with pytest.raises(KeyInUseError, match="rank 1 can't set it: it is live, set by rank 0"):
                    store.src_set("k", values(1), 1)

                assert torch.equal(store.dest_get("k"), values(0))
                store.dest_finish_get("k")

            if store.rank == 0:
                store.src_wait_until_get_finished("k")

            store.barrier()

        on_ranks(body, 3)

    def test_two_ranks_that_set_one_key_at_once(self):
        """One of them is told, at once or in its wait; a consumer gets one of both tensors, whole. If it has got the
        one that does not count, both are."""
        for _ in range(15):
            together = threading.Barrier(2)

            def body(store, together=together):
                if store.rank == 2:
                    got = store.dest_get("k")
                    assert any(torch.equal(got, values(rank)) for rank in range(2))
                    store.dest_finish_get("k")
                    store.barrier()
                    return "got"

                together.wait(LIMIT)
                try:
                    store.src_set("k", values(store.rank), 1)
                    store.barrier()
                    store.src_wait_until_get_finished("k")
                except KeyInUseError as error:
                    assert "key 'k'" in str(error)
                    assert "rank 0" in str(error)
                    if "same time" not in str(error):
                        store.barrier()

                    return "missed" if store.rank == 0 and "got that of 1" in str(error) else "refused"
                except PeerLostError:  # the consumer had the other one, and left before it heard of this
                    return "missed"

                return "taken"

            *sources, _ = on_ranks(body, 3)
            assert sorted(sources) in (["refused", "taken"], ["missed", "refused"]), sources

    def test_many_keys_in_flight(self):
        def body(store):
            if store.rank == 0:
                for number in range(5000):
                    store.src_set(f"{number}", values(number), 1)

                for number in range(5000):
                    store.src_wait_until_get_finished(f"{number}")
            else:
                for number in reversed(range(5000)):
                    assert int(store.dest_get(f"{number}")[3]) == 1000 * (number + 1) + 3
                    store.dest_finish_get(f"{number}")

        on_ranks(body, 2)

    def test_many_keys_of_a_rank_that_leaves(self):
        """Its goodbye, which says what is known of each, is larger than what a socket holds."""

        def body(store):
            if store.rank == 0:
                for number in range(5000):
                    store.src_set(f"a key with a long name, which is number {number}", values(number), 2)
            else:
                for number in range(5000):
                    key = f"a key with a long name, which is number {number}"
                    assert int(store.dest_get(key)[3]) == 1000 * (number + 1) + 3
                    store.dest_finish_get(key)

        on_ranks(body, 3)

    def test_reset_again_and_again(self):
        """Nobody waits for the others to have passed it: what is set next is of the next epoch, also where it comes
        before the reset does."""

        def body(store):
            for number in range(60):
                store.src_set(f"{store.rank}", values(number), 2)
                if number % 2:
                    store.src_set("not taken", values(number), 1) if store.rank == number % 3 else None

                for other in {0, 1, 2} - {store.rank}:
                    assert torch.equal(store.dest_get(f"{other}"), values(number))
                    if number % 3:
                        store.dest_finish_get(f"{other}")

                store.reset()

        on_ranks(body, 3)
