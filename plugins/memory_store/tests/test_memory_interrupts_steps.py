"""A signal's handler raises in a rank's thread amid a step, at a gate or with a message: no other rank hangs for it."""

import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from dtorch_memory_store.mail import Message
from dtorch_memory_store.publication import Publication
from dtorch_memory_store.session import Session

from dtorch_core.testing import Background

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from memory_interrupts import (
        LIMIT,
        LONG,
        at_every_place,
        goodbye,
        interrupted_at,
        outcome,
        sleeps_fixture,
        traceable,
    )

__all__ = ["goodbye", "sleeps_fixture"]  # fixtures
pytestmark = traceable


class TestKeys:
    def test_put_and_wait(self, sleeps, goodbye):
        def attempt(number):
            session = Session("interrupts", 2)

            def takes():
                publication = session.keys.get(1, "k", LONG)
                session.keys.finish(1, "k", None)
                return publication

            def body():
                session.keys.put("k", Publication(0, torch.ones(2), 1, None))
                session.keys.wait(0, "k", LONG)

            peer = Background(takes)
            sleeps.wait(peer)
            found = interrupted_at(number, body)
            if found:
                if "k" in session.keys._keys:  # it is set: that needs no goodbye
                    assert isinstance(outcome(peer), Publication)

                goodbye(session)

            got = outcome(peer)
            assert found or isinstance(got, Publication)
            return found

        at_every_place(attempt)

    def test_get_and_finish(self, sleeps, goodbye):
        def attempt(number):
            session = Session("interrupts", 2)

            def publishes():
                session.keys.put("k", Publication(1, torch.ones(2), 1, None))
                session.keys.wait(1, "k", LONG)
                return "finished"

            def body():
                session.keys.get(0, "k", LONG)
                session.keys.finish(0, "k", None)

            peer = Background(publishes)
            sleeps.wait(peer)
            found = interrupted_at(number, body)
            if found:
                publication = session.keys._keys.get("k")
                if publication is None or publication.finished:
                    assert outcome(peer) == "finished"

                goodbye(session)

            end = outcome(peer)
            assert found or end == "finished"
            return found

        at_every_place(attempt)

    def test_get_takes_no_share(self):
        """It can be repeated, whether the key was set before or while it waited."""

        def attempt(number, early):
            session = Session("interrupts", 2)
            publication = Publication(1, torch.ones(2), 1, None)
            if early:
                session.keys.put("k", publication)
                found = interrupted_at(number, lambda: session.keys.get(0, "k", LONG))
            else:
                setter = Background(lambda: session.keys.put("k", publication))
                found = interrupted_at(number, lambda: session.keys.get(0, "k", LONG))
                setter.result(LIMIT)

            if found:
                assert Background(lambda: session.keys.get(0, "k", LIMIT)).result(LIMIT) is publication

            return found

        at_every_place(lambda number: attempt(number, True))
        at_every_place(lambda number: attempt(number, False))

    def test_wait_can_be_repeated(self):
        def attempt(number, early):
            session = Session("interrupts", 2)
            session.keys.put("k", Publication(0, torch.ones(2), 1, None))
            session.keys.get(1, "k", LONG)
            finisher = Background(lambda: session.keys.finish(1, "k", None))
            if early:
                finisher.result(LIMIT)

            found = interrupted_at(number, lambda: session.keys.wait(0, "k", LONG))
            finisher.result(LIMIT)
            if found:
                Background(lambda: session.keys.wait(0, "k", LIMIT)).result(LIMIT)

            assert not session.keys._keys
            return found

        at_every_place(lambda number: attempt(number, True))
        at_every_place(lambda number: attempt(number, False))


class TestGates:
    @pytest.mark.parametrize("call", ["barrier", "reset"])
    @pytest.mark.parametrize("last", [True, False])
    def test_gate(self, sleeps, goodbye, call, last):
        def attempt(number):
            session = Session("interrupts", 2)
            first = threading.Event()

            def passes():
                assert last or first.wait(LIMIT)
                getattr(session, call)(1, LONG)
                return "through"

            def body():
                first.set()
                getattr(session, call)(0, LONG)

            peer = Background(passes)
            if last:
                sleeps.wait(peer)

            found = interrupted_at(number, body)
            if found:
                goodbye(session)

            end = outcome(peer)
            assert found or end == "through"
            return found

        at_every_place(attempt)

    def test_barrier_opens_for_all_or_none(self, sleeps):
        """Without a goodbye: where it has not opened, who was interrupted can come back."""

        def attempt(number):
            session = Session("interrupts", 4)
            peers = []
            for rank in range(1, 4):
                peers.append(Background(partial(session.barrier, rank, LONG)))
                sleeps.wait(peers[-1])

            waiting = list(session._barrier.here.values())
            found = interrupted_at(number, lambda: session.barrier(0, LONG))
            assert 0 not in session._barrier.here
            opened = {waiter.done for waiter in waiting}
            assert opened in ({True}, {False} if found else {True})
            if opened == {False}:
                Background(lambda: session.barrier(0, LIMIT)).result(LIMIT)

            for peer in peers:
                peer.result(LIMIT)

            return found

        at_every_place(attempt)


class TestMessages:
    def test_send(self, sleeps, goodbye):
        def attempt(number):
            session = Session("interrupts", 2)
            peer = Background(lambda: session.letters.expect(1, 0, 7).wait(LONG))
            sleeps.wait(peer)
            found = interrupted_at(number, lambda: session.letters.deliver(Message(0, 7, torch.ones(2), None), 1))
            if found:
                goodbye(session)

            end = outcome(peer)
            assert found or not isinstance(end, Exception)
            return found

        at_every_place(attempt)

    @pytest.mark.parametrize("early", [True, False])
    def test_interrupted_receive_takes_no_message(self, early):
        def attempt(number):
            session = Session("interrupts", 2)
            messages = [Message(1, 7, torch.ones(2), None) for _ in range(2)]

            def send():
                for message in messages:
                    session.letters.deliver(message, 0)

            if early:
                send()

            receipts = []
            found = interrupted_at(number, lambda: receipts.append(session.letters.expect(0, 1, 7)))
            if not early:
                send()

            receipts += [session.letters.expect(0, 1, 7) for _ in range(2 - len(receipts))]
            assert [receipt.message for receipt in receipts] == messages
            return found

        at_every_place(attempt)
