"""The flight recorder: the last calls of every rank of a group, for the message of an error and for ``dtorch doctor``.

Off unless the environment variable DTORCH_FLIGHT_RECORDER is a number above zero when a group is opened: so many calls
of each of its handles are kept. What is done on ``process_group`` directly is not seen. Imports no torch.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass, field

from dtorch_core._text import seconds
from dtorch_core.errors import CollectiveMismatchError, DtorchError, PeerLostError, StoreTimeoutError

VARIABLE = "DTORCH_FLIGHT_RECORDER"
"""The environment variable: how many calls to keep."""

_lock = threading.Lock()
_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
_made = itertools.count()


@dataclass(slots=True, eq=False)
class Entry:
    """One call."""

    number: int
    """Counted from 1 on each handle."""
    call: str
    """``"all_reduce(float32[3], sum)"``"""
    state: str = "begun"
    """``"begun"``; ``"done"`` once it was waited for; or the error's type."""
    began: float = field(default_factory=time.monotonic)

    def end(self, error: BaseException | None = None) -> None:
        """It was waited for, or raised."""
        self.state = "done" if error is None else type(error).__name__

    def __str__(self) -> str:
        return f"#{self.number} {self.call}: {self.state}, begun {seconds(time.monotonic() - self.began)} ago"


class Recorder:
    """The last calls of one rank's handle on a group."""

    def __init__(self, group: str, rank: int, world_size: int, size: int) -> None:
        self.group, self.rank, self.world_size = group, rank, world_size
        self._entries: deque[Entry] = deque(maxlen=size)
        self._numbers = itertools.count(1)
        self._order = next(_made)
        with _lock:
            _recorders.add(self)

    def begin(self, call: str) -> Entry:
        """Note a call."""
        entry = Entry(next(self._numbers), call)
        self._entries.append(entry)
        return entry

    def entries(self) -> list[Entry]:
        """The last calls, the oldest first."""
        return list(self._entries)

    def explain(self, error: DtorchError) -> None:
        """Add to the message of an error what every rank of the group that is in this process did last."""
        if isinstance(error, (StoreTimeoutError, CollectiveMismatchError, PeerLostError)) and error.args:
            text = str(error.args[0])
            if "\nlast calls of group" not in text:
                error.args = (f"{text}\n{self._table()}", *error.args[1:])

    def __str__(self) -> str:
        lines = [f"rank {self.rank} of {self.world_size}:", *(f"  {entry}" for entry in self.entries())]
        return "\n".join(lines if len(lines) > 1 else [f"{lines[0]} no call"])

    def _table(self) -> str:
        # A name may have been opened before: of each rank the latest handle, and this one itself.
        ranks = {
            other.rank: other
            for other in recorders()
            if (other.group, other.world_size) == (self.group, self.world_size)
        }
        ranks[self.rank] = self
        body = "\n".join(str(ranks[rank]) for rank in sorted(ranks))
        return f"last calls of group {self.group!r} in process {os.getpid()}:\n" + "\n".join(
            f"  {line}" for line in body.splitlines()
        )


def recorders() -> list[Recorder]:
    """The recorders of all group handles in this process, by group and rank, the latest last."""
    with _lock:
        known = list(_recorders)

    return sorted(known, key=lambda recorder: (recorder.group, recorder.rank, recorder._order))


def recorder_for(group: str, rank: int, world_size: int) -> Recorder | None:
    """A recorder for a new handle, if the environment asks for it.

    :raises ValueError: if the variable is not a number.
    """
    value = os.environ.get(VARIABLE, "").strip()
    if not value.isdecimal() and value:
        raise ValueError(f"{VARIABLE} must be the number of calls to keep, not {value!r}")

    return Recorder(group, rank, world_size, int(value)) if value and int(value) else None
