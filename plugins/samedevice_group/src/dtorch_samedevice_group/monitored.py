"""monitored_barrier: rank 0 hears of every other rank, and tells all of them how it ended.

Made of messages, not of a collective: a rank that has not come leaves the group usable. The errors have the words of
Gloo's barrier in them, which programs look for.
"""

from __future__ import annotations

import time

import torch

from dtorch_core import DtorchError, StoreTimeoutError, TensorStore
from dtorch_core._text import seconds
from dtorch_core.mail import Receipt

FIRST_TAG = -(10**9)
"""Of the first barrier of a group; each has a tag of its own, below those that programs use."""


def monitored_barrier(
    store: TensorStore, number: int, timeout: float, patience: float, wait_all_ranks: bool
) -> None:
    """Hold one barrier.

    :param number: of this barrier; equal on every rank.
    :param timeout: seconds that rank 0 waits for the others.
    :param patience: seconds that the others wait for rank 0.
    :param wait_all_ranks: wait for the ranks behind the first one that is late, and name all that are.
    :raises StoreTimeoutError: on every rank that is there, if one is not.
    :raises PeerLostError: if a rank died, which ends the group; no other rank is blamed for that.
    :raises AbortedError: if the group was aborted; the same.
    """
    tag = FIRST_TAG - number
    label = f"{store.label}, rank {store.rank}, monitored_barrier"
    if store.rank == 0:
        _hear(store, tag, label, timeout, wait_all_ranks)
    else:
        _tell(store, tag, label, patience)


def _tell(store: TensorStore, tag: int, label: str, patience: float) -> None:
    failed = (
        f"{label}: Rank {store.rank} successfully reached monitoredBarrier, but received errors while waiting for "
        f"send/recv from rank 0"
    )
    try:
        _say(store, 0, tag, True)
        passed = _heard(store.expect(0, tag), 0, tag, patience, patience)
    except DtorchError as error:
        raise type(error)(f"{failed}: {error}") from error

    if not passed:
        raise StoreTimeoutError(f"{failed}: it says that not every rank has come; its own error names them")


def _hear(store: TensorStore, tag: int, label: str, timeout: float, wait_all_ranks: bool) -> None:
    try:
        expected: dict[int, Receipt] = {rank: store.expect(rank, tag) for rank in range(1, store.world_size)}
    except DtorchError as error:
        raise type(error)(f"{label}: {error}") from error

    if timeout <= 0:
        raise StoreTimeoutError(f"{label}: Rank 0 timed out in monitoredBarrier after {seconds(timeout)}")

    deadline = time.monotonic() + timeout
    late: dict[int, DtorchError] = {}
    for rank, receipt in expected.items():
        try:
            _heard(receipt, rank, tag, max(deadline - time.monotonic(), 0), timeout)
        except DtorchError as error:
            if _is_over(store, tag):  # the error says why: it need not be about the rank that was waited for
                raise type(error)(f"{label}: {error}") from error

            late[rank] = error
            if not wait_all_ranks:
                break

    for rank in expected:  # those that come later read it as well
        try:
            _say(store, rank, tag, not late)
        except DtorchError:
            pass  # it is lost, or has left

    if late:
        ranks = ", ".join(map(str, late))
        why = "; ".join(str(error) for error in late.values())
        raise StoreTimeoutError(
            f"{label}: Rank{'s' * (len(late) > 1)} {ranks} failed to pass monitoredBarrier in {seconds(timeout)}: {why}"
        )


def _heard(receipt: Receipt, rank: int, tag: int, left: float, timeout: float) -> bool:
    """What the rank says. The errors are about the barrier: no program has given the tag, or called recv."""
    try:
        word, _ = receipt.wait(left)
    except StoreTimeoutError as error:
        raise StoreTimeoutError(f"rank {rank} had not come after {seconds(timeout)}") from error
    except DtorchError as error:
        own = str(error).replace(f"recv from rank {rank} (tag {tag})", f"waiting for rank {rank}")
        raise type(error)(own) from error

    return bool(word.item())


def _is_over(store: TensorStore, tag: int) -> bool:
    """The group has ended, so that not even a message to oneself can come; a rank that has left does not end it."""
    try:
        store.expect(store.rank, tag).cancel()
    except DtorchError:
        return True

    return False


def _say(store: TensorStore, rank: int, tag: int, word: bool) -> None:
    with torch.inference_mode(False):
        store.send(torch.tensor(word), rank, tag)
