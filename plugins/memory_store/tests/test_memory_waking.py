"""Who is woken by what the others do, and what is held while they are."""

import array
import threading
import weakref
from pathlib import Path

import pytest
import torch

from dtorch_core import PeerLostError
from dtorch_core.testing import Background, asleep

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from memory_ranks import LIMIT, on_ranks


class TestWakeUps:
    @pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux: the scheduler's count of wake-ups")
    def test_exchange_wakes_only_the_threads_of_its_key(self):
        """A hundred threads wait for other keys and stay asleep through two hundred exchanges."""

        def switches(thread):
            status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
            return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])

        def body(store):
            others = []
            if store.rank == 1:
                others = [Background(lambda n=n: store.dest_get(f"other {n}")) for n in range(100)]
                for other in others:
                    asleep(other)

            store.barrier()
            before = [switches(other.thread) for other in others]
            for _ in range(200):
                if store.rank == 0:
                    store.src_set("k", torch.arange(3), 1)
                    store.src_wait_until_get_finished("k")
                else:
                    store.dest_get("k")
                    store.dest_finish_get("k")

            after = [switches(other.thread) for other in others]
            assert sum(after) - sum(before) < 20
            store.barrier()
            for n in range(100) if store.rank == 0 else ():
                store.src_set(f"other {n}", torch.tensor(n), 1)

            assert [int(other.result()) for other in others] == list(range(len(others)))

        on_ranks(body, 2)


class TestJointWork:
    def test_callback_that_raises_keeps_nobody_asleep(self, caplog):
        """Rank 1 leaves: rank 0's callback is called on the way, and its thread behind it is woken."""

        def fail():
            raise KeyError("a callback's own error")

        def body(store):
            if store.rank == 1:
                asleep(waiting.result())
                return

            store.post("work", "note", [torch.arange(3)], lambda offers: []).add_done_callback(fail)
            receiver = Background(lambda: store.expect(1, 0).wait(LIMIT))
            started.append(receiver)
            ready.set()
            with pytest.raises(PeerLostError, match="rank 1"):
                receiver.result()

        started, ready = [], threading.Event()
        waiting = Background(lambda: ready.wait(LIMIT) and started[0])
        on_ranks(body, 2)
        assert "a callback's own error" in caplog.text

    def test_finished_work_holds_no_tensor(self):
        """Whoever keeps a ticket keeps no tensor of any rank."""
        alive = []

        def body(store):
            values = array.array("q", range(3))
            alive.append(weakref.ref(values))
            ticket = store.post("work", "note", [torch.frombuffer(values, dtype=torch.int64)], lambda offers: [])
            del values
            ticket.wait(LIMIT)
            store.barrier()
            assert [watch() for watch in alive] == [None, None]
            store.barrier()
            return ticket

        on_ranks(body, 2)

    def test_memory_is_not_freed_under_the_mutex(self):
        """What runs when a tensor dies may use the store."""

        def body(store):
            values = array.array("q", range(3))
            watch = weakref.ref(values, lambda _: store.src_set("last words", torch.arange(2), 1))
            ticket = store.post("work", "note", [torch.frombuffer(values, dtype=torch.int64)], lambda offers: [])
            del values
            ticket.wait(LIMIT)
            assert watch() is None
            assert store.dest_get("last words", timeout=LIMIT).tolist() == [0, 1]

        on_ranks(body, 1)
