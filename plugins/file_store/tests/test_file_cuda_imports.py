"""Other processes' CUDA memory: opened once, and given back when it is unused. On a driver of ours."""

import gc
import threading
from pathlib import Path

import pytest
import torch
from dtorch_file_store.cuda import imports as imports_module
from dtorch_file_store.cuda.borrowed import bytes_at
from dtorch_file_store.cuda.devices import Devices
from dtorch_file_store.cuda.imports import Imports, foreign
from dtorch_file_store.cuda.janitor import JANITOR
from dtorch_file_store.cuda.ticket import this_process
from dtorch_file_store.tensors import Layout

from dtorch_core.errors import AbortedError, ProtocolError, UnsupportedOperationError

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import file_cuda_ours as ours
    from file_cuda_ours import LIMIT, THERE, ticket_of

calls = ours.calls  # a fixture


@pytest.fixture
def no_gpu(monkeypatch):
    """Tensors over mapped memory are the CPU's."""
    monkeypatch.setattr(imports_module, "bytes_at", lambda address, nbytes, _: bytes_at(address, nbytes, None))


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
        said = ticket_of(memory).pack()
        with torch.inference_mode():
            first = imports.offered(1, said)

        second = imports.offered(1, said)
        assert len(made) == 1 and first is not second and not second.is_inference()
        first[3] = 33
        assert second.tolist() == memory.tolist() == [0, 1, 2, 33, 4, 5, 6, 7]
        assert imports.offered(2, ticket_of(memory, 9).pack()).tolist() == memory.tolist() and len(made) == 2

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
