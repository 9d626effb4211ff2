"""Joint work: what ``post`` owes, by the default that is made of the four steps or by a better way."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from dtorch_core.errors import (
    AbortedError,
    CollectiveMismatchError,
    DtorchError,
    StoreTimeoutError,
)
from dtorch_core.joint import Offer, Task
from dtorch_core.store import TensorStore
from dtorch_core.testing._harness import Background, asleep, requires
from dtorch_core.testing._store_base import SHORT, WORLDS, Ending, StoreConformance, coded, same, take


def _nothing(offers: Sequence[Offer]) -> Sequence[Task]:
    return ()


class JointTests(StoreConformance):
    """When all ranks have posted, the work is done once, and all learn how it ended."""

    @WORLDS
    def test_post_hands_every_note_to_the_work_once(self, world_size: int) -> None:
        heard: list[list[tuple[int, str]]] = []

        def work(offers: Sequence[Offer]) -> Sequence[Task]:
            heard.append([(offer.rank, offer.note) for offer in offers])
            return ()

        def body(store: TensorStore) -> None:
            for number in range(3):
                ticket = store.post(f"job {number}", f"{number} of {store.rank}", (), work)
                ticket.wait(self.patience / 2)
                assert ticket.done()
                assert list(ticket.notes()) == [f"{number} of {rank}" for rank in range(world_size)]

        self.ranks(body, world_size)
        assert heard == [[(rank, f"{number} of {rank}") for rank in range(world_size)] for number in range(3)]

    @requires("zero_copy")
    @pytest.mark.parametrize("parts", [False, True], ids=["at once", "in parts"])
    def test_post_works_on_the_tensors_themselves(self, parts: bool, device: str) -> None:
        """The work itself, or the tasks that it returns, in any order."""

        def work(offers: Sequence[Offer]) -> Sequence[Task]:
            def add_up(place: int) -> None:
                total = torch.stack([offer.tensors[place] for offer in offers]).sum(0)
                for offer in offers:
                    offer.tensors[place].copy_(total)

            tasks: list[Task] = [lambda: add_up(0), lambda: add_up(1)]
            if parts:
                return tasks

            for task in tasks:
                task()

            return ()

        def body(store: TensorStore) -> None:
            mine = coded(store.rank, (5,), device)
            strided = coded(store.rank, (5, 2), device)[:, 0]
            wanted = [mine * 3 + 1000 * (3 - 3 * store.rank), strided * 3 + 1000 * (3 - 3 * store.rank)]
            store.post("sum", "", (mine, strided), work).wait(self.patience / 2)
            assert same(mine, wanted[0]), f"got {mine}, not {wanted[0]}"
            assert same(strided, wanted[1]), f"got {strided}, not {wanted[1]}"

        self.ranks(body, 3, device)

    def test_posts_may_come_in_any_order(self) -> None:
        """None waits for another one."""
        numbers = range(8)

        def body(store: TensorStore) -> None:
            order = list(numbers) if store.rank != 1 else list(reversed(numbers))
            tickets = {number: store.post(f"{number}", f"{store.rank}", (), _nothing) for number in order}
            for number in sorted(numbers, key=lambda number: 5 * number % 8):
                tickets[number].wait(self.patience / 2)
                assert list(tickets[number].notes()) == ["0", "1", "2"]

        self.ranks(body, 3)

    def test_post_tells_every_rank_what_the_work_raised(self) -> None:
        def mismatch(offers: Sequence[Offer]) -> Sequence[Task]:
            raise CollectiveMismatchError("these do not fit")

        def breaks(offers: Sequence[Offer]) -> Sequence[Task]:
            raise KeyError("of another kind")

        def body(store: TensorStore) -> None:
            ticket = store.post("mismatch", "", (), mismatch)
            for _ in range(2):
                with pytest.raises(CollectiveMismatchError, match="these do not fit"):
                    ticket.wait(self.patience / 2)

            assert ticket.done()
            with pytest.raises((KeyError, DtorchError), match="of another kind"):
                store.post("breaks", "", (), breaks).wait(self.patience / 2)

            store.post("good", "", (), _nothing).wait(self.patience / 2)  # nothing else is harmed

        self.ranks(body, 3)

    def test_post_is_told_when_it_is_done(self) -> None:
        def body(store: TensorStore) -> None:
            told, told_again = threading.Event(), threading.Event()
            if store.rank == 1:
                store.barrier()

            ticket = store.post("one", "", (), _nothing)
            ticket.add_done_callback(told.set)
            if store.rank == 0:
                assert not told.is_set() and not ticket.done()
                store.barrier()

            assert told.wait(self.patience / 2), "nobody has called back"
            assert ticket.done()
            ticket.add_done_callback(told_again.set)
            assert told_again.wait(self.patience / 2), "nobody has called back"

        self.ranks(body, 2)

    @pytest.mark.parametrize("late", [0, 1])
    def test_post_that_ranks_gave_up_is_dead(self, late: int) -> None:
        """Also for the rank that comes late, and so is what is posted later."""

        def body(store: TensorStore) -> None:
            if store.rank == late:
                take(store, "gave up", coded(0, device=self.home))  # what comes from it later than that news
            else:
                ticket = store.post("late", "", (), _nothing)
                with pytest.raises(StoreTimeoutError, match=f"rank {late}"):
                    ticket.wait(SHORT)

                store.src_set("gave up", coded(0, device=self.home), 1)

            for key in ("late" if store.rank == late else "later", "later still"):
                with pytest.raises(AbortedError):
                    store.post(key, "", (), _nothing).wait(self.patience / 2)

            store.barrier()

        self.ranks(body, 2)

    def test_post_that_is_being_worked_on_is_given_up_by_nobody(self) -> None:
        """The work may write to a rank's tensors: its wait ends with it, not at the deadline."""
        begun, release = threading.Event(), threading.Event()
        waiting = threading.Semaphore(0)

        def held(offers: Sequence[Offer]) -> Sequence[Task]:
            begun.set()
            assert release.wait(self.patience)
            return ()

        def post(store: TensorStore) -> None:
            ticket = store.post("held", "", (), held)  # whoever comes last may be held here, and works
            assert begun.wait(self.patience)
            ticket.wait(SHORT)

        def body(store: TensorStore) -> None:
            call = Background(lambda: post(store))
            assert begun.wait(self.patience)
            asleep(call)
            waiting.release()
            if store.rank == 0:
                for _ in range(3):
                    assert waiting.acquire(timeout=self.patience)

                call.thread.join(3 * SHORT)
                release.set()

            call.result(self.patience)
            store.post("next", "", (), _nothing).wait(self.patience / 2)

        self.ranks(body, 3)

    def test_post_ends_with_a_rank_that_dies(self) -> None:
        def waits(store: TensorStore) -> tuple[Ending, Sequence[Ending]]:
            def wait(key: str) -> Ending:
                return lambda: store.post(key, "", (), _nothing).wait(self.patience / 2)

            return wait("one"), [wait("two")]

        self.told_of_a_death(waits)
