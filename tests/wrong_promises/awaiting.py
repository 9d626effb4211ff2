"""Promises that are awaited wrongly."""

from __future__ import annotations

import asyncio

from dtorch_core import TensorFuture

from .base import Right


class AwaitPolls(Right):
    class future_type(TensorFuture):
        def __await__(self):
            while not self.done():
                yield from asyncio.sleep(0.005).__await__()

            return self.result(0)


class AwaitSpins(Right):
    class future_type(TensorFuture):
        def __await__(self):
            while not self.done():
                yield

            return self.result(0)


class AwaitTakesAThread(Right):
    class future_type(TensorFuture):
        def __await__(self):
            return (yield from asyncio.to_thread(self.result).__await__())


class AwaitBlocksTheLoop(Right):
    class future_type(TensorFuture):
        def __await__(self):
            return self.result(3.0)
            yield


class AwaitIsNotShielded(Right):
    class future_type(TensorFuture):
        def __await__(self):
            return (yield from asyncio.wrap_future(self).__await__())


class AwaitReportsWhatWasLeft(Right):
    class future_type(TensorFuture):
        def __await__(self):
            return (yield from asyncio.shield(asyncio.wrap_future(self)).__await__())


class AwaitIsNotWokenFromOutside(Right):
    class future_type(TensorFuture):
        def __await__(self):
            arrived = asyncio.get_running_loop().create_future()
            self.add_done_callback(lambda _: arrived.done() or arrived.set_result(None))
            yield from arrived
            return self.result(0)


class AwaitLeavesItsWaiter(Right):
    class future_type(TensorFuture):
        def __await__(self):
            loop = asyncio.get_running_loop()
            arrived = loop.create_future()
            self.add_done_callback(lambda _: loop.call_soon_threadsafe(lambda: arrived.done() or arrived.set_result(0)))
            yield from arrived
            return self.result(0)


class AwaitMindsAClosedLoop(Right):
    class future_type(TensorFuture):
        def __await__(self):
            loop = asyncio.get_running_loop()
            self.__dict__.setdefault("loops", []).append(loop)
            return (yield from super().__await__())

        def settle(self, outcome):
            while self.__dict__.get("loops"):
                self.loops.pop().call_soon_threadsafe(lambda: None)

            return super().settle(outcome)
