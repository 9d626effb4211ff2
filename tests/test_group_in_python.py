"""ThreadGroup over a process group that is written in Python, as the example's: with few methods, told little."""

import threading
from pathlib import Path

import pytest
import torch

import dtorch_core
from dtorch_core import (
    AbortedError,
    BackendSpec,
    DtorchError,
    PeerLostError,
    Support,
    UnsupportedOperationError,
    hookimpl,
    use_backend,
)
from dtorch_core.testing import run_kit, run_ranks

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parents[1] / "examples" / "dtorch_example_group" / "src"))
    from dtorch_example_group.group import ExampleGroup

LIMIT = 20.0


class AsInC10d(ExampleGroup):
    """Its abort is told nothing."""

    def abort(self):
        super().abort("somebody has aborted it")


class Deaf(ExampleGroup):
    """Its abort is told why, and forgets it."""

    def abort(self, *args, **named):
        super().abort("somebody has aborted it")


class OverAStore(ExampleGroup):
    def __init__(self, ctx):
        super().__init__(ctx)
        ctx.open_store("data").close()


class Plugin:
    @hookimpl
    def dtorch_register_thread_groups(self):
        def probe(topology):
            return Support.yes(1, "threads")

        few = frozenset({"cpu", "uneven", "bitwise_ops", "rank_order"})
        classes = {kind.__name__: (kind, few, set()) for kind in (ExampleGroup, AsInC10d, Deaf)}
        classes["boastful"] = (AsInC10d, few | {"async", "mismatch"}, set())
        classes |= {f"needs {word}": (OverAStore, few, {word}) for word in ("zero_copy", "multi_host")}
        return [
            BackendSpec(name, f"{kind.__module__}:{kind.__name__}", probe, capabilities=words, store_needs=needs)
            for name, (kind, words, needs) in classes.items()
        ]


@pytest.fixture(scope="module", autouse=True)
def registered():
    dtorch_core.register(Plugin(), name="groups in Python")
    yield
    dtorch_core.unregister("groups in Python")


class TestAbort:
    @pytest.mark.parametrize(
        ("backend", "died", "error", "said"),
        [
            ("ExampleGroup", False, AbortedError, "rank 1 is out of paper"),
            ("ExampleGroup", True, PeerLostError, r"rank 1 \(pid \d+\) was lost: rank 1 is out of paper"),
            ("AsInC10d", True, AbortedError, "somebody has aborted it"),
        ],
    )
    def test_group_is_told_as_much_as_its_abort_takes(self, backend, died, error, said):
        ended = threading.Barrier(2)

        def body(ctx):
            group = ctx.open_group(backend=backend, timeout=LIMIT)
            if ctx.rank == 1:
                group.abort("rank 1 is out of paper", died=died)

            ended.wait(LIMIT)
            with pytest.raises(DtorchError, match=said) as caught:
                group.barrier()

            return type(caught.value)

        assert run_ranks(body, 2, 2 * LIMIT) == [error] * 2

    def test_reason_that_nobody_gave_names_the_rank(self):
        def body(ctx):
            with ctx.open_group(backend="ExampleGroup", timeout=LIMIT) as group:
                group.abort()
                with pytest.raises(AbortedError, match="rank 0 aborted the group 'world'"):
                    group.barrier()

        run_ranks(body, 1, 2 * LIMIT)

    @pytest.mark.parametrize("backend", ["AsInC10d", "Deaf"])
    @pytest.mark.parametrize(
        "test", ["abort_wakes_every_rank_now_and_later[barrier]", "rank_that_fails_ends_the_run_at_once[barrier]"]
    )
    def test_kit_says_which_method_to_write(self, backend, test):
        (outcome,) = run_kit("group", backend, select=[f"test_{test}"], patience=5.0)
        assert outcome.state == "failed"
        assert 'def abort(self, reason="", *, died=False)' in outcome.report
        assert "docs/backend.md" in outcome.report


    @pytest.mark.parametrize("word", ["async", "mismatch"])
    def test_kit_says_which_methods_a_capability_takes(self, word):
        (outcome,) = run_kit("group", "boastful", select=[f"test_{word}_has_the_methods_that_it_takes"])
        assert outcome.state == "failed"
        assert "has no post_notes, receive, refuse, abort as dtorch_core.extras.Extras has them" in outcome.report


class TestStoreNeeds:
    def test_store_that_lacks_something_is_refused_on_every_rank(self):
        def body(ctx):
            said = r"rank \d: needs multi_host needs a store that declares 'multi_host', and memory does not"
            with use_backend(store="memory"), pytest.raises(UnsupportedOperationError, match=said):
                ctx.open_group(backend="needs multi_host", timeout=LIMIT)

        run_ranks(body, 2, 2 * LIMIT)

    def test_store_that_lacks_nothing_is_opened(self):
        def body(ctx):
            with use_backend(store="memory"), ctx.open_group(backend="needs zero_copy", timeout=LIMIT) as group:
                group.barrier()

        run_ranks(body, 2, 2 * LIMIT)


class TestValues:
    @pytest.mark.parametrize("world_size", [1, 2, 3])
    @pytest.mark.parametrize("size", [12, 13])
    @pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.int32, torch.uint32, torch.uint64], ids=str)
    def test_bits_are_scattered_of_every_dtype(self, dtype, size, world_size):
        """Those that few groups carry travel as bytes, on both sides."""

        def body(ctx):
            xs = [torch.arange(size).mul(37 + rank).to(dtype) for rank in range(world_size)]
            wanted = xs[0]
            for x in xs[1:]:
                wanted = (wanted.view(torch.uint8) ^ x.view(torch.uint8)).view(dtype)

            with ctx.open_group(backend="ExampleGroup", timeout=LIMIT) as group:
                got = group.reduce_scatter(xs[ctx.rank], 0, "bxor")
                step = -(-size // world_size)
                assert torch.equal(got, wanted[ctx.rank * step : (ctx.rank + 1) * step])

        run_ranks(body, world_size, 2 * LIMIT)
