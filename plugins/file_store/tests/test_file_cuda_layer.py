"""How processes share CUDA memory and order their streams. What has no GPU in it runs anywhere, on a driver of ours."""

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from dtorch_file_store.cuda import driver as driver_module
from dtorch_file_store.cuda import imports as imports_module
from dtorch_file_store.cuda.borrowed import bytes_at
from dtorch_file_store.cuda.copies import Copies
from dtorch_file_store.cuda.devices import Devices, reaches
from dtorch_file_store.cuda.driver import NO_ALLOCATION, Allocation, Driver, DriverError, driver
from dtorch_file_store.cuda.exports import Exports
from dtorch_file_store.cuda.imports import Imports, foreign
from dtorch_file_store.cuda.janitor import JANITOR, Holding, Janitor
from dtorch_file_store.cuda.signals import COUNTERS, Mark, OwnSignals, PeerSignals, at_least
from dtorch_file_store.cuda.ticket import Ticket, this_process
from dtorch_file_store.tensors import _DTYPES, Layout

from dtorch_core import streams
from dtorch_core.errors import (
    AbortedError,
    DtorchError,
    ProtocolError,
    UnsupportedOperationError,
    UnsupportedTensorError,
)

LIMIT = 20.0
HERE, THERE = "ab" * 16, "cd" * 16


class OurDriver(Driver):
    """Does what it is asked at once, in this process's memory."""

    def __init__(self, uuids=(HERE,)):
        self.uuids = uuids
        self.attributes = {driver_module.HOST_REGISTER_SUPPORTED: 1, driver_module.IPC_EVENT_SUPPORTED: 1}
        self.allocations = {}
        self.asked = []
        self.opened = {}
        self.registered = set()
        self.waits = []
        self.captured = set()
        self.refuses = None

    def on(self, ordinal):
        return contextlib.nullcontext()

    def device_count(self):
        return len(self.uuids)

    def uuid(self, ordinal):
        return self.uuids[ordinal]

    def attribute(self, ordinal, number):
        return self.attributes.get(number, 0)

    def allocation(self, address):
        for found in self.allocations.values():
            if found.base <= address < found.base + found.size:
                return found

        return NO_ALLOCATION

    def buffer(self, address):
        return self.allocation(address).buffer

    def ipc_handle(self, base):
        self._refuse()
        self.asked.append(base)
        return base.to_bytes(64, "little")

    def ipc_open(self, handle):
        self._refuse()
        address = int.from_bytes(handle, "little")
        self.opened[address] = self.opened.get(address, 0) + 1
        return address

    def ipc_close(self, address):
        self.opened[address] -= 1

    def host_register(self, address, nbytes):
        self.registered.add(address)
        return address

    def host_unregister(self, address):
        self.registered.remove(address)

    def capturing(self, ordinal, stream):
        return stream in self.captured

    def stream_write(self, ordinal, stream, address, value):
        self._refuse()
        ctypes.c_uint32.from_address(address).value = value

    def stream_wait(self, ordinal, stream, address, value):
        self.waits.append((stream, address, value))

    def synchronize(self):
        pass

    def _refuse(self):
        if self.refuses:
            raise DriverError(f"CUDA's call failed with {self.refuses}", self.refuses)


class OurStream:
    device_index = 0

    def __init__(self, handle):
        self.cuda_stream = handle

    def query(self):
        return True


class CudaLike:
    """A CPU tensor that says it is on a GPU."""

    is_cuda = True

    def __init__(self, tensor):
        self._tensor = tensor

    def __getattr__(self, name):
        return getattr(self._tensor, name)

    def get_device(self):
        return 0


@pytest.fixture
def calls():
    return OurDriver()


@pytest.fixture
def no_gpu(monkeypatch):
    """Tensors over mapped memory are the CPU's."""
    monkeypatch.setattr(imports_module, "bytes_at", lambda address, nbytes, _: bytes_at(address, nbytes, None))


def ticket_of(tensor, allocation=1, owner="another", device=HERE):
    layout = Layout.of_view(tensor)
    handle = tensor.data_ptr().to_bytes(64, "little").hex()
    return Ticket(owner, device, allocation, handle, 0, layout, tensor.is_conj(), tensor.is_neg())


