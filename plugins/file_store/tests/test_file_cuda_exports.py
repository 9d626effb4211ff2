"""CUDA memory that is offered to other processes, and what is told of it. On a driver of ours."""

import json
import os
from pathlib import Path

import pytest
import torch
from dtorch_file_store.cuda.borrowed import bytes_at
from dtorch_file_store.cuda.devices import Devices
from dtorch_file_store.cuda.driver import Allocation
from dtorch_file_store.cuda.exports import Exports
from dtorch_file_store.cuda.imports import foreign
from dtorch_file_store.cuda.ticket import Ticket, this_process
from dtorch_file_store.tensors import Layout

from dtorch_core.errors import UnsupportedTensorError

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import file_cuda_ours as ours
    from file_cuda_ours import HERE, ticket_of

calls = ours.calls  # a fixture


class CudaLike:
    """A CPU tensor that says it is on a GPU."""

    is_cuda = True

    def __init__(self, tensor):
        self._tensor = tensor

    def __getattr__(self, name):
        return getattr(self._tensor, name)

    def get_device(self):
        return 0


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
        assert said[0] == said[1] == said[4] == ticket(CudaLike(tensor)).pack()
        assert Ticket.unpack(said[2]) == ticket(CudaLike(tensor[5:]))
        calls.allocations["block"] = calls.allocations["block"]._replace(buffer=6)
        again = exports.offer(CudaLike(tensor))
        assert Ticket.unpack(again).allocation == 2
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
