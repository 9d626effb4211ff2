"""A connection that several threads use: what is queued leaves, and no thread is at a socket that is closed."""

import enum
import os
import resource
import socket
import threading
import time

import pytest
from dtorch_file_store.link import Link, ready
from dtorch_file_store.watch import Watch
from dtorch_file_store.wire import Reader, frame

SIZE = 1 << 20


@pytest.fixture
def ends():
    """A connection that is watched, its watch, and the socket of the peer."""
    ours, theirs = socket.socketpair()
    link, watch = Link(ours, 1), Watch()
    watch.add_link(link)
    with theirs:
        yield link, watch, theirs

    link.close()
    watch.close()


def test_room_is_awaited_while_another_thread_leaves_something_over(ends):
    link, watch, peer = ends
    link.queue(frame("large", body=bytes(SIZE)))
    assert not link.flush()
    watch.await_room(link)
    with link._sending:  # another thread is sending, and finds no room again
        assert link.flush()
        watch.await_room(link)
        watch.has_room(link)  # as who reads says, for whom flush() has left it to that thread

    came = Reader()
    messages = []
    while not messages:
        messages = came.feed(peer.recv(SIZE))
        if not messages:
            events = list(watch.wait(1.0))
            assert [event.room for event in events if event.source is link] == [True], "nobody would send the rest"
            link.flush()

    assert len(messages[0].body) == SIZE
    watch.has_room(link)
    assert list(watch.wait(0.0)) == []


@pytest.mark.parametrize("at", ["reading", "_sending"])
def test_close_waits_for_who_is_at_the_socket(ends, at):
    """Its number is used again at once: a call that has begun would read or write what is another connection's."""
    link, _, _ = ends
    closing = threading.Thread(target=link.close, args=(20.0,))
    with getattr(link, at):
        number = link.socket.fileno()
        closing.start()
        closing.join(0.2)
        assert link.socket.fileno() == number

    closing.join(20.0)
    assert link.socket.fileno() == -1


def test_close_waits_no_longer_than_it_is_told(ends):
    link, _, _ = ends
    with link.reading, link._sending:
        link.close(0.0)

    assert link.socket.fileno() == -1


@pytest.mark.parametrize("seconds", [3e6, 1e10, threading.TIMEOUT_MAX])
def test_a_wait_may_be_longer_than_the_kernel_takes(ends, seconds):
    link, watch, peer = ends
    peer.send(b"x")
    watch.looking = 0.0  # it sleeps at once
    assert [event.source for event in watch.wait(seconds)] == [link]
    assert ready([link.socket.fileno()], seconds) == {link.socket.fileno()}


class TestLink:
    def test_descriptor_that_can_not_be_taken_is_lost_alone(self):
        """Those that come later are still with their own messages."""
        here, there = socket.socketpair()
        sender, receiver = Link(here, 1), Link(there, 0)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        sent = [os.memfd_create(f"fd {number}") for number in range(3)]
        got = []
        try:
            for number, fd in enumerate(sent):
                for name, given in (("before", None), ("with", fd)):
                    sender.queue(frame(name, number), given)

            assert sender.flush()
            while len(got) < len(sent):
                if not got:  # the next one to be made would have the first number that is free
                    os.close(lowest := os.dup(0))
                    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))

                try:
                    messages = receiver.receive()
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

                got += [receiver.take_fd() for message in messages if message.kind == "with"]

            assert got[0] == -1
            assert [os.readlink(f"/proc/self/fd/{fd}").split()[1] for fd in got[1:]] == ["1", "2"]
        finally:
            for fd in (*sent, *got[1:]):
                os.close(fd)

            sender.close()
            receiver.close()

    def test_peer_that_does_not_read_costs_little(self):
        """What is queued for it is not copied again with each message that follows."""
        here, there = socket.socketpair()
        link = Link(here, 1)
        message = frame("set", body=bytes(16_000))
        begun = time.process_time()
        with there:
            for _ in range(2000):
                link.queue(message)
                assert link.flush() in (True, False)

            took = time.process_time() - begun
            link.close()

        assert took < 0.5


def test_subclasses_of_plain_values_arrive_as_what_they_were_made_from():
    class Key(str):
        def __str__(self):
            return "another"

    class Number(enum.IntEnum):
        ONE = 1

    said = (Key("k"), Number.ONE, True, None, b"bytes", [Key("in a list"), 0.5], {Key("a"): (Number.ONE,)})
    (message,) = Reader().feed(frame("set", *said, body=b"body"))
    assert message == ("set", ("k", 1, True, None, b"bytes", ["in a list", 0.5], {"a": (1,)}), b"body")
    assert type(message.fields[0]) is str and type(message.fields[1]) is int and message.fields[2] is True
