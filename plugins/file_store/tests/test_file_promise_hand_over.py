"""The file promise: who has the right to set it, and who learns that nobody waits for it."""

from __future__ import annotations

import json
import os
import threading
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import torch
from dtorch_file_store import promise_packets
from dtorch_file_store.promise_line import connect
from dtorch_file_store.wire import frame

from dtorch_core import BrokenPromiseError, ProtocolError, attach_promise
from dtorch_core.testing._store_base import coded, same

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    pytest.register_assert_rewrite("file_promise_workers")
    import file_promise_workers as processes
    from file_promise_workers import BIG, WAIT, Clean, Worker, handed, ticket_of, value_of

# Fixtures.
other = processes.other
template = processes.template
victim = processes.victim
worker = processes.worker
workers = processes.workers


def with_ticket(token: bytes, **changed: Any) -> bytes:
    ticket = ticket_of(token)._replace(**changed)
    return json.dumps({**json.loads(token), "token": b64encode(json.dumps(ticket).encode()).decode()}).encode()


class TestHandOver(Clean):
    def test_token_is_attached_once(self, worker: Worker, other: Worker) -> None:
        token, future = handed()
        worker.do("promise = attach_promise(token)", token=token)
        with pytest.raises(ProtocolError, match="attached it already"):
            other.do("attach_promise(token)", token=token)

        with pytest.raises(ProtocolError, match="attached it already"):
            attach_promise(token)

        assert not future.done()
        worker.do("promise.set_result(None)")
        assert future.result(WAIT) is None

    def test_token_of_a_promise_that_has_ended(self, worker: Worker, other: Worker) -> None:
        """Also once nothing of the maker's listens any more."""
        token, future = handed()
        worker.do("attach_promise(token).set_result(None)", token=token)
        assert future.result(WAIT) is None
        for thread in threading.enumerate():
            if thread.name == "dtorch promises":
                thread.join(WAIT)

        with pytest.raises(ProtocolError, match=rf"pid {os.getpid()}, .* attached it already"):
            other.do("attach_promise(token)", token=token)

    def test_token_of_another_host_is_refused(self) -> None:
        token, future = handed()
        with pytest.raises(ProtocolError, match="another host"):
            attach_promise(with_ticket(token, host="elsewhere", address="nobody"))

        attach_promise(token).set_result(None)
        assert future.result(WAIT) is None

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
    def test_token_is_of_no_use_to_another_user(self, victim: Worker) -> None:
        token, future = handed()
        victim.do(
            "attach_promise(make_promise(backend='file').serialize()).set_result(None); os.setresuid(4711, 4711, 4711)"
        )
        with pytest.raises(ProtocolError, match=r"user with id 0\b"):
            victim.do("attach_promise(token)", token=token)

        # Nor does its maker listen to whoever leaves out the question.
        assert "user with id 0" in victim.do(
            """
            from dtorch_file_store import promise_packets, wire
            sock = promise_packets.new_socket()
            sock.connect("\\0" + address)
            try: sock.send(wire.frame("hello", secret))
            except OSError: pass
            answer = str(promise_packets.parse(promise_packets.receive(sock, 0)[0]))
            """,
            address=ticket_of(token).address,
            secret=ticket_of(token).secret,
        )
        assert not future.done()
        attach_promise(token).set_result(None)

    @pytest.mark.parametrize("way", ["token", "pickle"])
    def test_hand_over_by_a_holder(self, way: str, victim: Worker, other: Worker) -> None:
        """The one in between may end."""
        token, future = handed()
        take = "attach_promise(token)" if way == "token" else "pickle.loads(token)"
        give = "promise.serialize()" if way == "token" else "pickle.dumps(promise)"
        next_token = victim.do(f"promise = attach_promise(token); answer = {give}", token=token)
        victim.kill()
        assert not future.wait(0.05)
        other.do(f"promise = {take}; promise.set_result(torch.arange(3))", token=next_token)
        assert value_of(future).tolist() == [0, 1, 2]

    def test_hand_over_from_process_to_process(self, worker: Worker, other: Worker) -> None:
        token, future = handed()
        for turn in range(20):
            token = (worker, other)[turn % 2].do("answer = attach_promise(token).serialize()", token=token)

        promise = attach_promise(token)  # and back to its maker
        assert not future.done()
        promise.set_result(coded(1, BIG))
        assert same(value_of(future), coded(1, BIG))

    def test_token_is_good_before_its_handing_over_was_read(self) -> None:
        """The next holder connects first; then the one before hands on; then the next one asks."""
        (blocking, first), (token, future) = handed(), handed()
        busy, go_on = threading.Event(), threading.Event()

        def block(_: object) -> None:
            busy.set()
            assert go_on.wait(WAIT)

        first.add_done_callback(block)
        holder = connect(ticket_of(token), WAIT)
        connect(ticket_of(blocking), WAIT).send(frame("void"))
        assert busy.wait(WAIT)
        with promise_packets.new_socket() as sock:
            sock.settimeout(WAIT)
            sock.connect("\0" + ticket_of(token).address)
            assert holder.send(frame("handed over", "a new secret"))
            sock.send(frame("hello", "a new secret"))
            go_on.set()
            assert promise_packets.parse(sock.recv(1000)).kind == "yours"
            sock.send(frame("void"))
            assert future.result(WAIT) is None

    def test_future_stays_with_the_maker(self, worker: Worker) -> None:
        token, future = handed()
        with pytest.raises(ProtocolError, match=rf"its future is in pid {os.getpid()}"):
            worker.do("promise = attach_promise(token); promise.future()", token=token)

        worker.do("promise.set_result(None)")
        assert future.result(WAIT) is None

    def test_stranger_changes_nothing(self, worker: Worker) -> None:
        """What connects and talks nonsense, or nothing, has no right to set."""
        token, future = handed()
        strangers = []
        for packet in (b"\xff" * 100, frame("hello"), frame("value", 1), b"\0" * 8, None):
            sock = promise_packets.new_socket()
            sock.connect("\0" + ticket_of(token).address)
            if packet is not None:
                sock.send(packet)

            strangers.append(sock)

        worker.do("attach_promise(token).set_result(torch.arange(3))", token=token)
        assert value_of(future).tolist() == [0, 1, 2]
        for sock in strangers:
            sock.close()

    def test_holder_that_talks_nonsense_breaks_its_promise(self) -> None:
        for packet in (b"\xff" * 100, frame("odd"), frame("file", ["float32", [9], [1], 36])):
            token, future = handed()
            with promise_packets.new_socket() as sock:
                ticket = ticket_of(token)
                sock.connect("\0" + ticket.address)
                sock.send(frame("hello", ticket.secret))
                assert sock.recv(1000)
                sock.send(packet)
                with pytest.raises(BrokenPromiseError, match=rf"pid {os.getpid()}, sent can't be read"):
                    future.result(WAIT)

    def test_maker_without_a_descriptor_says_so(self, victim: Worker) -> None:
        token = victim.do(
            """
            p = make_promise(reach='process'); f = p.future(); answer = p.serialize()
            import resource
            resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
            full = []
            while len(full) < 200:
                try: full.append(os.dup(0))
                except OSError: break
            """
        )
        for _ in range(3):
            with pytest.raises(ProtocolError, match="Too many open files"):
                attach_promise(token)

        victim.do("for fd in full: os.close(fd)")
        attach_promise(token).set_result(torch.arange(3))
        assert victim.do("answer = f.result(30).tolist()") == [0, 1, 2]


