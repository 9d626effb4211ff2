"""Two processes on one GPU that share memory and order their streams, one of them in a role."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from dtorch_file_store.cuda.devices import Devices
from dtorch_file_store.cuda.driver import driver
from dtorch_file_store.cuda.janitor import JANITOR
from dtorch_file_store.cuda.signals import Mark, OwnSignals, PeerSignals
from dtorch_file_store.cuda.ticket import Ticket

from dtorch_core import streams
from dtorch_core.errors import (
    UnsupportedOperationError,
    UnsupportedTensorError,
)

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from file_cuda_roles import LIMIT, Side, samples, sleep, warm_up

PROGRAM = Path(__file__).with_name("file_cuda_roles.py")


@contextlib.contextmanager
def other_process(role, **environment):
    """Another process, in a role; this one's side."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, str(PROGRAM), role, str(theirs.fileno())]
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
