"""What is queued for a peer that does not read leaves when it does, whichever thread was sending."""

import socket

import pytest
from dtorch_file_store.link import Link
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
