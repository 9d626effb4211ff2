"""A store of the four steps alone: all else of it is what the base class makes of them."""

from functools import partial

import pytest
from dtorch_memory_store.store import MemoryTensorStore

import dtorch_core
from dtorch_core import BackendSpec, Support, TensorStore, hookimpl
from dtorch_core.testing import run_ranks

LIMIT = 15.0


class FourStepStore(MemoryTensorStore):
    """The memory store's four steps, and the base class's defaults for everything made of them."""

    post = TensorStore.post
    send = TensorStore.send
    expect = TensorStore.expect


class Plugin:
    @hookimpl
    def dtorch_register_tensor_stores(self):
        def probe(topology):
            return Support.yes(1, "threads") if topology.same_process else Support.no("several processes")

        words = frozenset({"cpu", "cuda", "zero_copy"})
        return [BackendSpec("four steps", f"{__name__}:FourStepStore", probe, capabilities=words)]

    @hookimpl
    def dtorch_register_thread_groups(self):
        def probe(topology):
            return Support.yes(1, "a samedevice group that can't receive from any source")

        words = "cpu cuda uneven bitwise_ops p2p tags self_send split mismatch rank_order async"
        factory = "dtorch_samedevice_group.group:open_process_group"
        return [BackendSpec("over four steps", factory, probe, capabilities=frozenset(words.split()))]


@pytest.fixture(scope="module", autouse=True)
def registered():
    dtorch_core.register(Plugin(), name="four steps")
    yield
    dtorch_core.unregister("four steps")


def on_ranks(body, world_size=2, timeout=LIMIT):
    def rank(ctx):
        with ctx.open_store("own", backend="four steps", timeout=timeout) as store:
            return body(store)

    return run_ranks(rank, world_size, 2 * LIMIT)


def held_back(store, part):
    """Keep what this rank says under keys with ``part`` from the others, as a slow wire does; what lets it arrive."""
    says, kept = store.src_set, []

    def src_set(key, *args, **options):
        if part in key:
            kept.append(partial(says, key, *args, **options))
        else:
            says(key, *args, **options)

    def arrive():
        store.src_set = says
        for say in kept:
            say()

    store.src_set = src_set
    return arrive


def add_up(offers):
    """Every tensor becomes the sum of all ranks'; two tasks a tensor."""
    tasks = []
    for tensors in zip(*(offer.tensors for offer in offers), strict=True):
        total = sum(tensor.clone() for tensor in tensors)
        tasks += [lambda tensor=tensor, total=total: tensor.copy_(total) for tensor in tensors]

    return tasks


def held_until(begun, release):
    """As add_up, which says that it has begun, and waits until it is let go on."""

    def held(offers):
        begun.set()
        assert release.wait(LIMIT)
        return add_up(offers)

    return held
