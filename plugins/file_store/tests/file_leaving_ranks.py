"""What ranks do that leave, or go into reset(), with something of theirs still to be had: threads or processes."""

import random
import time

import torch

from dtorch_core import AbortedError, PeerLostError, use_backend

LIMIT = 20.0
ROUNDS = 20


def both(ctx, seed):
    return shares(ctx, seed), aborts(ctx)


def shares(ctx, seed):
    """In each round there are fewer shares than other ranks, and sometimes one who wants one more than there are.

    Who has set the key leaves at once. Returns for each round how it went, and how many shares there were."""
    own = random.Random(seed * 100 + ctx.rank)
    rounds = []
    for number in range(ROUNDS):
        with ctx.open_store(f"closes {number}", backend="file", timeout=LIMIT) as store:
            rounds.append(_round(store, random.Random(f"{seed} {number}"), own))

    with ctx.open_store("resets", backend="file", timeout=LIMIT) as store:
        for number in range(ROUNDS):
            rounds.append(_round(store, random.Random(f"{number} {seed}"), own))
            store.reset()

    return rounds


def _round(store, common, own):
    others = list(range(store.world_size))
    producer = others.pop(common.randrange(store.world_size))
    get_count = common.randint(1, len(others) - 1)
    wanting = common.sample(others, get_count + common.randint(0, 1))
    values = torch.arange(common.choice([3, 10_000]))
    store.barrier()
    if own.random() < 0.5:
        time.sleep(own.random() * 0.004)

    outcome = ""
    if store.rank == producer:
        store.src_set("k", values, get_count)
    elif store.rank in wanting:
        try:
            outcome = "got it" if torch.equal(store.dest_get("k"), values) else "got something else"
            store.dest_finish_get("k")
        except (PeerLostError, AbortedError) as error:
            outcome = type(error).__name__

    return outcome, get_count, len(wanting)


def check_shares(results):
    """Whoever could get a share has got it; the one that could not was told so."""
    for number, of_ranks in enumerate(zip(*results, strict=True)):
        outcomes = sorted(outcome for outcome, _, _ in of_ranks if outcome)
        _, get_count, wanting = of_ranks[0]
        refused = "PeerLostError" if number < ROUNDS else "AbortedError"
        assert outcomes == sorted(["got it"] * get_count + [refused] * (wanting - get_count)), (number, of_ranks)


def aborts(ctx):
    """Rank 0 ends everything and closes it at once: what each of the others is told, by what it waited in."""
    told = {}
    for name, wait in {
        "dest_get": lambda store: store.dest_get("k"),
        "src_wait": lambda store: (store.src_set(f"{store.rank}", torch.ones(3), 1), _wait(store)),
        "barrier": lambda store: store.barrier(),
        "reset": lambda store: store.reset(),
        "recv": lambda store: store.expect(0, 0).wait(LIMIT),
    }.items():
        told[name] = _told(ctx.open_store(name, backend="file", timeout=LIMIT), wait)

    with use_backend(store="file"), ctx.open_manager(timeout=LIMIT) as manager:
        group = ctx.open_group("group", timeout=LIMIT)
        told["all_reduce"] = _told(group, lambda group: group.all_reduce(torch.ones(3)))
        group = manager.get(range(ctx.world_size))
        told["manager"] = _told(group, lambda group: group.barrier(), lambda _: manager.abort("over"))

    return told


def _wait(store):
    store.src_wait_until_get_finished(f"{store.rank}")


def _told(handle, wait, abort=lambda handle: handle.abort("over") if hasattr(handle, "src_set") else handle.abort()):
    try:
        handle.barrier()
        if handle.rank:
            wait(handle)
        else:
            time.sleep(0.02)  # most of the others wait by then; whether they do is all the same
            abort(handle)
    except (PeerLostError, AbortedError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        handle.close()

    return ""
