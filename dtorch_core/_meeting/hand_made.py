"""Ranks that are threads made by hand: one that ends with an uncaught exception is a rank that died.

:func:`dtorch_core.spawn` sees how its ranks end. Outside of it Python tells of uncaught exceptions in threads through
``threading.excepthook`` alone, so the first opening in such a thread puts a hook before the one that is there.
"""

from __future__ import annotations

import threading
import weakref

from dtorch_core._scope import Abortable

_lock = threading.Lock()
_opened: weakref.WeakKeyDictionary[threading.Thread, weakref.WeakSet[Abortable]] = weakref.WeakKeyDictionary()
_before = threading.excepthook
_hooked = False


def watch(handle: Abortable) -> None:
    """Remember that this thread opened ``handle``. (The end of the main thread is the end of the process.)"""
    global _before, _hooked
    thread = threading.current_thread()
    if thread is threading.main_thread():
        return

    with _lock:
        _opened.setdefault(thread, weakref.WeakSet()).add(handle)
        if not _hooked:
            _before, _hooked = threading.excepthook, True
            threading.excepthook = _on_uncaught


def _on_uncaught(args: threading.ExceptHookArgs) -> None:
    try:
        with _lock:
            handles = list(_opened.pop(args.thread, ())) if args.thread is not None else []

        for handle in handles:
            rank = getattr(handle, "rank", "?")
            handle.abort(f"rank {rank} failed: {args.exc_type.__name__}: {args.exc_value}", died=True)
    finally:
        _before(args)
