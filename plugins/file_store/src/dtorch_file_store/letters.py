"""Messages: a letter box for each rank of this process, filled from here and from other nodes, in the order of each.

A small message is one word. A large one lies in its sender's shared memory until the receiver has copied it out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dtorch_core import AbortedError, StoreTimeoutError, streams
from dtorch_core._text import rank_list, seconds
from dtorch_core.mail import Receipt
from dtorch_core.presence import Failure, raise_if, settle
from dtorch_file_store.cuda.current import on
from dtorch_file_store.node import Node
from dtorch_file_store.values import Value
from dtorch_file_store.waiting import Notice, Waiter
from dtorch_file_store.wire import Message, frame


class Letter:
    """A message under way."""

    __slots__ = ("number", "src", "tag", "value")

    def __init__(self, src: int, tag: int, number: int, value: Value) -> None:
        self.src, self.tag, self.value = src, tag, value
        self.number = number
        """Its sender's node calls it so, if it lies in its memory; 0 if nothing has to be given back."""


class Letters:
    """The letter boxes of this process's ranks."""

    def __init__(self, node: Node, arrived: Callable[[int, Any, bytes], Value]) -> None:
        """
        :param arrived: the value that a node describes.
        """
        self.node = node
        self.presence = node.presence
        self.ended: Callable[[int, str], Failure | None] = node.presence.ended
        """Why a rank can begin nothing any more."""
        self._arrived = arrived
        self._letters: dict[int, list[Letter]] = {rank: [] for rank in node.own_ranks}
        self._receipts: dict[int, list[FileReceipt]] = {rank: [] for rank in node.own_ranks}
        self._sent: dict[int, tuple[int, Value]] = {}
        self._numbers = 0
        self._leaver: Waiter | None = None
        """Who waits until nothing lies here any more."""
        node.handlers["letter"] = self._on_letter
        node.handlers["got letter"] = self._on_got

    def send(self, src: int, dst: int, tag: int, value: Value) -> None:
        """Send a value that is the message's alone."""
        node, home = self.node, self.node.homes[dst]
        with node.mutex:
            self.presence.check_open(src)
            raise_if(self.ended(src, f"send to rank {dst}"))
            if home == node.index:
                woken = self._deliver(Letter(src, tag, 0, value), dst)
            elif home in node.gone:
                woken = []
                value.finished()
                node.jobs.append(partial(value.abandon, ()))  # nobody will take it
            else:
                woken, number = [], 0
                described = value.describe()
                if not value.body and described[0] != "body":
                    self._numbers = number = self._numbers + 1
                    self._sent[number] = home, value

                node.tell(home, frame("letter", src, dst, tag, number, described, body=value.body))

        node.after(woken)

    def expect(self, rank: int, src: int | None, tag: int) -> FileReceipt:
        """A receipt for the next message that fits."""
        receipt = FileReceipt(self, rank, src, tag)
        with self.node.mutex:
            self.presence.check_open(rank)
            letters = self._letters[rank]
            letter = next((letter for letter in letters if receipt.fits(letter)), None)
            if letter is None or not self.presence.died:  # what a rank sent before it died is here
                raise_if(self.ended(rank, receipt.what))

            if letter is None:
                self._receipts[rank].append(receipt)
            else:
                letters.remove(letter)
                receipt.fulfil(letter)

        return receipt

    def got(self, letter: Letter, mark: Any) -> None:  # noqa: ANN401 - plain values
        """It was copied out: its sender has the memory back."""
        with self.node.mutex:
            self.node.tell(self.node.homes[letter.src], frame("got letter", letter.number, mark))

        self.node.send()  # no more than that: the receipt is held

    def lent(self) -> list[Value]:
        """What lies here until its receiver has copied it out. Under the mutex."""
        return [value for _, value in self._sent.values()]

    def withdraw(self, receipt: FileReceipt) -> bool:
        """Take a receipt back; False if its message is here."""
        with self.node.mutex:
            if receipt.letter is not None:
                return False

            if receipt in self._receipts[receipt.rank]:
                self._receipts[receipt.rank].remove(receipt)

            return True

    def why_no_message(self, receipt: FileReceipt) -> Failure | None:
        """Why nobody can send it any more; None while somebody can."""
        if receipt.rank in self.presence.closed:
            reason = f"{self.presence.me(receipt.rank)}, {receipt.what}: it was closed"
            return lambda: AbortedError(reason)

        common = self.presence.over(receipt.rank, receipt.what)
        if common is not None:
            return common

        senders = {receipt.src} if receipt.src is not None else self.presence.others(receipt.rank)
        if senders and senders <= self.presence.closed:
            return self.presence.lost(receipt.rank, sorted(senders), receipt.what)

        return None

    def give_up(self) -> list[Waiter]:
        """Fail the waits that can't end well any more: those settled. Under the mutex."""
        return [
            waiter
            for receipts in self._receipts.values()
            for receipt in receipts
            for waiter in receipt.give_up(self.why_no_message(receipt))
        ]

    def await_receivers(self, rank: int) -> Waiter:
        """To wait until nothing lies here any more. Under the mutex."""
        self._leaver = Waiter(rank)
        self._leaver.done = not self._sent
        return self._leaver

    def node_gone(self, node: int) -> list[Waiter]:
        """A node takes nothing any more. Under the mutex."""
        gone = [number for number, (home, _) in self._sent.items() if home == node]
        return [waiter for number in gone for waiter in self._take_back(number, [])]

    def _deliver(self, letter: Letter, dst: int) -> list[Waiter]:
        receipts = self._receipts[dst]
        receipt = next((receipt for receipt in receipts if receipt.fits(letter)), None)
        if receipt is None:
            self._letters[dst].append(letter)
            return []

        receipts.remove(receipt)
        return receipt.fulfil(letter)

    def _take_back(self, number: int, marks: Sequence[Any]) -> list[Waiter]:
        _, value = self._sent.pop(number)
        value.finished()
        self.node.jobs.append(partial(value.abandon, marks))
        if self._sent or self._leaver is None or self._leaver.settled:
            return []

        self._leaver.done = True
        return [self._leaver]

    def _on_letter(self, peer: int, message: Message) -> Iterable[Waiter]:
        src, dst, tag, number, described = message.fields
        return self._deliver(Letter(src, tag, number, self._arrived(peer, described, message.body)), dst)

    def _on_got(self, peer: int, message: Message) -> Iterable[Waiter]:
        number, mark = message.fields
        if number not in self._sent:
            return ()

        return self._take_back(number, [] if mark is None else [(peer, mark)])


