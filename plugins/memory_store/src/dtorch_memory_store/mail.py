"""Messages between threads: the receiver gets the sender's copy itself, from any source and in order."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dtorch_core import AbortedError, StoreTimeoutError, streams
from dtorch_core._text import rank_list, seconds
from dtorch_core.mail import Receipt
from dtorch_core.presence import Failure, Presence, raise_if
from dtorch_memory_store.waiting import Notice, Owed, Waiter, fail, wake, wake_all


class Message:
    """A tensor under way, and the event after which it holds its values."""

    __slots__ = ("ready", "src", "tag", "tensor")

    def __init__(self, src: int, tag: int, tensor: Tensor, ready: torch.cuda.Event | None) -> None:
        self.src, self.tag, self.tensor, self.ready = src, tag, tensor, ready


class Letters:
    """A letter box for each rank: messages that wait for a receipt, or receipts for a message."""

    def __init__(self, presence: Presence, over: Callable[[int, str], Failure | None], owed: Owed) -> None:
        """
        :param over: why a rank can begin nothing any more.
        """
        self.presence = presence
        self.owed = owed
        self._over = over
        self._letters: list[list[Message]] = [[] for _ in range(presence.world_size)]
        self._receipts: list[list[MemoryReceipt]] = [[] for _ in range(presence.world_size)]

    def deliver(self, message: Message, dst: int) -> None:
        """Hand a message to the first receipt that it fits, or leave it in the box."""
        try:
            with self.presence.mutex:
                self.presence.check_open(message.src)
                raise_if(self._over(message.src, f"send to rank {dst}"))
                receipts = self._receipts[dst]
                receipt = next((receipt for receipt in receipts if receipt.fits(message)), None)
                if receipt is None:
                    self._letters[dst].append(message)
                    return

                receipt.message = message  # from here on it is delivered
                woken = receipt.fulfilled()
                receipts.remove(receipt)

            wake(woken, self.owed)
        except BaseException:  # Ctrl-C
            self.mend()
            raise

    def expect(self, rank: int, src: int | None, tag: int) -> MemoryReceipt:
        """A receipt for the next message that fits."""
        receipt = MemoryReceipt(self, rank, src, tag)
        letter: Message | None = None
        letters = self._letters[rank]
        try:
            with self.presence.mutex:
                self.presence.check_open(rank)
                letter = next((letter for letter in letters if receipt.fits(letter)), None)
                if letter is None or not self.presence.died:  # what a rank sent before it died is here
                    raise_if(self._over(rank, receipt.what))

                if letter is None:
                    self._receipts[rank].append(receipt)
                else:
                    letters.remove(letter)
                    receipt.message = letter
        except BaseException:  # Ctrl-C: nobody will ask this receipt
            with self.presence.mutex:
                if receipt in self._receipts[rank]:
                    self._receipts[rank].remove(receipt)

                letter = letter or receipt.message
                if letter is not None and letter not in letters:
                    letters.insert(0, letter)  # it was the first one that fits

            raise

        return receipt

    def withdraw(self, receipt: MemoryReceipt) -> bool:
        """Take a receipt back; False if its message is here."""
        with self.presence.mutex:
            if receipt.message is not None:
                return False

            if receipt in self._receipts[receipt.rank]:
                self._receipts[receipt.rank].remove(receipt)

            return True

    def mend(self) -> None:
        """End what interrupted threads have left, and wake whom they had to. Takes the mutex."""
        with self.presence.mutex:
            for receipts in self._receipts:
                for receipt in [receipt for receipt in receipts if receipt.message is not None]:
                    receipt.fulfilled()
                    receipts.remove(receipt)

        wake_all(self.owed)

    def why_no_message(self, receipt: MemoryReceipt) -> Failure | None:
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

    def give_up(self) -> None:
        """Fail the waits that can't end well any more. Under the mutex."""
        for receipts in self._receipts:
            for receipt in receipts:
                receipt.give_up(self.why_no_message(receipt))


class MemoryReceipt(Receipt):
    """A receipt in a letter box. Its state is guarded by the mutex."""

    def __init__(self, letters: Letters, rank: int, src: int | None, tag: int) -> None:
        self._letters = letters
        self.rank, self.src, self.tag = rank, src, tag
        self.message: Message | None = None
        self._waiters: list[Waiter] = []

    @property
    def what(self) -> str:
        """As messages call it."""
        return f"recv from {'any rank' if self.src is None else f'rank {self.src}'} (tag {self.tag})"

    def fits(self, message: Message) -> bool:
        """It waits for a message like this."""
        return self.message is None and self.tag == message.tag and self.src in (None, message.src)

    def fulfilled(self) -> list[Waiter]:
        """The message is here: whom to wake."""
        woken = [waiter for waiter in self._waiters if waiter.error is None]
        for waiter in woken:
            waiter.done = True
            self._letters.owed[waiter] = None

        self._waiters = []
        return woken

    def give_up(self, failure: Failure | None) -> None:
        """Fail the waits for it, if there is a failure."""
        fail(self._waiters, lambda _: failure, self._letters.owed)

    def wait(self, timeout: float, stream: torch.cuda.Stream | None = None) -> tuple[Tensor, int]:
        letters, presence = self._letters, self._letters.presence
        waiter = Waiter(self.rank)
        with presence.mutex:
            if self.message is None:
                raise_if(letters.why_no_message(self))
                self._waiters.append(waiter)

        if self.message is None:
            try:
                waiter.sleep(timeout)
            finally:
                with presence.mutex:
                    if waiter in self._waiters:
                        self._waiters.remove(waiter)

        message = self.message
        if message is None:
            raise_if(waiter.error)
            others = presence.others(self.rank)
            who = f"none of {rank_list(others)} had" if self.src is None else f"rank {self.src} had not"
            raise StoreTimeoutError(
                f"{presence.label}, rank {self.rank}, {self.what}: {who} sent it after {seconds(timeout)}"
            )

        streams.order_after(message.ready, message.tensor, stream)
        streams.keep_until_done(message.tensor, stream)
        return message.tensor, message.src

    def done(self) -> bool:
        if self.message is not None:
            return True

        with self._letters.presence.mutex:
            return self.message is not None or self._letters.why_no_message(self) is not None

    def cancel(self) -> bool:
        return self._letters.withdraw(self)

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        notice = Notice(self.rank, callback, self._letters.presence, self._letters.owed)
        with self._letters.presence.mutex:
            if self.message is None and self._letters.why_no_message(self) is None:
                self._waiters.append(notice)
                return

        notice.wake()
