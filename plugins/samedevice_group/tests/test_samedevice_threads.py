"""Calls from several threads of a rank, and random programs."""

import random
from pathlib import Path

import pytest
import torch

from dtorch_core.testing import Background

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from samedevice_ranks import LIMIT, on_ranks, part


class TestThreads:
    def test_several_threads_of_a_rank_call_alike(self):
        """Calls that are all alike may come from several threads of a rank: whichever meet fit each other."""

        def body(pg, group):
            def use():
                for _ in range(50):
                    x = torch.ones(5)
                    pg.allreduce([x]).wait()
                    assert torch.equal(x, torch.full((5,), 2.0))

            threads = [Background(use) for _ in range(3)]
            for thread in threads:
                thread.result(LIMIT)

        on_ranks(body)

    def test_messages_from_several_threads(self):
        def body(pg, group):
            def talk(tag):
                for number in range(30):
                    group.send(part(number, 2), 1 - group.rank, tag)
                    assert torch.equal(group.recv(1 - group.rank, tag), part(number, 2))

            threads = [Background(lambda tag=tag: talk(tag)) for tag in range(4)]
            for thread in threads:
                thread.result(LIMIT)

        on_ranks(body)

    def test_random_programs(self):
        """Every rank runs the same program of random calls, sizes and waits, each in its own time."""
        rng = random.Random(7)
        names = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
        program = [(rng.choice(names), rng.choice([1, 7, 7, 200_000]), rng.random()) for _ in range(60)]

        def body(pg, group):
            own = random.Random(group.rank)
            n, kept = group.world_size, []

            def settle(name, size, work):
                xs = [part(r, size, n) for r in range(n)]
                wanted = {
                    "all_reduce": lambda: sum(xs),
                    "all_gather": lambda: torch.cat(xs),
                    "reduce_scatter": lambda: sum(xs)[:, group.rank : group.rank + 1],
                    "all_to_all": lambda: torch.cat([x[:, group.rank : group.rank + 1] for x in xs]),
                }[name]()
                assert torch.equal(work.result(), wanted), name

            for name, size, wait in program:
                x = part(group.rank, size, n)
                dims = {"reduce_scatter": (1,), "all_to_all": (1, 0)}.get(name, ())
                kept.append((name, size, getattr(group, name)(x, *dims, async_op=True)))
                while kept and wait < own.random():
                    settle(*kept.pop(own.randrange(len(kept))))

            for entry in kept:
                settle(*entry)

        on_ranks(body, 4)