class TestCancel(Clean):
    HEARD = """
    import select
    select.select([promise._line._fd], [], [], 30)
    answer = promise.cancelled()
    """

    def test_cancel_is_told_to_the_holder(self, worker: Worker) -> None:
        token, future = handed()
        assert worker.do("promise = attach_promise(token); answer = promise.cancelled()", token=token) is False
        assert future.cancel()
        assert worker.do(self.HEARD) is True
        worker.do("promise.set_result(torch.arange(3))")
        with pytest.raises(ProtocolError):
            worker.do("promise.set_result(None)")

        assert worker.do("answer = promise.cancelled()") is True
        assert future.cancelled()

    def test_cancel_before_it_is_attached(self, worker: Worker) -> None:
        token, future = handed()
        assert future.cancel()
        assert worker.do("promise = attach_promise(token); answer = promise.cancelled()", token=token) is True
        worker.do("promise.set_result(torch.arange(3))")

    def test_cancel_before_it_is_handed_on(self, worker: Worker, other: Worker) -> None:
        """A holder that comes late finds a promise that nobody waits for."""
        token, future = handed()
        worker.do("promise = attach_promise(token)", token=token)
        assert future.cancel()
        assert worker.do(self.HEARD) is True
        token = worker.do("answer = promise.serialize()")
        for _ in range(3):
            token = other.do(
                "promise = attach_promise(token); assert promise.cancelled(); answer = promise.serialize()", token=token
            )

        promise = attach_promise(token)
        assert promise.cancelled()
        promise.set_result(None)

    def test_cancel_against_handing_on(self, worker: Worker, other: Worker) -> None:
        for _ in range(30):
            token, future = handed()
            worker.do("promise = attach_promise(token)", token=token)
            worker.begin("answer = promise.serialize()")
            assert future.cancel()
            token = worker.end()
            assert (
                other.do(f"promise = attach_promise(token){self.HEARD.replace(chr(10) + '    ', chr(10))}", token=token)
                if ticket_of(token).address
                else other.do("answer = attach_promise(token).cancelled()", token=token)
            )
            other.do("promise = None")

    def test_cancel_against_set_has_one_end(self, worker: Worker) -> None:
        for turn in range(30):
            token, future = handed()
            worker.do("promise = attach_promise(token)", token=token)
            worker.begin("promise.set_result(torch.arange(3) + turn)", turn=turn)
            cancelled = future.cancel()
            worker.end()
            assert future.cancelled() is cancelled
            if not cancelled:
                assert value_of(future).tolist() == [turn, turn + 1, turn + 2]
