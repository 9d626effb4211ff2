"""CUDA: collectives are ordered with every rank's stream, and the host waits for none."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dtorch_core._meeting.member import normal_device
from dtorch_core.group import ThreadGroup
from dtorch_core.testing._group_base import COLLECTIVES, EACH, Collective, GroupConformance, coded, same
from dtorch_core.testing._harness import CUDA, Background, requires

LONG = 400_000_000
"""Clock cycles: about 200 ms."""

SHAPE = (256, 256)


class CudaTests(GroupConformance):
    """What a collective owes to work that is queued and has not run yet."""

    @property
    def gpu(self) -> str:
        """The GPU to test on."""
        return normal_device(CUDA)

    @requires("cuda")
    @EACH
    @pytest.mark.parametrize("late", [0, 1])
    def test_cuda_result_is_ordered_after_every_ranks_work(self, late: int, collective: Collective) -> None:
        def body(group: ThreadGroup) -> None:
            with _side_stream(group, collective) as stream:
                x = torch.zeros(SHAPE, device=group.device)
                if group.rank == late:
                    torch.cuda._sleep(LONG)

                x.copy_(coded(group.rank, SHAPE, group.device))
                got = collective.call(group, x)
                if group.rank == late or collective.root is None:
                    assert _busy(stream), "the host waited"

                copies = _copied(got)
                x.fill_(-1)  # the peers have what they need of it

            stream.synchronize()
            xs = [coded(rank, SHAPE, group.device) for rank in range(2)]
            assert same(copies, collective.wanted(xs, group.rank))

        self.ranks(body, 2, self.gpu)

    @requires("cuda")
    @EACH
    def test_cuda_result_may_be_overwritten_while_others_still_read_theirs(self, collective: Collective) -> None:
        def body(group: ThreadGroup) -> None:
            with _side_stream(group, collective) as stream:
                x = coded(group.rank, SHAPE, group.device)
                got = collective.call(group, x)
                if group.rank == 1:
                    torch.cuda._sleep(LONG)

                copies = _copied(got)
                for tensor in (x, *(got if isinstance(got, list) else [got])):
                    if tensor is not None:
                        tensor.fill_(-1 - group.rank)

            stream.synchronize()
            xs = [coded(rank, SHAPE, group.device) for rank in range(2)]
            assert same(copies, collective.wanted(xs, group.rank))

        self.ranks(body, 2, self.gpu)

    @requires("cuda")
    def test_cuda_buffers_that_are_used_again_and_again(self) -> None:
        """Now the one rank is late and now the other, and no host wait in between."""
        turns = 30

        def body(group: ThreadGroup) -> None:
            with _side_stream(group, COLLECTIVES[0]) as stream:
                buffer, out = torch.zeros(64, device=group.device), torch.zeros(64, device=group.device)
                kept = torch.zeros(turns, 3, 64, device=group.device)
                for turn in range(turns):
                    torch.cuda._sleep(2_000_000 if turn % 2 == group.rank else 100)
                    torch.arange(64, out=buffer).add_(1000 * turn + group.rank)
                    kept[turn, 0].copy_(group.all_reduce(buffer, out=out))
                    kept[turn, 1].copy_(group.all_gather(buffer[:32], out=out))
                    kept[turn, 2].copy_(group.all_reduce(buffer, "max", out=buffer))

            stream.synchronize()
            for turn in range(turns):
                one, other = (torch.arange(64.0) + 1000 * turn + rank for rank in range(2))
                assert same(kept[turn, 0].cpu(), one + other)
                assert same(kept[turn, 1].cpu(), torch.cat([one[:32], other[:32]]))
                assert same(kept[turn, 2].cpu(), other)

        self.ranks(body, 2, self.gpu)

    @requires("cuda", "async")
    @EACH
    def test_cuda_wait_orders_the_waiting_stream(self, collective: Collective) -> None:
        """Not the one that the call was made on; also the second time."""

        def body(group: ThreadGroup) -> None:
            with _side_stream(group, collective):
                x = torch.zeros(SHAPE, device=group.device)
                torch.cuda._sleep(LONG)
                x.copy_(coded(group.rank, SHAPE, group.device))
                work = collective.call(group, x, async_op=True)
                copies = []
                others = [torch.cuda.Stream() for _ in range(2)]
                for other in others:
                    with torch.cuda.stream(other):
                        work.wait()
                        copies.append(_copied(work.result()))
                        assert collective.root is not None or _busy(other), "the host waited"

            for other in others:
                other.synchronize()

            xs = [coded(rank, SHAPE, group.device) for rank in range(2)]
            for copy in copies:
                assert same(copy, collective.wanted(xs, group.rank))

        self.ranks(body, 2, self.gpu)

    @requires("cuda", "async")
    def test_cuda_future_is_ordered_for_whoever_uses_it(self) -> None:
        def body(group: ThreadGroup) -> None:
            for collective in COLLECTIVES:
                with _side_stream(group, collective) as stream:
                    x = torch.zeros(SHAPE, device=group.device)
                    torch.cuda._sleep(LONG // 4)
                    x.copy_(coded(group.rank, SHAPE, group.device))
                    future = collective.call(group, x, async_op=True).get_future()
                    followed = future.then(lambda done: _copied(done.value()))

                with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
                    copies = [_copied(future.wait()), _copied(followed.wait())]
                    torch.cuda.current_stream().synchronize()

                xs = [coded(rank, SHAPE, group.device) for rank in range(2)]
                for copy in copies:
                    assert same(copy, collective.wanted(xs, group.rank)), collective.name

                stream.synchronize()

        self.ranks(body, 2, self.gpu)

    @requires("cuda", "async")
    def test_cuda_memory_of_what_is_dropped_is_not_handed_out_early(self) -> None:
        """Inputs and Works are let go at once, and memory is allocated anew before the kernels have run."""

        def body(group: ThreadGroup) -> None:
            with _side_stream(group, COLLECTIVES[0]) as stream:
                for turn in range(4):
                    for collective in COLLECTIVES:
                        torch.cuda._sleep(LONG // 50)
                        x = coded(turn + group.rank, SHAPE, group.device)
                        if (turn + group.rank) % 2:
                            collective.call(group, x, async_op=True)
                            del x
                        else:
                            copies = _copied(collective.call(group, x))
                            del x

                        trash = [torch.full(SHAPE, -1.0, device=group.device) for _ in range(4)]
                        del trash
                        if (turn + group.rank) % 2 == 0:
                            xs = [coded(turn + rank, SHAPE, group.device) for rank in range(2)]
                            assert same(copies, collective.wanted(xs, group.rank)), collective.name

                group.barrier()
                stream.synchronize()

        self.ranks(body, 2, self.gpu)

    @requires("cuda")
    def test_cuda_memory_is_given_back(self) -> None:
        def body(group: ThreadGroup) -> None:
            for turn in range(3):
                for collective in COLLECTIVES:
                    collective.call(group, coded(turn, SHAPE, group.device))

            torch.cuda.synchronize()
            group.barrier()

        self.ranks(body, 2, self.gpu)
        gc.collect()
        before = torch.cuda.memory_allocated(self.gpu)
        self.ranks(body, 2, self.gpu)
        gc.collect()
        assert torch.cuda.memory_allocated(self.gpu) == before

    @requires("cuda", "p2p")
    def test_cuda_message_is_ordered_on_both_sides(self) -> None:
        def body(group: ThreadGroup) -> None:
            with _side_stream(group, COLLECTIVES[0]) as stream:
                for _ in range(2):
                    if group.rank == 0:
                        x = torch.zeros(SHAPE, device=group.device)
                        torch.cuda._sleep(LONG)
                        x.copy_(coded(0, SHAPE, group.device))
                        group.send(x, 1)
                        x.fill_(-1)
                        assert _busy(stream), "send waited for the stream"
                    else:
                        copy = group.recv(0).clone()
                        assert _busy(stream), "recv waited for the stream"
                        stream.synchronize()
                        assert same(copy, coded(0, SHAPE, group.device))

                    group.barrier()

        self.ranks(body, 2, self.gpu)

    @requires("cuda", "async")
    def test_cuda_calls_of_several_threads_of_a_rank(self) -> None:
        """Each with a stream of its own, on a group of its own."""

        def body(group: ThreadGroup) -> None:
            parts = [group.split([0, 1]) for _ in range(3)]

            def use(number: int) -> None:
                part = parts[number]
                assert part is not None
                torch.cuda.set_device(group.device)
                xs = [coded(10 * number + rank, SHAPE, group.device) for rank in range(2)]
                torch.cuda.synchronize()
                with torch.cuda.stream(torch.cuda.Stream()):
                    for turn in range(10):
                        torch.cuda._sleep(1_000_000 * ((turn + number) % 3))
                        assert same(part.all_reduce(xs[group.rank]), xs[0] + xs[1])

            threads = [Background(lambda number=number: use(number)) for number in range(3)]  # type: ignore[misc]
            for thread in threads:
                thread.result(self.patience)

        if "split" not in self.declared:
            pytest.skip("it takes a group for each thread")

        self.ranks(body, 2, self.gpu)


def _copied(got: object) -> object:
    """What a collective gave, read now on the current stream."""
    if isinstance(got, list):
        return [tensor.clone() for tensor in got]

    return got.clone() if isinstance(got, Tensor) else got


def _busy(stream: torch.cuda.Stream) -> bool:
    event = torch.cuda.Event()
    event.record(stream)
    return not event.query()


@contextlib.contextmanager
def _side_stream(group: ThreadGroup, collective: Collective) -> Iterator[torch.cuda.Stream]:
    """A stream of the rank's own as the current one.

    Kernels are loaded and memory is allocated first, since both can wait for the device.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            warm = [torch.zeros(SHAPE, device=group.device) for _ in range(6)]
            copies = _copied(collective.call(group, coded(0, SHAPE, group.device)))
            warm[0].copy_(warm[1]).fill_(-1)
            del warm, copies

        torch.cuda._sleep(1)
        stream.synchronize()
        group.barrier()
        yield stream
