"""Messages between threads: the receiver gets the sender's copy itself, from any source and in order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dtorch_core import StoreTimeoutError, streams
from dtorch_core._text import rank_list, seconds
from dtorch_core.mail import Receipt
from dtorch_memory_store.joint import JointSession
from dtorch_memory_store.session import Failure, wake
from dtorch_memory_store.waiting import Waiter


class Message:
    """A tensor under way, and the event after which it holds its values."""

    __slots__ = ("ready", "src", "tag", "tensor")

    def __init__(self, src: int, tag: int, tensor: Tensor, ready: torch.cuda.Event | None) -> None:
        self.src, self.tag, self.tensor, self.ready = src, tag, tensor, ready


class MailSession(JointSession):
    """A session with a letter box for each rank: messages that wait for a receipt, or receipts for a message."""

    def __init__(self, name: str, world_size: int) -> None:
        super().__init__(name, world_size)
        self._letters: list[list[Message]] = [[] for _ in range(world_size)]
        self._receipts: list[list[MemoryReceipt]] = [[] for _ in range(world_size)]

    def deliver(self, message: Message, dst: int) -> None:
        """Hand a message to the first receipt that it fits, or leave it in the box."""
        with self.mutex:
            self._check_open(message.src)
            self._raise_if(self._common_failure(message.src, f"send to rank {dst}"))
            receipts = self._receipts[dst]
            receipt = next((receipt for receipt in receipts if receipt.fits(message)), None)
            if receipt is None:
                self._letters[dst].append(message)
                return

            receipts.remove(receipt)
            woken, callbacks = receipt.fulfil(message)

        wake(woken)
        for callback in callbacks:
            callback()

    def expect(self, rank: int, src: int | None, tag: int) -> MemoryReceipt:
        """A receipt for the next message that fits."""
        receipt = MemoryReceipt(self, rank, src, tag)
        with self.mutex:
            self._check_open(rank)
            letters = self._letters[rank]
            letter = next((letter for letter in letters if receipt.fits(letter)), None)
            if letter is None:
                self._receipts[rank].append(receipt)
            else:
                letters.remove(letter)
                receipt.fulfil(letter)

        return receipt

    def withdraw(self, receipt: MemoryReceipt) -> bool:
        """Take a receipt back; False if its message is here."""
        with self.mutex:
            if receipt.message is not None:
                return False

            self._receipts[receipt.rank].remove(receipt)
            return True

    def why_no_message(self, receipt: MemoryReceipt) -> Failure | None:
        """Why nobody can send it any more; None while somebody can."""
        common = self._common_failure(receipt.rank, receipt.what)
        if common is not None:
            return common

        senders = {receipt.src} if receipt.src is not None else set(range(self.world_size)) - {receipt.rank}
        return self._lost(receipt.rank, sorted(senders), receipt.what) if senders and senders <= self._closed else None

    def reconsider_more(self) -> list[Waiter]:
        woken = super().reconsider_more()
        for receipts in self._receipts:
            for receipt in receipts:
                failure = self.why_no_message(receipt)
                if failure is not None:
                    woken += receipt.fail(failure)

        return woken


class MemoryReceipt(Receipt):
    """A receipt in a letter box. Its state is guarded by the session's mutex."""

    def __init__(self, session: MailSession, rank: int, src: int | None, tag: int) -> None:
        self._session = session
        self.rank, self.src, self.tag = rank, src, tag
        self.message: Message | None = None
        self._waiters: list[Waiter] = []
        self._callbacks: list[Callable[[], None]] = []

    @property
    def what(self) -> str:
        """As messages call it."""
        return f"recv from {'any rank' if self.src is None else f'rank {self.src}'} (tag {self.tag})"

    def fits(self, message: Message) -> bool:
        """The message is from the right source, with the right tag."""
        return self.tag == message.tag and self.src in (None, message.src)

    def fulfil(self, message: Message) -> tuple[list[Waiter], list[Callable[[], None]]]:
        """The message is here: whom to wake and what to call, outside the mutex."""
        self.message = message
        woken, self._waiters = [waiter for waiter in self._waiters if not waiter.settled], []
        for waiter in woken:
            waiter.done = True

        callbacks, self._callbacks = self._callbacks, []
        return woken, callbacks

    def fail(self, failure: Failure) -> list[Waiter]:
        """It can't come: whom to wake."""
        woken = [waiter for waiter in self._waiters if not waiter.settled]
        for waiter in woken:
            waiter.error = failure

        return woken

    def wait(self, timeout: float, stream: torch.cuda.Stream | None = None) -> tuple[Tensor, int]:
        session = self._session
        waiter = Waiter(self.rank)
        with session.mutex:
            if self.message is None:
                session._raise_if(session.why_no_message(self))
                self._waiters.append(waiter)

        if self.message is None:
            try:
                waiter.sleep(timeout)
            finally:
                with session.mutex:
                    if waiter in self._waiters:
                        self._waiters.remove(waiter)

        message = self.message
        if message is None:
            session._raise_if(waiter.error)
            others = set(range(session.world_size)) - {self.rank}
            who = f"none of {rank_list(others)} had" if self.src is None else f"rank {self.src} had not"
            raise StoreTimeoutError(
                f"store {session.name!r}, rank {self.rank}, {self.what}: {who} sent it after {seconds(timeout)}"
            )

        streams.order_after(message.ready, message.tensor, stream)
        streams.keep_until_done(message.tensor, stream)
        return message.tensor, message.src

    def done(self) -> bool:
        return self.message is not None

    def cancel(self) -> bool:
        return self._session.withdraw(self)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        with self._session.mutex:
            if self.message is None and self._session.why_no_message(self) is None:
                self._callbacks.append(callback)
                return

        callback()
