"""CUDA events that are recorded again and again, and never destroyed.

To destroy an event CUDA waits until no thread waits on that GPU for a copy to the host. Where ranks are threads, that
copy may be another rank's, behind a kernel of NCCL's that waits for the very rank which lets the event go: for ever.
And whoever lets go last of what two ranks exchange is up to chance. So the events of both stay here.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from typing import TypeVar

import torch

_T = TypeVar("_T")

_pools: defaultdict[tuple[int, bool], deque[torch.cuda.Event]] = defaultdict(deque)
"""By GPU and kind, in the order in which they were recorded: also those that are in use."""


def recorded(stream: torch.cuda.Stream, *, blocking: bool = False) -> torch.cuda.Event:
    """An event that completes when all work queued so far on ``stream`` has.

    Whoever has it has it alone: it is recorded again only once nobody has it any more.

    :param blocking: a thread that waits for it sleeps.
    """
    if torch.cuda.is_current_stream_capturing():  # then it is a part of the graph
        event = torch.cuda.Event(blocking=blocking)
        event.record(stream)
        return event

    pool = _pools[stream.device_index, blocking]
    event = _oldest(pool, _ALONE) or torch.cuda.Event(blocking=blocking)
    event.record(stream)
    pool.append(event)
    return event


def _oldest(pool: deque[_T], alone: int) -> _T | None:
    """The first one, taken out of the pool; None if there is none, or somebody has it: then it is the last one."""
    try:
        event = pool.popleft()
    except IndexError:
        return None

    if sys.getrefcount(event) > alone:
        pool.append(event)
        return None

    return event


_ALONE = next(count for count in range(1, 9) if _oldest(deque([object()]), count) is not None)
"""How many references Python counts where nobody else has one."""
