"""How streams of several processes wait for each other. On a driver of ours."""

import ctypes
import json
import os
import threading
from pathlib import Path

import pytest
from dtorch_file_store.cuda.driver import DriverError
from dtorch_file_store.cuda.janitor import JANITOR
from dtorch_file_store.cuda.signals import COUNTERS, Mark, OwnSignals, PeerSignals, at_least

from dtorch_core.errors import (
    AbortedError,
    DtorchError,
    UnsupportedOperationError,
)

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import file_cuda_ours as ours
    from file_cuda_ours import LIMIT

calls = ours.calls  # a fixture


class OurStream:
    device_index = 0

    def __init__(self, handle):
        self.cuda_stream = handle

    def query(self):
        return True


class TestSignals:
    @pytest.fixture
    def pages(self, calls):
        """One's own page and as many as are asked for of others that wait for it."""
        own = OwnSignals(calls)
        made = [own]

        def more():
            made.append(PeerSignals(calls, os.dup(own.fd)))
            return made[-1]

        yield own, more
        for page in made:
            page.close()

        assert JANITOR.settle(LIMIT) and not calls.registered

    def test_each_stream_counts_for_itself(self, pages):
        own, more = pages
        peer = more()
        marks = [own.write(OurStream(handle)) for handle in (0, 7, 0, 7, 7)]
        assert marks == [(0, 1), (1, 1), (0, 2), (1, 2), (1, 3)]
        assert all(peer.reached(mark) for mark in marks) and not peer.reached(Mark(0, 3))
        assert Mark.from_json(json.loads(json.dumps(marks[1]))) == marks[1]

    def test_an_idle_stream_needs_no_signal(self, calls, pages):
        own, _ = pages
        idle, busy = OurStream(1), OurStream(2)
        busy.query = lambda: False
        assert own.mark(idle) is None and not calls.registered
        assert [own.mark(busy), own.mark(idle), own.mark(busy)] == [(0, 1), None, (0, 2)]
        calls.captured.add(2)
        busy.query = None
        with pytest.raises(UnsupportedOperationError, match="captured into a graph"):
            own.mark(busy)

    def test_a_wait_is_queued_only_for_what_has_not_happened(self, calls, pages):
        own, more = pages
        peer = more()
        peer.wait(own.write(OurStream(3)), OurStream(4))
        assert not calls.waits and not calls.registered - {own._host}
        peer.wait(Mark(0, 2), OurStream(4))
        assert calls.waits == [(4, peer._host, 2)]

    @pytest.mark.parametrize("start", [0, 2**31 - 2, 2**32 - 3])
    def test_numbers_go_round(self, pages, start):
        own, more = pages
        peer = more()
        peer._counters[0] = start
        marks = [own.write(OurStream(1)) for _ in range(5)]
        assert [mark.value for mark in marks] == [(start + step) % 2**32 for step in range(1, 6)]
        assert all(peer.reached(mark) for mark in marks) and not peer.reached(Mark(0, (start + 6) % 2**32))

    def test_at_least_is_the_devices_comparison(self):
        for now, value in [(5, 5), (6, 5), (0, 2**32 - 1), (2**31 - 1, 0), (4, 5), (2**32 - 1, 0), (2**31, 0)]:
            assert at_least(now, value) == (ctypes.c_int32(now - value).value >= 0), (now, value)

    def test_the_dead_let_everybody_go(self, calls, pages):
        own, more = pages
        peer, other = more(), more()
        own.write(OurStream(1))
        pending = [Mark(0, 5), Mark(0, 3), Mark(9, 2**32 - 1)]
        for mark in pending:
            peer.wait(mark, OurStream(2))

        other.wait(Mark(0, 8), OurStream(2))
        for survivor in (peer, other, peer):
            survivor.release()

        assert all(at_least(own._counters[mark.counter], mark.value) for mark in [*pending, Mark(0, 8)])
        assert peer.reached(Mark(77, 1))
        queued = len(calls.waits)
        peer.wait(Mark(0, 500), OurStream(2))
        assert len(calls.waits) == queued

    def test_a_late_store_of_the_dead_is_made_good_for(self, pages):
        own, more = pages
        peer = more()
        peer.wait(Mark(0, 5), OurStream(2))
        peer.release()
        assert at_least(own._counters[0], 1000), "other survivors may wait for more, and have stored before"
        own._counters[0] = 4
        peer.close()
        peer.release()
        assert at_least(own._counters[0], 5)

    def test_a_failed_call_uses_no_number_up(self, calls, pages):
        own, _ = pages
        calls.refuses = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
        with pytest.raises(DriverError):
            own.write(OurStream(1))

        calls.refuses = None
        assert own.write(OurStream(1)) == (0, 1)
        own.close()
        assert JANITOR.settle(LIMIT) and not calls.registered

    def test_the_dead_are_released_while_the_driver_is_blocked(self, calls, pages):
        own, more = pages
        peer = more()
        inside, go = threading.Event(), threading.Event()
        calls.stream_wait = lambda *_: (inside.set(), go.wait(LIMIT))
        thread = threading.Thread(target=peer.wait, args=[Mark(0, 5), OurStream(1)])
        thread.start()
        assert inside.wait(LIMIT)
        peer.release()
        assert thread.is_alive() and at_least(own._counters[0], 5) and peer.reached(Mark(0, 9))
        go.set()
        thread.join(LIMIT)

    def test_a_captured_stream_is_refused(self, calls, pages):
        own, _ = pages
        calls.captured.add(1)
        with pytest.raises(UnsupportedOperationError, match="captured into a graph"):
            own.write(OurStream(1))

        assert not calls.registered, "nothing is registered while a graph is captured"
        calls.captured.clear()
        assert own.write(OurStream(1)) == (0, 1)

    def test_more_streams_than_counters_are_refused(self, pages):
        own, _ = pages
        for handle in range(COUNTERS):
            own.write(OurStream(handle))

        with pytest.raises(DtorchError, match=f"{COUNTERS} streams already"):
            own.write(OurStream(COUNTERS))

    def test_closed_pages_are_given_back_whole(self, calls):
        def fds():
            return len(os.listdir("/proc/self/fd"))

        before = fds()
        for _ in range(3):
            own = OwnSignals(calls)
            peer = PeerSignals(calls, os.dup(own.fd))
            mark = own.write(OurStream(1))
            peer.wait(Mark(0, 2), OurStream(1))
            for page in (own, peer, own):
                page.close()

            with pytest.raises(AbortedError, match="closed"):
                own.write(OurStream(1))

            with pytest.raises(AbortedError, match="closed"):
                peer.wait(Mark(0, 3), OurStream(1))

            assert JANITOR.settle(LIMIT) and peer.reached(mark) and not peer.reached(Mark(0, 2))

        assert not calls.registered and JANITOR.held == 0 and fds() == before

    def test_a_page_is_kept_while_a_thread_queues(self, calls, pages):
        own, _ = pages
        inside, go = threading.Event(), threading.Event()
        calls.stream_write = lambda *_: (inside.set(), go.wait(LIMIT))
        thread = threading.Thread(target=own.write, args=[OurStream(1)])
        thread.start()
        assert inside.wait(LIMIT)
        own.close()
        assert not JANITOR.settle(0.05) and calls.registered
        go.set()
        thread.join(LIMIT)
        assert JANITOR.settle(LIMIT) and not calls.registered
