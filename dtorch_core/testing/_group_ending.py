"""Calls that end otherwise: at their deadline, by abort or close, and because a rank left or died."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from dtorch_core.errors import AbortedError, DtorchError, PeerLostError, RankFailedError, StoreTimeoutError
from dtorch_core.group import ThreadGroup
from dtorch_core.launcher import RankContext
from dtorch_core.testing._group_base import COLLECTIVES, EACH, SHORT, Collective, GroupConformance, coded, same
from dtorch_core.testing._harness import Background, asleep, requires

AT_ONCE = 5.0
"""Seconds within which a wait ends that need not last until its deadline."""

LONG_WAIT = 60.0
"""A deadline that no test waits for."""

HOW_IT_IS_TOLD = (
    'the process group is told in `def abort(self, reason="", *, died=False)`, and not where its abort lacks these '
    "arguments (docs/backend.md, Groups)"
)

Wait = Callable[[ThreadGroup, float], object]


def _wait_of(collective: Collective) -> Wait:
    return lambda group, timeout: collective.call(group, coded(group.rank, (4, 4), group.device), timeout=timeout)


WAITS: dict[str, Wait] = {
    **{collective.name: _wait_of(collective) for collective in COLLECTIVES},
    "barrier": lambda group, timeout: group.barrier(timeout=timeout),
}
SOME = ("all_reduce", "all_gather", "barrier")
"""One of each way to run: with known sizes, with sizes exchanged, without tensors."""


class EndingTests(GroupConformance):
    """How calls end when ranks do not come."""

    # Deadlines

    @pytest.mark.parametrize("wait", WAITS)
    def test_timeout_names_who_has_not_come_and_who_gave_up(self, wait: str) -> None:
        self.needs_meeting(wait)
        gave_up = threading.Event()

        def body(group: ThreadGroup) -> None:
            if group.rank == 1:
                assert gave_up.wait(self.patience)
            else:
                begun = time.monotonic()
                with pytest.raises(StoreTimeoutError, match="rank 1") as caught:
                    WAITS[wait](group, SHORT)

                assert isinstance(caught.value, TimeoutError)
                assert 0.9 * SHORT < time.monotonic() - begun < AT_ONCE
                gave_up.set()

            for later in (wait, *SOME):
                begun = time.monotonic()
                with pytest.raises(AbortedError, match="rank 0"):
                    WAITS[later](group, LONG_WAIT)

                assert time.monotonic() - begun < AT_ONCE

        self.ranks(body, 2)

    def test_timeout_of_the_group_is_the_default(self) -> None:
        over = threading.Event()

        def body(group: ThreadGroup) -> None:
            if group.rank == 1:
                assert over.wait(self.patience)
                return

            with pytest.raises(StoreTimeoutError, match="rank 1"):
                group.all_gather(coded(0, device=group.device))

            over.set()

        self.ranks(body, 2, timeout=5 * SHORT)

    @pytest.mark.parametrize("wait", SOME)
    def test_timeout_is_each_ranks_own(self, wait: str) -> None:
        self.needs_meeting(wait)
        over = threading.Barrier(3)

        def body(group: ThreadGroup) -> float:
            begun = time.monotonic()
            if group.rank < 2:
                with pytest.raises(StoreTimeoutError, match="rank 2") as caught:
                    WAITS[wait](group, (SHORT, 5 * SHORT)[group.rank])

                assert f"rank {1 - group.rank} had" not in str(caught.value)

            lasted = time.monotonic() - begun
            over.wait(self.patience)
            return lasted

        first, second, _ = self.ranks(body, 3)
        assert 0.9 * SHORT < first
        assert second > 4.5 * SHORT, "it was ended by the other rank's deadline"

    @requires("split")
    def test_timeout_of_a_split(self) -> None:
        over = threading.Event()

        def body(group: ThreadGroup) -> None:
            if group.rank == 1:
                assert over.wait(self.patience)
                return

            with pytest.raises(StoreTimeoutError, match="rank 1"):
                group.split([0, 1], timeout=SHORT)

            over.set()

        self.ranks(body, 2)

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_barrier_lets_nobody_through_before_all_have_come(self, world_size: int) -> None:
        """In turn, each rank comes when the others have stood before it for a while, or have wrongly gone on."""
        standing = threading.Barrier(world_size)
        came = [threading.Event() for _ in range(2 * world_size)]
        early: list[str] = []

        def body(group: ThreadGroup) -> None:
            for turn, last in enumerate(came):
                if group.rank == turn % world_size:
                    standing.wait(self.patience)
                    last.set()
                    group.barrier()
                    continue

                def through(last: threading.Event = last) -> bool:
                    group.barrier()
                    return last.is_set()

                call = Background(through)
                asleep(call)
                standing.wait(self.patience)
                if not call.result(self.patience):
                    early.append(f"rank {group.rank} before rank {turn % world_size} had come")

        self.ranks(body, world_size)
        assert not early, f"the barrier let through: {', '.join(early)}"

    # Abort and close

    @pytest.mark.parametrize("wait", WAITS)
    def test_abort_wakes_every_rank_now_and_later(self, wait: str) -> None:
        self.needs_meeting(wait)
        waiting = threading.Barrier(3)

        def body(group: ThreadGroup) -> None:
            if group.rank == 1:
                waiting.wait(self.patience)
                group.abort("rank 1 has had enough")
            else:
                call = Background(lambda: WAITS[wait](group, LONG_WAIT))
                asleep(call)
                waiting.wait(self.patience)
                with pytest.raises(AbortedError) as caught:
                    call.result(AT_ONCE)

                assert "had enough" in str(caught.value), f"{caught.value}: not the reason; {HOW_IT_IS_TOLD}"

            for later in SOME:
                with pytest.raises(AbortedError) as caught:
                    WAITS[later](group, LONG_WAIT)

                assert "had enough" in str(caught.value), f"{caught.value}: not the reason; {HOW_IT_IS_TOLD}"

            waiting.wait(self.patience)  # leaving would wake them too

        self.ranks(body, 3)

    def test_abort_without_a_reason_names_the_rank(self) -> None:
        aborted = threading.Event()

        def body(group: ThreadGroup) -> None:
            if group.rank == 1:
                group.abort()
                aborted.set()
            else:
                assert aborted.wait(self.patience)

            with pytest.raises(AbortedError, match="rank 1"):
                group.barrier()

        self.ranks(body, 2)

    @pytest.mark.parametrize("wait", SOME)
    def test_close_wakes_ones_own_wait(self, wait: str) -> None:
        self.needs_meeting(wait)
        over = threading.Event()

        def body(group: ThreadGroup) -> None:
            if group.rank == 1:
                assert over.wait(self.patience)
                return

            call = Background(lambda: WAITS[wait](group, LONG_WAIT))
            asleep(call)
            group.close()
            with pytest.raises(AbortedError):
                call.result(AT_ONCE)

            over.set()

        self.ranks(body, 2)

    @pytest.mark.parametrize("wait", SOME)
    def test_close_is_a_goodbye(self, wait: str) -> None:
        """Whoever needs the rank that left is told so, at once, and names it."""
        self.needs_meeting(wait)
        waiting = threading.Event()

        def body(group: ThreadGroup) -> None:
            if group.rank == 1:
                assert waiting.wait(self.patience)
                group.close()
                group.close()
                with pytest.raises(AbortedError):
                    WAITS[wait](group, LONG_WAIT)

                return

            call = Background(lambda: WAITS[wait](group, LONG_WAIT))
            asleep(call)
            waiting.set()
            with pytest.raises(PeerLostError, match="rank 1"):
                call.result(AT_ONCE)

            with pytest.raises(PeerLostError, match="rank 1"):
                WAITS[wait](group, LONG_WAIT)

        self.ranks(body, 2)

    def test_close_right_after_the_last_call_disturbs_nobody(self) -> None:
        def body(group: ThreadGroup) -> None:
            xs = [coded(rank, device=group.device) for rank in range(3)]
            assert same(group.all_reduce(xs[group.rank]), xs[0] + xs[1] + xs[2])

        for _ in range(20):
            self.ranks(body, 3)

    # Failure

    @pytest.mark.parametrize("wait", SOME)
    def test_rank_that_raises_out_of_the_group_wakes_the_others(self, wait: str) -> None:
        self.needs_meeting(wait)
        waiting = threading.Event()

        def rank(ctx: RankContext) -> None:
            group = ctx.open_group("kit", backend=self.backend, timeout=LONG_WAIT)
            assert group is not None
            if ctx.rank == 1:
                with pytest.raises(ZeroDivisionError), group:
                    assert waiting.wait(self.patience)
                    raise ZeroDivisionError("on purpose")

                return

            with pytest.raises(DtorchError) as caught, group:
                call = Background(lambda: WAITS[wait](group, LONG_WAIT))
                asleep(call)
                waiting.set()
                call.result(AT_ONCE)

            lost = isinstance(caught.value, PeerLostError) and "rank 1" in str(caught.value)
            assert lost, f"{caught.value!r}: rank 1 has died; {HOW_IT_IS_TOLD}"

        self.raw_ranks(rank, 2)

    @pytest.mark.parametrize("wait", WAITS)
    def test_rank_that_fails_ends_the_run_at_once(self, wait: str) -> None:
        self.needs_meeting(wait)
        waiting = threading.Barrier(3)
        woken: list[Exception] = []

        def rank(ctx: RankContext) -> None:
            group = ctx.open_group("kit", backend=self.backend, timeout=LONG_WAIT)
            assert group is not None
            if ctx.rank == 2:
                waiting.wait(self.patience)
                raise ZeroDivisionError("on purpose")

            call = Background(lambda: WAITS[wait](group, LONG_WAIT))
            asleep(call)
            waiting.wait(self.patience)
            try:
                call.result(AT_ONCE)
            except DtorchError as error:
                woken.append(error)
                raise

        begun = time.monotonic()
        with pytest.raises(RankFailedError, match="rank 2 of 3 failed with ZeroDivisionError"):
            self.raw_ranks(rank, 3)

        assert time.monotonic() - begun < 2 * AT_ONCE
        assert [type(error) for error in woken] == [PeerLostError] * 2, f"rank 2 has died; {HOW_IT_IS_TOLD}"
        assert all("rank 2" in str(error) for error in woken), f"{woken}: not the rank that died; {HOW_IT_IS_TOLD}"

    @requires("async")
    def test_failure_ends_futures_and_callbacks(self) -> None:
        begun = threading.Event()

        def body(group: ThreadGroup) -> None:
            if group.rank == 1:
                assert begun.wait(self.patience)
                group.close()
                return

            some = [c for c in COLLECTIVES if c.exchanges or "mismatch" in self.declared]
            works = [collective.call(group, coded(0, (4, 4), group.device), async_op=True) for collective in some]
            futures = [work.get_future() for work in works]
            called = threading.Semaphore(0)
            for future in futures:
                future.add_done_callback(lambda _: called.release())

            begun.set()
            for work, future in zip(works, futures, strict=True):
                assert called.acquire(timeout=AT_ONCE)
                with pytest.raises(PeerLostError, match="rank 1"):
                    future.wait()

                assert work.is_completed()
                assert isinstance(work.exception(), PeerLostError)

        self.ranks(body, 2)

    @EACH
    def test_group_that_nobody_else_opens_times_out(self, collective: Collective) -> None:
        """And a group of one needs nobody."""

        def body(group: ThreadGroup) -> None:
            xs = [coded(0, (2, 2), group.device)]
            assert same(collective.call(group, xs[0], timeout=SHORT), collective.wanted(xs, 0))

        self.ranks(body, 1)