class FileReceipt(Receipt):
    """A receipt in a letter box. Its state is guarded by the node's mutex."""

    def __init__(self, letters: Letters, rank: int, src: int | None, tag: int) -> None:
        self._letters = letters
        self.rank, self.src, self.tag = rank, src, tag
        self.letter: Letter | None = None
        self._waiters: list[Waiter] = []
        self._opening = threading.Lock()
        self._tensor: Tensor | None = None
        self._ready: torch.cuda.Event | None = None

    @property
    def what(self) -> str:
        """As messages call it."""
        return f"recv from {'any rank' if self.src is None else f'rank {self.src}'} (tag {self.tag})"

    def fits(self, letter: Letter) -> bool:
        """It is from the right source, with the right tag."""
        return self.tag == letter.tag and self.src in (None, letter.src)

    def fulfil(self, letter: Letter) -> list[Waiter]:
        """The message is here: the waiters that this settles."""
        self.letter = letter
        woken, self._waiters = [waiter for waiter in self._waiters if not waiter.settled], []
        for waiter in woken:
            waiter.done = True

        return woken

    def give_up(self, failure: Failure | None) -> list[Waiter]:
        """Fail the waits for it, if there is a failure: those settled."""
        return settle(self._waiters, lambda _: failure)

    def wait(self, timeout: float, stream: torch.cuda.Stream | None = None) -> tuple[Tensor, int]:
        node = self._letters.node
        deadline = time.monotonic() + timeout
        with node.mutex:
            waiter = None
            if self.letter is None:
                raise_if(self._letters.why_no_message(self))
                waiter = Waiter(self.rank)
                self._waiters.append(waiter)

        if waiter is not None:
            try:
                node.wait(waiter, deadline)
            finally:
                with node.mutex:
                    if waiter in self._waiters:
                        self._waiters.remove(waiter)

            if self.letter is None:
                raise_if(waiter.error)
                raise StoreTimeoutError(self._late(timeout))

        letter = self.letter
        assert letter is not None, "it is here, or the wait has raised"
        tensor = self._open(letter, stream)
        streams.order_after(self._ready, tensor, stream)
        streams.keep_until_done(tensor, stream)
        return tensor, letter.src

    def done(self) -> bool:
        if self.letter is not None:
            return True

        self._letters.node.look()
        with self._letters.node.mutex:
            return self.letter is not None or self._letters.why_no_message(self) is not None

    def cancel(self) -> bool:
        return self._letters.withdraw(self)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        notice = Notice(self.rank, callback)
        with self._letters.node.mutex:
            if self.letter is None and self._letters.why_no_message(self) is None:
                self._waiters.append(notice)
                return

        self._letters.node.jobs.do(notice.call)  # behind the one that this thread is at: many letters may be here

    def _open(self, letter: Letter, stream: torch.cuda.Stream | None) -> Tensor:
        """The tensor, which is the receiver's own; copied out once."""
        with self._opening:
            if self._tensor is None:
                tensor = letter.value.borrow(stream)
                if letter.number:
                    with on(stream):
                        tensor = tensor.clone(memory_format=torch.contiguous_format)

                    self._letters.got(letter, letter.value.mark(stream))

                self._tensor = tensor
                self._ready = streams.record(tensor, stream)

        return self._tensor

    def _late(self, timeout: float) -> str:
        presence = self._letters.presence
        others = presence.others(self.rank)
        who = f"none of {rank_list(others)} had" if self.src is None else f"rank {self.src} had not"
        return f"{presence.label}, rank {self.rank}, {self.what}: {who} sent it after {seconds(timeout)}"
