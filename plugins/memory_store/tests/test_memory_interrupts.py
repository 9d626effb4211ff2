"""A signal's handler raises in a rank's thread amid joint work, or as it leaves: no other rank hangs for it."""

import sys
import threading
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from dtorch_memory_store.session import Session

from dtorch_core import AbortedError
from dtorch_core.joint import Offer
from dtorch_core.testing import Background

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from memory_interrupts import (
        LEFT,
        LIMIT,
        LONG,
        MOST,
        Raising,
        abort,
        at_every_place,
        close,
        goodbye,
        interrupted_at,
        outcome,
        sleeps_fixture,
        traceable,
    )

__all__ = ["goodbye", "sleeps_fixture"]  # fixtures
pytestmark = traceable


def nothing(offers):
    return ()


def offer(rank):
    return Offer(rank, "a call", (torch.ones(2),))


def post_and_wait(session, rank, work=nothing):
    session.joint.post("k", offer(rank), work, None).wait(LONG)


class TestJointWork:
    """Once all have come, nobody needs the goodbye of the one that was interrupted."""

    @pytest.mark.parametrize("tasks", [0, 1, 4])
    def test_last_to_come(self, sleeps, tasks):
        def attempt(number):
            session = Session("interrupts", 2)
            peer = Background(partial(post_and_wait, session, 1))
            sleeps.wait(peer)
            first = session.joint._calls["k"]
            found = interrupted_at(number, lambda: post_and_wait(session, 0, lambda offers: [lambda: None] * tasks))
            if first.came < 2:
                close(session)

            error = outcome(peer)
            if isinstance(error, AbortedError):
                assert "rank 0 was interrupted in k, a call: " in str(error)

            assert found or error is None
            assert not session.joint._due
            assert not session._owed
            return found

        at_every_place(attempt)

    def test_helper(self, sleeps):
        def attempt(number):
            session = Session("interrupts", 2)
            posted, over, came = threading.Event(), threading.Event(), []

            def work(offers):
                me = threading.get_ident()

                def task():
                    if threading.get_ident() == me:
                        assert over.wait(LIMIT)
                    else:
                        over.set()

                return [task] * 3

            def help():
                try:
                    ticket = session.joint.post("k", offer(0), work, None)
                    posted.set()
                    ticket.wait(LONG)
                finally:
                    if not posted.is_set():
                        came.append("k" in session.joint._calls and session.joint._calls["k"].came == 1)
                        posted.set()

                    over.set()

            def comes_last():
                assert posted.wait(LIMIT)
                post_and_wait(session, 1, work)

            peer = Background(comes_last)
            found = interrupted_at(number, help)
            if came == [False]:
                close(session)

            error = outcome(peer)
            assert found or error is None
            return found

        at_every_place(attempt)

    def test_callback(self, sleeps):
        """Of another rank's, which the interrupted thread was to make."""

        def attempt(number):
            session = Session("interrupts", 2)
            told = threading.Event()
            session.joint.post("k", offer(1), nothing, None).add_done_callback(told.set)
            found = interrupted_at(number, lambda: post_and_wait(session, 0))
            if found:
                close(session)

            assert told.wait(LIMIT)
            return found

        at_every_place(attempt)

    @pytest.mark.parametrize("tasks", [0, 3])
    def test_interrupt_that_is_interrupted(self, sleeps, goodbye, tasks):
        """What a second one keeps from being mended, whoever ends the session mends."""

        def attempt(number, again):
            session = Session("interrupts", 2)
            peer = Background(partial(post_and_wait, session, 1))
            sleeps.wait(peer)
            first, second = session.joint._calls["k"], Raising(again)
            mend = session.joint.mend

            def mends():
                sys.settrace(second.called)  # the first interrupt has ended that
                mend()

            session.joint.mend = mends
            found = interrupted_at(number, lambda: post_and_wait(session, 0, lambda offers: [lambda: None] * tasks))
            session.joint.mend = mend
            if found:
                goodbye(session)

            error = outcome(peer)
            assert found or error is None
            assert first.finished or first.came < 2
            return found, second.left <= 0

        def with_seconds(number):
            for again in count(1):
                found, twice = attempt(number, again)
                if not twice:
                    return found

                assert again < MOST

        at_every_place(with_seconds)


class TestEnds:
    @pytest.mark.parametrize("end", [close, abort, lambda session: session.die(0, "it failed")])
    def test_end_that_is_interrupted(self, sleeps, end):
        """Those who wait are woken all the same."""

        def attempt(number):
            session = Session("interrupts", 2)
            peers = []
            for wait in (
                partial(post_and_wait, session, 1),
                lambda: session.keys.get(1, "k", LONG),
                lambda: session.barrier(1, LONG),
                lambda: session.letters.expect(1, 0, 7).wait(LONG),
            ):
                peers.append(Background(wait))
                sleeps.wait(peers[-1])

            found = interrupted_at(number, partial(end, session))
            if session.presence.complete:  # before it had begun
                assert found
                end(session)

            assert all(isinstance(outcome(peer), LEFT) for peer in peers)
            return found

        at_every_place(attempt)
