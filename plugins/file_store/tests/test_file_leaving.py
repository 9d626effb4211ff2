"""Ranks that leave in order, go into reset(), or abort: what they left is still to be had, and their words arrive."""

import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from dtorch_file_store.keys import ANSWER
from dtorch_file_store.watch import Watch

from dtorch_core import PeerLostError, StoreTimeoutError, spawn
from dtorch_core.testing import run_ranks

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import file_leaving_ranks as ranks
    import file_store_ranks
    from file_leaving_ranks import LIMIT
    from file_store_ranks import HOMES, on_ranks, values

node_each = file_store_ranks.node_each  # a fixture

WORLDS = [(3, 1), (4, 1), (4, 2), (5, 2)]
"""Ranks, and how many of them in a node."""


@pytest.mark.parametrize(("world_size", "in_each"), WORLDS)
class TestNodes:
    @pytest.fixture(autouse=True)
    def nodes(self, monkeypatch, in_each):
        monkeypatch.setattr(HOMES, lambda topology: [rank // in_each for rank in range(len(topology))])

    def test_free_shares_are_to_be_had(self, world_size):
        ranks.check_shares(run_ranks(lambda ctx: ranks.shares(ctx, 1), world_size, 3 * LIMIT))

    def test_reason_of_an_abort_arrives_before_the_goodbye(self, world_size):
        check_aborts(run_ranks(ranks.aborts, world_size, 3 * LIMIT))


@pytest.mark.parametrize(("world_size", "in_each"), WORLDS[:3])
def test_processes(world_size, in_each, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    results = spawn(
        ranks.both, world_size, args=(2,), ranks_as="processes", threads_per_process=in_each, timeout=3 * LIMIT
    )
    ranks.check_shares([shares for shares, _ in results])
    check_aborts([told for _, told in results])


def check_aborts(results):
    assert results[0] == dict.fromkeys(results[0], "")
    for told in results[1:]:
        for what, said in told.items():
            reason = "rank 0 aborted" if what == "all_reduce" else "over"
            assert said.startswith("AbortedError: ") and f": {reason}" in said, (what, said)


@pytest.mark.usefixtures("node_each")
class TestWhoDecides:
    """What a node is told, and in which order, is made up here by holding its messages back."""

    def test_heir_that_dies_answers_nobody(self):
        asked, over = threading.Event(), threading.Event()

        def body(store):
            if store.rank == 1:
                handled(store, "claim", lambda handler, peer, message: asked.set() or ())

            store.barrier()
            if store.rank == 0:
                store.src_set("k", values(0), 1)
            elif store.rank == 1:
                assert asked.wait(LIMIT)
                store.abort("failed", died=True)
                assert over.wait(LIMIT)
            else:
                with pytest.raises(PeerLostError, match="rank 1 .* was lost: failed"):
                    store.dest_get("k", timeout=LIMIT)

                over.set()

        on_ranks(body, 3)

    def test_claim_that_comes_before_the_news_of_what_was_set(self):
        """Rank 1 decides once rank 0 has left, and hears of all that after rank 2 has asked it."""
        asked = threading.Event()

        def body(store):
            held = []

            def hold(handler, peer, message):
                if asked.is_set():  # it comes late enough by itself
                    return handler(peer, message)

                held.append((handler, peer, message))
                return ()

            def claimed(handler, peer, message):
                woken = list(handler(peer, message))
                for handler, peer, message in held:
                    woken += handler(peer, message)

                asked.set()
                return woken

            node = store._session.node
            if store.rank == 0:
                close = node.close
                node.close = lambda: asked.wait(LIMIT) and close()  # the end of the line is news, too
            elif store.rank == 1:
                handled(store, "set", hold)
                handled(store, "goodbye", hold)
                handled(store, "claim", claimed)

            store.barrier()
            if store.rank == 0:
                store.src_set("k", values(0), 1)
            elif store.rank == 1:
                assert asked.wait(LIMIT)
            else:
                assert torch.equal(store.dest_get("k", timeout=LIMIT / 2), values(0))
                store.dest_finish_get("k")

        on_ranks(body, 3)

    def test_goodbyes_of_arbiters_may_come_in_any_order(self):
        """Ranks 2, 0 and 1 decide, one after the other. Rank 4 gets one of two shares from rank 1, and both leave. Then
        it is rank 3 that decides, which has heard of all but of rank 0's goodbye; that comes now."""
        first, taken, late = threading.Event(), threading.Event(), threading.Event()

        def body(store):
            node, presence, held = store._session.node, store._session.presence, []

            def leaves(handler, peer, message):
                woken = list(handler(peer, message))
                if presence.closed >= {0, 2}:
                    first.set()

                return woken

            def hold(handler, peer, message):
                if message.fields[0] != 0:
                    return handler(peer, message)

                held.append(partial(handler, peer, message))
                return ()

            def gone(on_gone, of):
                woken = list(on_gone(of))
                if store.rank == 1 and of == 4:
                    taken.set()
                elif store.rank == 3 and held and node.gone >= {1, 4}:
                    woken += held.pop()()
                    late.set()

                return woken

            node.on_gone = partial(gone, node.on_gone)
            if store.rank == 0:
                close = node.close
                node.close = lambda: late.wait(LIMIT) and close()  # the end of the line is news, too
            elif store.rank == 3:
                handled(store, "goodbye", hold)
            elif store.rank == 4:
                handled(store, "goodbye", leaves)

            store.barrier()
            if store.rank == 2:
                store.src_set("k", values(0), 2)

            if store.rank in (0, 2):
                return ""

            if store.rank == 1:
                assert taken.wait(LIMIT)
                return ""

            assert (first if store.rank == 4 else late).wait(LIMIT)
            try:
                assert torch.equal(store.dest_get("k", timeout=LIMIT / 2), values(0))
            except PeerLostError:
                return "refused"

            store.dest_finish_get("k")
            return "got it"

        outcomes = on_ranks(body, 6)
        assert outcomes[4] == "got it"
        assert sorted(outcomes[3::2]) == ["got it", "refused"]

    def test_claim_of_what_is_free_by_now_is_answered(self):
        """That it is free is told with the next word; whoever asks for a share is told at once."""
        free, done = threading.Event(), threading.Event()

        def body(store):
            store.barrier()
            if store.rank == 0:
                store.src_set("k", values(0), 1)
                store.src_wait_until_get_finished("k")
                free.set()
                assert done.wait(LIMIT)  # whatever it said now would tell that, too
            elif store.rank == 1:
                store.dest_get("k")
                store.dest_finish_get("k")
            else:
                assert free.wait(LIMIT)
                store._session.node.look()
                assert store._session.keys._table.in_use("k") is not None, "it does not know yet"
                begun = time.monotonic()
                with pytest.raises(StoreTimeoutError):
                    store.dest_get("k", timeout=0.1)

                assert time.monotonic() - begun < 0.1 + ANSWER / 2
                done.set()

            store.barrier()

        on_ranks(body, 3)


def test_last_rank_closes_while_another_one_still_wakes_it():
    """Two ranks of a process leave at once: the first to say goodbye wakes the other one, which has gone on by then."""
    watch = Watch()
    watch.close()
    watch.kick()


def handled(store, kind, instead):
    """Let ``instead`` handle such messages of other nodes; it is given the handler, too."""
    handlers = store._session.node.handlers
    handler = handlers[kind]
    handlers[kind] = lambda peer, message: instead(handler, peer, message)
