"""Ranks of a memory store that are threads of this process."""

from dtorch_core.testing import run_ranks

LIMIT = 15.0


def on_ranks(body, world_size):
    def rank(ctx):
        with ctx.open_store("own", backend="memory", timeout=LIMIT) as store:
            return body(store)

    return run_ranks(rank, world_size, 2 * LIMIT)
