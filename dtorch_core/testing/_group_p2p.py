"""Messages between two ranks: of any shape, in order, by tag, from anybody, to oneself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dtorch_core.errors import (
    CollectiveMismatchError,
    PeerLostError,
    StoreTimeoutError,
    UnsupportedOperationError,
    UnsupportedTensorError,
)
from dtorch_core.group import ThreadGroup
from dtorch_core.testing._group_base import SHORT, GroupConformance, all_dtypes, coded, of_dtype, same
from dtorch_core.testing._group_collectives import LAYOUTS
from dtorch_core.testing._group_ending import AT_ONCE, LONG_WAIT
from dtorch_core.testing._harness import Background, asleep, requires, undeclared
from dtorch_core.testing._subclasses import loud, quiet

SHAPES = [(7,), (), (0,), (2, 0, 3), (3, 5), (1, 1, 2, 1, 2), (1_200_001,)]


class MessageTests(GroupConformance):
    """send and recv."""

    @requires("p2p")
    def test_message_of_a_shape_that_the_receiver_does_not_know(self, device: str) -> None:
        def body(group: ThreadGroup) -> None:
            for number, shape in enumerate(SHAPES):
                if group.rank == 0:
                    assert group.send(coded(number, shape, group.device), 1) is None
                else:
                    assert same(group.recv(0), coded(number, shape, group.device)), shape

        self.ranks(body, 2, device)

    @requires("p2p")
    @pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
    def test_message_of_any_dtype(self, device: str) -> None:
        def body(group: ThreadGroup) -> None:
            for dtype in self.carried(all_dtypes()):
                if group.rank == 0:
                    group.send(of_dtype(3, dtype, group.device), 1)
                else:
                    assert same(group.recv(0), of_dtype(3, dtype, group.device)), dtype

        self.ranks(body, 2, device)

    @requires("p2p")
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_message_of_any_layout(self, layout: str, device: str) -> None:
        def body(group: ThreadGroup) -> None:
            if group.rank == 0:
                group.send(LAYOUTS[layout](1).to(group.device), 1)
            else:
                got = group.recv(0)
                assert same(got, LAYOUTS[layout](1).to(group.device))
                assert not got.requires_grad
                got.add_(1)  # the receiver's own

        self.ranks(body, 2, device)

    @requires("p2p")
    def test_message_of_a_subclass_is_a_plain_tensor(self, device: str) -> None:
        def body(group: ThreadGroup) -> None:
            if group.rank == 0:
                for _ in range(2):
                    group.send(loud(coded(3, (5,), group.device)), 1)

                return

            got = group.recv(0)
            assert type(got) is Tensor
            assert same(got, coded(3, (5,), group.device))
            out = loud(torch.zeros(5, device=group.device), 1)
            assert group.recv(0, out=out) is out
            assert same(quiet(out), got)

        self.ranks(body, 2, device)

    @requires("p2p")
    def test_message_is_a_copy(self, device: str) -> None:
        """The sender may write at once, before anybody receives, and both own what they have."""
        written = threading.Event()

        def body(group: ThreadGroup) -> None:
            if group.rank == 0:
                x = coded(1, (5,), group.device)
                group.send(x, 1)
                x.fill_(-1)
                written.set()
                group.barrier()
                assert x.eq(-1).all()
            else:
                assert written.wait(self.patience)
                got = group.recv(0)
                assert same(got, coded(1, (5,), group.device))
                got.fill_(-2)
                group.barrier()

        self.ranks(body, 2, device)

    @requires("p2p")
    def test_messages_arrive_in_order(self) -> None:
        def body(group: ThreadGroup) -> None:
            for number in range(200):
                if group.rank == 0:
                    group.send(coded(number, (3,), group.device), 1)
                else:
                    assert same(group.recv(0), coded(number, (3,), group.device))

        self.ranks(body, 2)

    @requires("p2p")
    def test_messages_wait_for_their_receiver(self) -> None:
        """All are sent before the first is received."""

        def body(group: ThreadGroup) -> None:
            others = [rank for rank in range(3) if rank != group.rank]
            for number in range(30):
                for dst in others:
                    group.send(coded(100 * group.rank + number, (2,), group.device), dst)

            group.barrier()
            for number in range(30):
                for src in others:
                    assert same(group.recv(src), coded(100 * src + number, (2,), group.device))

        self.ranks(body, 3)

    @requires("p2p", "tags")
    def test_messages_are_told_apart_by_tag(self) -> None:
        def body(group: ThreadGroup) -> None:
            for number in range(10):
                if group.rank == 0:
                    for tag in (5, 0, 7):
                        group.send(coded(10 * number + tag, device=group.device), 1, tag)

            if group.rank == 1:
                for tag in (7, 5, 0):
                    for number in range(10):
                        assert same(group.recv(0, tag), coded(10 * number + tag, device=group.device))

        self.ranks(body, 2)

    @requires("p2p", "any_source")
    def test_message_from_anybody(self) -> None:
        def body(group: ThreadGroup) -> None:
            if group.rank == 0:
                got = sorted(int(group.recv()[0]) for _ in range(9))
                assert got == sorted(1000 * (10 * rank + number + 1) for rank in (1, 2, 3) for number in range(3))
            else:
                for number in range(3):
                    group.send(coded(10 * group.rank + number, device=group.device), 0)

        self.ranks(body, 4)

    @requires("p2p", "any_source", "tags")
    def test_message_from_anybody_is_in_order_for_each_source_and_tag(self) -> None:
        def body(group: ThreadGroup) -> None:
            if group.rank != 0:
                for number in range(20):
                    group.send(coded(100 * group.rank + number, (1,), group.device), 0, number % 2)

                return

            for tag in (1, 0):
                seen: dict[int, list[int]] = {1: [], 2: []}
                for _ in range(20):
                    value = int(group.recv(tag=tag)) // 1000 - 1
                    seen[value // 100].append(value % 100)

                assert seen == {src: list(range(tag, 20, 2)) for src in (1, 2)}

        self.ranks(body, 3)

    @requires("p2p", "self_send")
    @pytest.mark.parametrize("world_size", [1, 2])
    def test_message_to_oneself(self, world_size: int, device: str) -> None:
        def body(group: ThreadGroup) -> None:
            for number in range(5):
                group.send(coded(number, (3,), group.device), group.rank)

            for number in range(5):
                assert same(group.recv(group.rank), coded(number, (3,), group.device))

        self.ranks(body, world_size, device)

    @requires("p2p")
    def test_ranks_may_send_to_each_other_at_once(self) -> None:
        def body(group: ThreadGroup) -> None:
            for number in range(50):
                group.send(coded(group.rank + 10 * number, (400,), group.device), 1 - group.rank)
                assert same(group.recv(1 - group.rank), coded(1 - group.rank + 10 * number, (400,), group.device))

        self.ranks(body, 2)

    @requires("p2p")
    def test_received_into_out(self, device: str) -> None:
        def body(group: ThreadGroup) -> None:
            if group.rank == 0:
                for number in range(3):
                    group.send(coded(number, (4, 2), group.device), 1)

                return

            memory = [torch.zeros(4, 2, device=group.device), torch.zeros(2, 4, device=group.device).t()]
            memory.append(torch.zeros(4, 2, device=group.device).requires_grad_())
            for number, out in enumerate(memory):
                assert group.recv(0, out=out) is out
                assert same(out, coded(number, (4, 2), group.device))

        self.ranks(body, 2, device)

    @requires("p2p")
    def test_out_that_does_not_fit_a_message_is_an_error(self) -> None:
        """Too small, too large or of another dtype: nothing is half filled, and the next message is the next one."""

        def body(group: ThreadGroup) -> None:
            memory = [torch.zeros(3), torch.zeros(5), torch.zeros(4, dtype=torch.int64), torch.zeros(2, 2)]
            for number, out in enumerate(memory):
                if group.rank == 0:
                    group.send(coded(number, (4,), group.device), 1)
                    continue

                out = out.to(group.device)
                with pytest.raises(CollectiveMismatchError, match=r"rank 0.*float32\[4\]"):
                    group.recv(0, out=out)

                assert out.eq(0).all()

            if group.rank == 0:
                group.send(coded(9, (4,), group.device), 1)
            else:
                assert same(group.recv(0), coded(9, (4,), group.device))

        self.ranks(body, 2)

    @requires("p2p")
    def test_receive_can_be_retried_after_a_timeout(self) -> None:
        given_up = threading.Event()

        def body(group: ThreadGroup) -> None:
            if group.rank == 0:
                assert given_up.wait(self.patience)
                for number in range(3):
                    group.send(coded(number, device=group.device), 1)

                return

            for _ in range(3):
                begun = time.monotonic()
                with pytest.raises(StoreTimeoutError, match="rank 0"):
                    group.recv(0, timeout=SHORT / 2)

                assert time.monotonic() - begun < AT_ONCE

            given_up.set()
            for number in range(3):
                assert same(group.recv(0), coded(number, device=group.device))

        self.ranks(body, 2)

    @requires("p2p", "any_source")
    def test_receive_from_anybody_times_out(self) -> None:
        def body(group: ThreadGroup) -> None:
            if group.rank == 0:
                with pytest.raises(StoreTimeoutError, match="rank 1, rank 2"):
                    group.recv(timeout=SHORT)

            group.barrier()

        self.ranks(body, 3)

    @requires("p2p", "async")
    def test_receive_that_waits_in_the_background(self) -> None:
        def body(group: ThreadGroup) -> None:
            if group.rank == 1:
                works = [group.recv(0, async_op=True) for _ in range(5)]
                assert not works[0].is_completed()
                group.barrier()
                for number, work in reversed(list(enumerate(works))):
                    assert same(work.result(), coded(number, device=group.device))
                    assert work.is_completed()
                    assert work.exception() is None

                work = group.recv(0, async_op=True)
                future = work.get_future()
                group.barrier()
                assert same(future.wait(), coded(5, device=group.device))
                return

            group.barrier()
            for number in range(5):
                assert group.send(coded(number, device=group.device), 1, async_op=True).wait() is True

            group.barrier()
            assert group.send(coded(5, device=group.device), 1, async_op=True).get_future().wait() is None

        self.ranks(body, 2)

    @requires("p2p")
    def test_messages_and_collectives_do_not_mix(self) -> None:
        def body(group: ThreadGroup) -> None:
            xs = [coded(rank, device=group.device) for rank in range(2)]
            for number in range(20):
                if group.rank == 0:
                    group.send(coded(number, device=group.device), 1)

                assert same(group.all_reduce(xs[group.rank]), xs[0] + xs[1])
                if group.rank == 1:
                    assert same(group.recv(0), coded(number, device=group.device))

        self.ranks(body, 2)

    @requires("p2p")
    def test_receive_from_a_rank_that_left(self) -> None:
        waiting = threading.Event()

        def body(group: ThreadGroup) -> None:
            if group.rank == 0:
                group.send(coded(0, device=group.device), 1)
                assert waiting.wait(self.patience)
                group.close()
                return

            assert same(group.recv(0), coded(0, device=group.device))
            call = Background(lambda: group.recv(0, timeout=LONG_WAIT))
            asleep(call)
            waiting.set()
            with pytest.raises(PeerLostError, match="rank 0"):
                call.result(AT_ONCE)

            with pytest.raises(PeerLostError, match="rank 0"):
                group.recv(0, timeout=LONG_WAIT)

        self.ranks(body, 2)

    @requires("p2p")
    def test_message_of_a_rank_that_left_since_is_still_there(self) -> None:
        left = threading.Event()

        def body(group: ThreadGroup) -> None:
            if group.rank == 0:
                group.send(coded(0, device=group.device), 1)
                group.close()
                left.set()
            else:
                assert left.wait(self.patience)
                assert same(group.recv(0), coded(0, device=group.device))

        if "multi_process" in self.declared:
            pytest.skip("what a process sent may go with it")

        self.ranks(body, 2)

    @requires("p2p")
    def test_wrong_messages_are_refused(self) -> None:
        def body(group: ThreadGroup) -> None:
            x = coded(0, device=group.device)
            with pytest.raises(ValueError, match="rank 2"):
                group.send(x, 2)

            with pytest.raises(ValueError, match="rank 5"):
                group.recv(5)

            with pytest.raises(UnsupportedTensorError):
                group.send(x.to_sparse(), 1)

            with pytest.raises(UnsupportedTensorError):
                group.recv(1, out=torch.zeros(1, device=group.device).expand(7))

            with pytest.raises(TypeError):
                group.send(x, 1, tag="urgent")  # type: ignore[arg-type]

        self.ranks(body, 2)

    @undeclared("p2p")
    def test_messages_are_refused(self) -> None:
        self._refuses("p2p", lambda group: group.send(coded(0, device=group.device), 1 - group.rank))
        self._refuses("p2p", lambda group: group.recv(1 - group.rank))

    @requires("p2p")
    @undeclared("any_source")
    def test_receiving_from_anybody_is_refused(self) -> None:
        self._refuses("any_source", lambda group: group.recv())

    @requires("p2p")
    @undeclared("tags")
    def test_tags_are_refused(self) -> None:
        self._refuses("tags", lambda group: group.send(coded(0, device=group.device), 1 - group.rank, 3))
        self._refuses("tags", lambda group: group.recv(1 - group.rank, 3))

    @requires("p2p")
    @undeclared("self_send")
    def test_sending_to_oneself_is_refused(self) -> None:
        self._refuses("self_send", lambda group: group.send(coded(0, device=group.device), group.rank))
        self._refuses("self_send", lambda group: group.recv(group.rank))

    def _refuses(self, word: str, call: Callable[[ThreadGroup], object]) -> None:
        def body(group: ThreadGroup) -> None:
            with pytest.raises(UnsupportedOperationError, match=word):
                call(group)

        self.ranks(body, 2)