class TestTicket:
    @pytest.mark.parametrize(
        "tensor",
        [
            torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)[1:],
            torch.arange(12, dtype=torch.bfloat16).expand(3, 12),
            torch.complex(torch.arange(6.0), torch.arange(6.0) + 1).conj(),
            torch.complex(torch.arange(6.0), torch.arange(6.0) + 1).conj().imag,
            torch.tensor(7.5),
            torch.empty(0, 3, dtype=torch.bool),
        ],
        ids=["strided", "expanded", "conjugate", "negative", "scalar", "empty"],
    )
    def test_a_tensor_comes_out_of_json_as_it_was(self, tensor):
        ticket = Ticket.from_json(json.loads(json.dumps(ticket_of(tensor).to_json())))
        assert ticket == ticket_of(tensor)
        memory = bytes_at(tensor.data_ptr(), ticket.layout.nbytes, None)
        got = ticket.over(memory)
        assert torch.equal(got, tensor)
        assert (got.dtype, got.shape, got.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert (got.is_conj(), got.is_neg()) == (tensor.is_conj(), tensor.is_neg())

    def test_the_name_of_a_process_is_its_own_after_a_fork(self, monkeypatch):
        parents = this_process()
        assert this_process() == parents and len(parents) == 16
        monkeypatch.setattr(os, "getpid", lambda: 1)
        assert this_process() == this_process() != parents


class TestBorrowed:
    def test_the_storage_spans_just_the_bytes_and_lives_as_long_as_a_view_of_it(self):
        memory = torch.arange(64, dtype=torch.uint8)
        dropped = []
        tensor = bytes_at(memory.data_ptr() + 16, 8, None)
        assert tensor.tolist() == list(range(16, 24)) and tensor.untyped_storage().nbytes() == 8
        imports_module.weakref.finalize(tensor.untyped_storage(), dropped.append, 1)
        view = tensor.view(torch.int32)[1:]
        del tensor
        gc.collect()
        assert view.view(torch.uint8).tolist() == [20, 21, 22, 23] and not dropped
        del view
        assert dropped == [1]


class FakeCall:
    def __init__(self, answer):
        self.answer = answer

    def __call__(self, *arguments):
        return self.answer(*arguments)


class FakeLibrary:
    """Every call succeeds, but those that are said to fail."""

    def __init__(self, **fails):
        self.fails = fails

    def __getattr__(self, symbol):
        if symbol == "cuIpcCloseMemHandle" and "missing" in self.fails:
            raise AttributeError(symbol)

        if symbol == "cuGetErrorName":
            return FakeCall(self.name)

        return FakeCall(lambda *_: 7 if symbol in self.fails else 0)

    def name(self, code, place):
        place._obj.value = self.fails["named"].encode() if "named" in self.fails else None
        return 0


class TestDriver:
    def test_a_failed_call_says_its_name_and_the_way_out(self):
        library = FakeLibrary(cuIpcGetMemHandle=True, named="CUDA_ERROR_INVALID_VALUE")
        with pytest.raises(DtorchError, match="cuIpcGetMemHandle failed with CUDA_ERROR_INVALID_VALUE: the memory was"):
            Driver(library).ipc_handle(4096)

    def test_an_error_that_the_driver_has_no_name_for_is_a_number(self):
        with pytest.raises(DriverError, match="cuInit failed with error 7$"):
            Driver(FakeLibrary(cuInit=True))

    def test_an_old_driver_is_named_by_what_it_lacks(self):
        with pytest.raises(DriverError, match="has no cuIpcCloseMemHandle: install a driver"):
            Driver(FakeLibrary(missing=True))

    def test_without_a_driver_the_reason_is_told(self, monkeypatch):
        monkeypatch.setattr(driver_module, "LIBRARY", "libcuda_of_nobody.so.1")
        driver.cache_clear()
        try:
            assert "libcuda_of_nobody.so.1 can't be loaded" in reaches(HERE)
        finally:
            driver.cache_clear()

    def test_a_context_is_pushed_only_where_another_is_current(self):
        calls, done = Driver(FakeLibrary()), []
        calls.push, calls.pop = done.append, lambda: done.append("pop")
        calls._primaries[0] = 5
        for current in (5, 6):
            calls.context = lambda current=current: current
            with pytest.raises(KeyError), calls.on(0):
                done.append(f"in {current}")
                raise KeyError

        assert done == ["in 5", 5, "in 6", "pop"]

    @pytest.mark.parametrize(("stream", "needs"), [(7, False), (7, True), (0, True)])
    def test_a_stream_is_given_work_in_its_own_context(self, stream, needs):
        calls, done = Driver(FakeLibrary()), []
        calls._primaries[0] = 5
        calls.context, calls.push, calls.pop = lambda: done.append("current") or 6, done.append, lambda: None

        def wait(*arguments):
            done.append(arguments)
            return 201 if needs and 5 not in done else 0

        calls._stream_wait = wait
        calls.stream_wait(0, stream, 4096, 3)
        queued = (stream, 4096, 3, 0)
        assert done == [queued] * (stream != 0) + ["current", 5, queued] * needs


class TestDevices:
    def test_ordinals_go_by_uuid(self):
        devices = Devices(OurDriver([THERE, HERE]))
        assert devices.ordinal(HERE) == 1 and devices.reaches(HERE) is None
        assert devices.ordinal("ef" * 16) is None and "does not see the device efef" in devices.reaches("ef" * 16)

    @pytest.mark.parametrize(
        ("attribute", "value", "reason"),
        [
            (driver_module.COMPUTE_MODE, 3, "exclusive to one process"),
            (driver_module.INTEGRATED, 1, "integrated"),
            (driver_module.IPC_EVENT_SUPPORTED, 0, "no interprocess handles"),
            (driver_module.HOST_REGISTER_SUPPORTED, 0, "pages of the host"),
        ],
    )
    def test_what_forbids_sharing_is_said(self, calls, attribute, value, reason):
        calls.attributes[attribute] = value
        assert reason in Devices(calls).reaches(HERE)


class TestExports:
    @pytest.fixture
    def tensor(self, calls):
        tensor = torch.arange(100.0)
        calls.allocations["block"] = Allocation(tensor.data_ptr() - 64, 4096, 5, 0, True)
        return tensor

    def test_one_handle_serves_all_tensors_of_an_allocation(self, calls, tensor):
        exports = Exports(calls, Devices(calls))
        first, second = exports.ticket(CudaLike(tensor)), exports.ticket(CudaLike(tensor[10:20:3]))
        assert len(calls.asked) == 1
        assert (first.owner, first.device, first.allocation) == (this_process(), HERE, 1)
        assert (first.offset, first.layout.nbytes) == (64, 400)
        assert (second.allocation, second.handle, second.offset) == (1, first.handle, 64 + 40)
        assert second.layout == Layout("float32", (4,), (3,), 40)

    def test_an_allocation_that_comes_again_at_its_address_is_another(self, calls, tensor):
        exports = Exports(calls, Devices(calls))
        exports.ticket(CudaLike(tensor))
        calls.allocations["block"] = calls.allocations["block"]._replace(buffer=6)
        assert exports.ticket(CudaLike(tensor)).allocation == 2
        assert exports.gone() == [1] and exports.gone() == []

    def test_a_freed_allocation_is_said_once(self, calls, tensor):
        exports = Exports(calls, Devices(calls))
        exports.ticket(CudaLike(tensor))
        assert exports.gone() == []
        calls.allocations.clear()
        assert exports.gone() == [1] and exports.gone() == []

    def test_a_known_tensors_ticket_is_remembered_while_its_allocation_lives(self, calls, tensor, monkeypatch):
        exports, made = Exports(calls, Devices(calls)), []
        ticket = exports.ticket
        monkeypatch.setattr(exports, "ticket", lambda given: made.append(1) or ticket(given))
        said = [exports.offer(CudaLike(each)) for each in (tensor, tensor, tensor[5:], tensor[5:], tensor)]
        assert len(made) == 2
        assert said[0] == said[1] == said[4] == ticket(CudaLike(tensor)).to_json()
        assert Ticket.from_json(said[2]) == ticket(CudaLike(tensor[5:]))
        calls.allocations["block"] = calls.allocations["block"]._replace(buffer=6)
        again = exports.offer(CudaLike(tensor))
        assert Ticket.from_json(again).allocation == 2
        assert exports.gone() == [1]

    def test_memory_without_a_handle_is_refused_with_the_reason(self, calls, tensor):
        exports = Exports(calls, Devices(calls))
        calls.allocations["block"] = calls.allocations["block"]._replace(exportable=False)
        with pytest.raises(UnsupportedTensorError, match="expandable segment"):
            exports.ticket(CudaLike(tensor))

        calls.allocations.clear()
        assert exports.gone() == [], "it was never offered"
        with pytest.raises(UnsupportedTensorError, match="not the CUDA driver's"):
            exports.ticket(CudaLike(tensor))

    def test_a_driver_that_refuses_is_asked_once(self, calls, tensor):
        exports, calls.refuses = Exports(calls, Devices(calls)), "CUDA_ERROR_NOT_SUPPORTED"
        for _ in range(2):
            with pytest.raises(UnsupportedTensorError, match="CUDA_ERROR_NOT_SUPPORTED"):
                exports.ticket(CudaLike(tensor))

            calls.refuses = None

        assert not calls.asked

    def test_a_tensor_over_several_allocations_is_refused(self, calls, tensor):
        calls.allocations["block"] = calls.allocations["block"]._replace(size=164)
        with pytest.raises(UnsupportedTensorError, match="several allocations"):
            Exports(calls, Devices(calls)).ticket(CudaLike(tensor))

    def test_another_processs_memory_is_not_offered_again(self, calls, tensor):
        base = calls.allocations["block"].base
        foreign[base] += 1
        try:
            with pytest.raises(UnsupportedTensorError, match="another process's"):
                Exports(calls, Devices(calls)).ticket(CudaLike(tensor))
        finally:
            del foreign[base]

    def test_a_tensor_without_bytes_needs_no_memory(self, calls):
        ticket = Exports(calls, Devices(calls)).ticket(CudaLike(torch.empty(0, 3)))
        assert (ticket.allocation, ticket.handle, ticket.layout.shape) == (0, "", (0, 3))

    def test_a_cpu_tensor_is_refused(self, calls):
        with pytest.raises(UnsupportedTensorError, match="on cpu has no CUDA memory"):
            Exports(calls, Devices(calls)).ticket(torch.arange(3))


@pytest.mark.usefixtures("no_gpu")
class TestImports:
    def test_an_allocation_is_opened_once_and_closed_when_it_is_gone_and_unused(self, calls):
        memory = torch.arange(8, dtype=torch.int32)
        imports = Imports(calls, Devices(calls))
        whole = imports.tensor(1, ticket_of(memory))
        part = imports.tensor(1, ticket_of(memory)._replace(offset=8, layout=Layout("int32", (2,), (1,), 8)))
        assert whole.tolist() == list(range(8)) and part.tolist() == [2, 3]
        assert calls.opened == {memory.data_ptr(): 1} == dict(foreign)
        whole[3] = 33
        assert part.tolist() == [2, 33]

        del whole
        imports.gone(1, [1, 5])
        assert JANITOR.settle(LIMIT) and calls.opened == {memory.data_ptr(): 1}, "a tensor still uses it"
        view = part[1:]
        del part
        assert JANITOR.settle(LIMIT) and view.tolist() == [33] and calls.opened[memory.data_ptr()] == 1
        del view
        assert JANITOR.settle(LIMIT) and calls.opened == {memory.data_ptr(): 0}
        assert not foreign and JANITOR.held == 0

    def test_a_mapping_is_kept_without_tensors_until_its_peer_is_forgotten(self, calls):
        memories = [torch.arange(4) + peer for peer in range(2)]
        imports = Imports(calls, Devices(calls))
        for _ in range(3):
            assert [imports.tensor(peer, ticket_of(memories[peer])).tolist() for peer in range(2)] == [
                [0, 1, 2, 3],
                [1, 2, 3, 4],
            ]

        imports.forget(0)
        assert JANITOR.settle(LIMIT)
        assert [calls.opened[memory.data_ptr()] for memory in memories] == [0, 1]
        imports.close()
        assert JANITOR.settle(LIMIT)
        assert [calls.opened[memory.data_ptr()] for memory in memories] == [0, 0]

    def test_what_is_offered_again_is_an_alias(self, calls, monkeypatch):
        memory = torch.arange(8)
        imports, made = Imports(calls, Devices(calls)), []
        tensor = imports.tensor
        monkeypatch.setattr(imports, "tensor", lambda *given: made.append(1) or tensor(*given))
        said = ticket_of(memory).to_json()
        with torch.inference_mode():
            first = imports.offered(1, said)

        second = imports.offered(1, said)
        assert len(made) == 1 and first is not second and not second.is_inference()
        first[3] = 33
        assert second.tolist() == memory.tolist() == [0, 1, 2, 33, 4, 5, 6, 7]
        assert imports.offered(2, ticket_of(memory, 9).to_json()).tolist() == memory.tolist() and len(made) == 2

        imports.gone(1, [1])
        del first
        assert JANITOR.settle(LIMIT) and calls.opened == {memory.data_ptr(): 2}, "a tensor still uses it"
        del second
        assert JANITOR.settle(LIMIT) and calls.opened == {memory.data_ptr(): 1}
        imports.close()
        assert JANITOR.settle(LIMIT) and calls.opened == {memory.data_ptr(): 0}

    def test_the_same_number_after_it_was_gone_is_opened_anew(self, calls):
        old, new = torch.arange(4), torch.arange(4) + 10
        imports = Imports(calls, Devices(calls))
        kept = imports.tensor(1, ticket_of(old, 1))
        imports.gone(1, [1])
        assert imports.tensor(1, ticket_of(new, 2)).tolist() == [10, 11, 12, 13] and kept.tolist() == [0, 1, 2, 3]
        del kept
        imports.close()
        assert JANITOR.settle(LIMIT) and JANITOR.held == 0

    def test_a_peer_can_be_forgotten_while_its_memory_is_being_opened(self, calls):
        memory, got = torch.arange(4), []
        inside, go = threading.Event(), threading.Event()
        open_at_once = calls.ipc_open

        def slowly(handle):
            inside.set()
            assert go.wait(LIMIT)
            return open_at_once(handle)

        calls.ipc_open = slowly
        imports = Imports(calls, Devices(calls))
        threads = [threading.Thread(target=lambda: got.append(imports.tensor(1, ticket_of(memory)))) for _ in range(2)]
        threads[0].start()
        assert inside.wait(LIMIT)
        threads[1].start()
        imports.forget(1)
        go.set()
        for thread in threads:
            thread.join(LIMIT)

        assert [tensor.tolist() for tensor in got] == [[0, 1, 2, 3]] * 2
        imports.close()
        got.clear()
        assert JANITOR.settle(LIMIT) and set(calls.opened.values()) == {0} and JANITOR.held == 0

    def test_threads_open_an_allocation_once(self, calls):
        memory, start = torch.arange(4), threading.Barrier(4)
        imports, got = Imports(calls, Devices(calls)), []

        def body():
            start.wait(LIMIT)
            got.append(imports.tensor(1, ticket_of(memory)))

        threads = [threading.Thread(target=body) for _ in range(4)]
        for thread in threads:
            thread.start()

        for thread in threads:
            thread.join(LIMIT)

        assert len(got) == 4 and calls.opened == {memory.data_ptr(): 1}
        got.clear()
        imports.close()
        assert JANITOR.settle(LIMIT) and calls.opened == {memory.data_ptr(): 0} and JANITOR.held == 0

    def test_a_processs_own_memory_is_refused(self, calls):
        with pytest.raises(ProtocolError, match="its own memory"):
            Imports(calls, Devices(calls)).tensor(1, ticket_of(torch.arange(4), owner=this_process()))

    def test_what_can_not_be_reached_is_refused_with_the_reason(self, calls):
        imports = Imports(calls, Devices(calls))
        with pytest.raises(UnsupportedOperationError, match="does not see the device"):
            imports.tensor(1, ticket_of(torch.arange(4), device=THERE))

        calls.refuses = "CUDA_ERROR_MAP_FAILED"
        with pytest.raises(UnsupportedOperationError, match="can't be mapped here.*CUDA_ERROR_MAP_FAILED"):
            imports.tensor(1, ticket_of(torch.arange(4)))

        assert JANITOR.held == 0

    def test_after_close_nothing_is_mapped(self, calls):
        imports = Imports(calls, Devices(calls))
        imports.close()
        with pytest.raises(AbortedError, match="closed its side"):
            imports.tensor(1, ticket_of(torch.arange(4)))


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


class Side:
    """One process's end of all of it, and a connection to the other one."""

    def __init__(self, connection):
        connection.settimeout(60)
        self.connection = connection
        self.lost = False
        self.calls = driver()
        self.devices = Devices(self.calls)
        self.exports = Exports(self.calls, self.devices)
        self.imports = Imports(self.calls, self.devices)
        self.own = OwnSignals(self.calls)
        socket.send_fds(connection, [b"page"], [self.own.fd])
        _, fds, _, _ = socket.recv_fds(connection, 16, 1)
        self.peer = PeerSignals(self.calls, fds[0])

    def say(self, *values):
        self.connection.sendall(json.dumps(values).encode())

    def hear(self):
        return json.loads(self.connection.recv(1 << 16))

    def offer(self, tensor, stream):
        """Say where a tensor is, and when it will be ready."""
        self.say(self.exports.ticket(tensor).to_json(), self.own.write(stream))

    def take(self, stream):
        ticket, mark = self.hear()
        tensor = self.imports.tensor(1, Ticket.from_json(ticket))
        self.peer.wait(Mark.from_json(mark), stream)
        return tensor

    def close(self):
        self.own.close()
        self.peer.close()
        self.imports.close()


def sleep(seconds):
    torch.cuda._sleep(int(seconds * 1.8e9))


def warm_up():
    """A kernel's first launch waits for the device, also for streams that wait."""
    tensor = torch.arange(8, device="cuda")
    (tensor.clone() + 1).mul_(2).copy_(tensor)
    tensor.to(torch.float32).fill_(1)
    sleep(0)
    torch.cuda.synchronize()


def samples():
    """A tensor of each dtype and layout, by name."""
    for name, dtype in _DTYPES.items():
        raw = (torch.arange(256) % 251).to(torch.uint8)
        yield name, (raw % 2 if dtype is torch.bool else raw).cuda().view(dtype)

    values = torch.complex(torch.arange(24.0), torch.arange(24.0) + 1).cuda().reshape(2, 3, 4)
    yield "conjugate", values.conj()
    yield "negative", values.conj().imag
    yield "permuted", values.permute(2, 0, 1)[1:]
    yield "expanded", torch.arange(5, device="cuda").expand(3, 5)
    yield "scalar", torch.tensor(7.5, device="cuda")
    yield "empty", torch.empty(0, 3, device="cuda", dtype=torch.bfloat16)
    yield "strided", torch.arange(1000, device="cuda")[100:900:7]


def role_exchange(side):
    for _ in range(side.hear()[0]):
        stream = torch.cuda.Stream()
        got = side.take(stream)
        with torch.cuda.stream(stream):
            mine = got + 1
            got.mul_(2)

        side.offer(mine, stream)
        side.hear()


def role_samples(side):
    kept = dict(samples())
    torch.cuda.synchronize()
    for name, tensor in kept.items():
        side.say(name, side.exports.ticket(tensor).to_json())

    return kept


def role_die(side):
    stream = torch.cuda.Stream()
    if side.hear() == ["producer"]:
        tensor = torch.arange(1 << 20, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            sleep(2)
            tensor.add_(1)

        side.offer(tensor, stream)
    else:
        tensor = side.take(stream)
        with torch.cuda.stream(stream):
            sleep(2)
            tensor.add_(1)

        side.say(side.own.write(stream))

    time.sleep(60)


def role_again(side):
    for step in range(2):
        tensor = torch.arange(1 << 23, device="cuda") + step
        torch.cuda.synchronize()
        side.say(side.exports.gone(), side.exports.ticket(tensor).to_json())
        side.hear()
        del tensor
        torch.cuda.empty_cache()

    side.say(side.exports.gone())


def role_leave(side):
    tensor = torch.arange(1 << 20, device="cuda")
    torch.cuda.synchronize()
    side.say(side.exports.ticket(tensor).to_json())
    side.hear()
    os._exit(0)


def role_expandable(side):
    stream, copies = torch.cuda.Stream(), Copies(side.calls, 0)
    for step in range(4):
        with torch.cuda.stream(stream):
            tensor = torch.arange(1 << 20, device="cuda")[::2]
            sleep(0.05)
            tensor.add_(step)

        try:
            side.exports.ticket(tensor)
            side.say("shared")
        except UnsupportedTensorError as error:
            side.say(str(error))

        copy = copies.copy(tensor, stream)
        side.offer(copy, stream)
        (mark,) = side.hear()
        side.peer.wait(Mark.from_json(mark), stream)
        copies.give_back(copy, stream)
        if step == 1:
            torch.cuda.synchronize()

    side.say(len(copies._chunks), len(copies._out))
    side.hear()
    copies.close()
    side.close()
    side.say(JANITOR.settle(LIMIT), JANITOR.held)


def role_thread(side):
    """A thread that never used CUDA has no context."""
    tensor, stream = torch.arange(100, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()

    def body():
        assert side.calls.context() == 0
        side.offer(tensor, stream)
        side.say(side.own.write(torch.cuda.default_stream()))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return tensor


@contextlib.contextmanager
def other_process(role, **environment):
    """Another process, in a role; this one's side."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, role, str(theirs.fileno())]
    held = JANITOR.held
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env={**os.environ, **environment})
    theirs.close()
    side = None
    try:
        side = Side(mine)
        side.process = process
        warm_up()
        yield side
        if not side.lost:
            side.say("end")
            assert process.wait(LIMIT) == 0
    finally:
        process.kill()
        process.wait()
        if side is not None:
            side.peer.release()
            side.close()

        mine.close()

    assert JANITOR.settle(LIMIT) and JANITOR.held == held, "something of CUDA's was not given back"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
class TestProcesses:
    def test_tensors_go_both_ways_behind_kernels(self):
        with other_process("exchange") as side:
            rounds = 6
            side.say(rounds)
            for number in range(rounds):
                stream = torch.cuda.Stream() if number % 2 else torch.cuda.current_stream()
                expected = torch.arange(1 << 20, device="cuda") + number
                torch.cuda.synchronize()
                with torch.cuda.stream(stream):
                    tensor = torch.zeros(1 << 20, dtype=torch.int64, device="cuda")
                    sleep(0.2)
                    tensor.copy_(expected)
                    side.offer(tensor, stream)
                    theirs = side.take(stream)
                    doubled, plus = tensor.clone(), theirs.clone()
                    tensor.fill_(-1)

                if number > 1:
                    assert not stream.query(), "a host waited"

                stream.synchronize()
                assert torch.equal(doubled, expected * 2) and torch.equal(plus, expected + 1)
                del theirs
                side.say("next")

    def test_every_dtype_and_layout_arrives(self):
        with other_process("samples") as side:
            for name, expected in samples():
                theirs, ticket = side.hear()
                assert theirs == name
                got = side.imports.tensor(1, Ticket.from_json(ticket))
                assert (got.dtype, got.shape, got.stride()) == (expected.dtype, expected.shape, expected.stride()), name
                assert (got.is_conj(), got.is_neg()) == (expected.is_conj(), expected.is_neg()), name
                if expected.is_contiguous() and not expected.is_conj():
                    got, expected = got.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8)

                assert torch.equal(got, expected), name
                del got

    @pytest.mark.parametrize("victim", ["producer", "consumer"])
    def test_a_killed_process_lets_the_survivors_stream_go(self, victim):
        with other_process("die") as side:
            stream = torch.cuda.Stream()
            side.say(victim)
            tensor = torch.arange(1 << 20, device="cuda")
            if victim == "producer":
                tensor = side.take(stream)
            else:
                torch.cuda.synchronize()
                side.offer(tensor, stream)
                side.peer.wait(Mark.from_json(side.hear()[0]), stream)

            with torch.cuda.stream(stream):
                copy = tensor.clone()

            assert not stream.query()
            side.process.send_signal(signal.SIGKILL)
            assert select.select([side.connection], [], [], LIMIT)[0]
            side.peer.release()
            end = time.monotonic() + 5
            while not stream.query() and time.monotonic() < end:
                time.sleep(0.001)

            assert stream.query(), "the stream still waits"
            side.imports.forget(1)
            assert torch.equal(copy - copy[0], torch.arange(1 << 20, device="cuda")), "its memory is still there"
            side.process.wait(LIMIT)
            del tensor
            side.close()
            assert JANITOR.settle(LIMIT) and JANITOR.held == 0
            side.lost = True

    def test_an_allocation_made_anew_is_told_from_the_old_one(self):
        with other_process("again") as side:
            kept = []
            for step in range(2):
                gone, ticket = side.hear()
                assert gone == ([1] if step else [])
                side.imports.gone(1, gone)
                kept.append(side.imports.tensor(1, Ticket.from_json(ticket)))
                assert [int(tensor[7]) for tensor in kept] == [7, 8][: step + 1]
                side.say("next")

            assert side.hear() == [[2]]
            side.imports.gone(1, [2])
            kept.clear()
            assert JANITOR.settle(LIMIT)

    @pytest.mark.parametrize("how", ["exits", "is killed"])
    def test_memory_outlives_its_owner(self, how):
        with other_process("leave") as side:
            ticket = Ticket.from_json(side.hear()[0])
            tensor = side.imports.tensor(1, ticket)
            if how == "exits":
                side.say("exit")
            else:
                side.process.kill()

            side.process.wait(LIMIT)
            assert torch.equal(tensor, torch.arange(1 << 20, device="cuda"))
            assert side.imports.tensor(1, ticket)[5:7].tolist() == [5, 6]
            with pytest.raises(UnsupportedTensorError, match="another process's"):
                side.exports.ticket(tensor)

            side.imports.forget(1)
            assert side.imports.tensor(1, ticket)[7] == 7, "a mapping that still lives is shared"
            side.imports.forget(1)
            del tensor
            assert JANITOR.settle(LIMIT)
            with pytest.raises(UnsupportedOperationError, match="can't be mapped here"):
                side.imports.tensor(1, ticket)

            side.lost = True

    def test_memory_without_a_handle_goes_by_a_copy(self):
        setting = "expandable_segments:True"
        with other_process("expandable", PYTORCH_CUDA_ALLOC_CONF=setting, PYTORCH_ALLOC_CONF=setting) as side:
            stream = torch.cuda.Stream()
            for step in range(4):
                assert "expandable segment" in side.hear()[0]
                got = side.take(stream)
                with torch.cuda.stream(stream):
                    copy = got.clone()

                side.say(side.own.write(stream))
                stream.synchronize()
                assert torch.equal(copy, torch.arange(0, 1 << 20, 2, device="cuda") + step)
                del got

            assert side.hear() == [1, 0], "chunks, copies that are out"
            side.say("close")
            assert side.hear() == [True, 0]

    def test_a_thread_without_a_context_and_a_device_given_by_uuid(self):
        uuid = Devices(driver()).uuids[0]
        name = "GPU-" + "-".join([uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:]])
        with other_process("thread", CUDA_VISIBLE_DEVICES=name) as side:
            got = []

            def body():
                tensor = side.take(torch.cuda.Stream())
                side.peer.wait(Mark.from_json(side.hear()[0]), torch.cuda.default_stream())
                got.append(tensor[5:8].tolist())

            thread = threading.Thread(target=body)
            thread.start()
            thread.join(LIMIT)
            assert got == [[5, 6, 7]]

    def test_a_graph_does_not_signal_and_is_not_spoiled_by_the_try(self):
        own, stream, graph = OwnSignals(driver()), torch.cuda.Stream(), torch.cuda.CUDAGraph()
        warm_up()
        values = torch.arange(5, device="cuda")
        with torch.cuda.graph(graph, stream=stream):
            with pytest.raises(UnsupportedOperationError, match="captured into a graph"):
                own.write(stream)

            values.add_(1)

        graph.replay()
        torch.cuda.synchronize()
        assert values.tolist() == [1, 2, 3, 4, 5]
        mark = own.write(stream)
        own.finish()
        assert own.reached(mark)
        own.close()
        assert JANITOR.settle(LIMIT)

    def test_numbers_go_round_on_the_device(self):
        calls = driver()
        own = OwnSignals(calls)
        peer = PeerSignals(calls, os.dup(own.fd))
        writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
        peer._counters[0] = 2**32 - 3
        warm_up()
        source, target = torch.zeros(1, device="cuda"), torch.zeros(6, device="cuda")
        torch.cuda.synchronize()
        for step in range(6):
            with torch.cuda.stream(writer):
                sleep(0.02)
                source.add_(1)

            peer.wait(own.write(writer), reader)
            with torch.cuda.stream(reader):
                target[step : step + 1].copy_(source)

            peer_of_reader = torch.cuda.Event()
            peer_of_reader.record(reader)
            writer.wait_event(peer_of_reader)

        reader.synchronize()
        assert target.tolist() == [1, 2, 3, 4, 5, 6]
        own.finish()
        own.close()
        peer.close()
        assert JANITOR.settle(LIMIT) and JANITOR.held == 0

    def test_memory_is_handed_out_again_only_behind_the_wait(self):
        calls = driver()
        own = OwnSignals(calls)
        peer = PeerSignals(calls, os.dup(own.fd))
        made_on, waits_on = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(made_on):
            tensor = torch.arange(1 << 22, device="cuda")

        torch.cuda.synchronize()
        try:
            peer.wait(Mark(100, 1), waits_on)
            streams.keep_until_done(tensor, waits_on)
            address = tensor.data_ptr()
            del tensor
            with torch.cuda.stream(made_on):
                early = torch.empty(1 << 22, dtype=torch.int64, device="cuda")

            assert early.data_ptr() != address and not waits_on.query()
        finally:
            peer.release()
            waits_on.synchronize()
            own.close()
            peer.close()

        with torch.cuda.stream(made_on):
            late = torch.empty(1 << 22, dtype=torch.int64, device="cuda")

        assert late.data_ptr() == address
        assert JANITOR.settle(LIMIT) and JANITOR.held == 0


if __name__ == "__main__":
    ending = Side(socket.socket(fileno=int(sys.argv[2])))
    warm_up()
    kept = globals()[f"role_{sys.argv[1]}"](ending)
    ending.connection.recv(64)  # the other process is through with our memory, or is dead
    os._exit(0)
