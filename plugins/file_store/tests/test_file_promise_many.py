"""The file promise: many of them, one after another and at once."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from dtorch_file_store import promise_packets
from dtorch_file_store.promise_line import connect

from dtorch_core import TensorFuture, attach_promise
from dtorch_core.future import Outcome
from dtorch_core.testing._harness import Background

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    pytest.register_assert_rewrite("file_promise_workers")
    import file_promise_workers as processes
    from file_promise_workers import WAIT, Clean, Worker, handed, maps, ticket_of, value_of

other, template, worker, workers = processes.other, processes.template, processes.worker, processes.workers  # fixtures


class TestMany(Clean):
    def test_thousand_promises_leak_nothing(self, worker: Worker) -> None:
        look = """
        import gc; gc.collect()
        answer = [len(os.listdir("/proc/self/" + what)) for what in ("fd", "task")]
        answer.append(open("/proc/self/maps").read().count("dtorch"))
        """

        def turn(number: int) -> None:
            token, future = handed()
            worker.do("attach_promise(token).set_result(torch.arange(n))", token=token, n=3 if number % 10 else 5000)
            assert len(value_of(future)) == (3 if number % 10 else 5000)

        for number in range(20):
            turn(number)

        before, mapped = worker.do(look), maps()
        for number in range(1000):
            turn(number)

        assert worker.do(look) == before
        gc.collect()
        assert maps() == mapped

    def test_many_at_once_do_not_mix(self, worker: Worker, other: Worker) -> None:
        pairs = [handed() for _ in range(200)]
        order = list(range(200))
        random.Random(0).shuffle(order)
        code = """
        import threading
        held = {index: attach_promise(token) for index, token in tokens.items()}
        def run(part):
            for index in part:
                held[index].set_result(torch.arange(index, index + (3 if index % 7 else 9000)))
        threads = [threading.Thread(target=run, args=(list(held)[start::4],)) for start in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        del held
        """
        worker.begin(code, tokens={index: pairs[index][0] for index in order[::2]})
        other.begin(code, tokens={index: pairs[index][0] for index in order[1::2]})
        for index, (_, future) in enumerate(pairs):
            assert torch.equal(value_of(future), torch.arange(index, index + (3 if index % 7 else 9000)))

        worker.end()
        other.end()

    def test_threads_hand_over_and_attach_together(self) -> None:
        """The server comes and goes under them."""

        def run(start: int) -> None:
            for turn in range(50):
                token, future = handed()
                if turn % 2:
                    attach_promise(token).set_result(torch.arange(3) + start)
                else:
                    line = connect(ticket_of(token), WAIT)
                    line.send(*promise_packets.pack("test", Outcome(torch.arange(3) + start)))

                assert value_of(future).tolist() == [start, start + 1, start + 2]

        running = [Background(partial(run, start)) for start in range(4)]
        for background in running:
            background.result(WAIT)

    def test_await_from_two_loops(self, worker: Worker) -> None:
        token, future = handed()
        begun = threading.Barrier(3)

        async def main() -> list[int]:
            begun.wait(WAIT)
            got = await asyncio.wait_for(future, WAIT)
            assert got is not None
            return got.tolist()

        running = [Background(lambda: asyncio.run(main())) for _ in range(2)]
        begun.wait(WAIT)
        worker.do("attach_promise(token).set_result(torch.arange(3))", token=token)
        assert [background.result(WAIT) for background in running] == [[0, 1, 2]] * 2

    def test_callback_that_ends_its_thread_hurts_no_other(
        self, worker: Worker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reported: list[object] = []
        monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_type))

        def leave(_: object) -> None:
            raise SystemExit("on purpose")

        (first, failing), (second, future) = handed(), handed()
        failing.add_done_callback(leave)
        worker.do("for token in tokens: attach_promise(token).set_result(None)", tokens=[first, second])
        assert failing.result(WAIT) is None and future.result(WAIT) is None
        assert reported == [SystemExit]

    def test_callback_may_hand_over_the_next(self, worker: Worker) -> None:
        """In the thread that serves."""
        token, future = handed()
        following: list[tuple[bytes, TensorFuture]] = []
        ready = threading.Event()

        def more(_: object) -> None:
            following.append(handed())
            ready.set()

        future.add_done_callback(more)
        worker.do("attach_promise(token).set_result(None)", token=token)
        assert ready.wait(WAIT)
        worker.do("attach_promise(token).set_result(torch.arange(3))", token=following[0][0])
        assert value_of(following[0][1]).tolist() == [0, 1, 2]
