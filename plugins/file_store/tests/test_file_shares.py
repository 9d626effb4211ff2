"""Who gets a share of what was published, where fewer are to be had than ranks that want one."""

import threading
from pathlib import Path

import pytest
import torch

from dtorch_core import StoreTimeoutError
from dtorch_core.testing import run_ranks

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import file_store_ranks as ranks
    from file_store_ranks import LIMIT, on_ranks, values

node_each = ranks.node_each  # a fixture


def tried(store, key, timeout):
    try:
        return store.dest_get(key, timeout=timeout)
    except StoreTimeoutError:
        return None


@pytest.mark.usefixtures("node_each")
class TestShares:
    """Fewer shares than ranks that want one: exactly so many get one, whoever decides it."""

    @pytest.mark.parametrize("get_count", [1, 2])
    def test_ranks_compete(self, get_count):
        def body(store):
            shares = []
            for number in range(15):
                key, source = f"{number}", number % 4
                if store.rank == source:
                    store.src_set(key, values(number), get_count)
                    store.barrier()
                    store.barrier()
                    store.src_wait_until_get_finished(key)
                    shares.append(0)
                else:
                    shares.append(self.takes(store, key, values(number)))

            return shares

        assert [sum(each) for each in zip(*on_ranks(body, 4), strict=True)] == [get_count] * 15

    def test_producer_competes(self):
        """There is a share for each other rank, which take theirs without asking; then the producer wants one."""

        def body(store):
            shares = []
            for number in range(15):
                if store.rank == number % 3:
                    store.src_set("k", values(number), 2)

                shares.append(self.takes(store, "k", values(number)))
                if store.rank == number % 3:
                    store.src_wait_until_get_finished("k")

                store.barrier()

            return shares

        assert [sum(each) for each in zip(*on_ranks(body, 3), strict=True)] == [2] * 15

    @pytest.mark.parametrize("get_count", [1, 2])
    @pytest.mark.parametrize("first", ["the producer", "the others"])
    def test_producer_leaves(self, first, get_count):
        """Who decides it leaves meanwhile: another node does, and knows who has had one."""
        for number in range(8):
            ready = threading.Barrier(4)

            def body(store, number=number, ready=ready):
                if store.rank == 0:
                    if first == "the producer":
                        store.src_set("k", values(number), get_count)
                        ready.wait(LIMIT)
                    else:
                        ready.wait(LIMIT)
                        store.src_set("k", values(number), get_count)

                    return 0  # and closes it

                ready.wait(LIMIT)
                got = tried(store, "k", 0.1)
                ready.wait(LIMIT)
                got = tried(store, "k", 0.0) if got is None else got
                ready.wait(LIMIT)
                if got is None:
                    return 0

                assert torch.equal(got, values(number))
                store.dest_finish_get("k")
                return 1

            def rank(ctx, body=body, ready=ready):
                with ctx.open_store("own", backend="file", timeout=LIMIT) as store:
                    won = body(store)

                for _ in range(2 if ctx.rank == 0 else 0):
                    ready.wait(LIMIT)

                return won

            assert sum(run_ranks(rank, 4, LIMIT)) == get_count

    @staticmethod
    def takes(store, key, wanted):
        """Whether this rank gets a share, at once or when all have tried."""
        got = tried(store, key, 0.05)
        store.barrier()
        got = tried(store, key, 0.0) if got is None else got
        store.barrier()
        if got is None:
            return 0

        assert torch.equal(got, wanted)
        store.dest_finish_get(key)
        return 1
