"""What CUDA is given back by a thread that may wait for the device. On a driver of ours."""

import threading
from pathlib import Path

import pytest
from dtorch_file_store.cuda.janitor import Holding, Janitor

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import file_cuda_ours as ours
    from file_cuda_ours import LIMIT

calls = ours.calls  # a fixture


class Slow(Holding):
    def __init__(self, calls):
        super().__init__(calls, 0)
        self.gate = threading.Event()
        self.users = 1
        self.given_back = 0

    def unused(self):
        return self.users == 0

    def give_back(self):
        assert self.gate.wait(LIMIT)
        self.given_back += 1


class TestJanitor:
    def test_nobody_waits_for_what_the_device_holds_up(self, calls):
        janitor, slow, other = Janitor(), Slow(calls), Slow(calls)
        janitor.hold(other)
        janitor.hold(slow)
        slow.condemn()
        assert janitor.settle(LIMIT) and janitor.held == 2, "it has a user"
        slow.users = 0
        slow.look()
        slow.look()
        assert not janitor.settle(0.05), "the device is busy"
        slow.gate.set()
        assert janitor.settle(LIMIT) and janitor.held == 1 and slow.given_back == 1
        other.gate.set()
        other.users = 0
        other.condemn()
        assert janitor.settle(LIMIT) and janitor.held == 0 and other.given_back == 1

    def test_what_fails_is_not_tried_again_and_stops_nothing(self, calls):
        janitor, lost, good = Janitor(), Slow(calls), Slow(calls)
        lost.give_back = lambda: calls._refuse()
        calls.refuses = "CUDA_ERROR_ILLEGAL_ADDRESS"
        good.gate.set()
        for holding in (lost, good):
            holding.users = 0
            janitor.hold(holding)
            holding.condemn()

        assert janitor.settle(LIMIT) and janitor.held == 0 and good.given_back == 1
