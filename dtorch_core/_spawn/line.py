"""Frames of bytes between the process that called spawn() and one of its processes, over a socket pair.

A frame is a word, a number and a body. The process of ranks writes and waits; the one that called spawn() does neither
beyond what the line takes at once, since a stopped process at the other end must not stop it, too.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections import deque
from enum import IntEnum
from typing import NamedTuple

_HEAD = struct.Struct("<BiQ")
"""Word, number, and how many bytes the body has."""


class Word(IntEnum):
    """What a frame says; the number is a rank's where nothing else is said."""

    WORK = 1
    """To the ranks: what they do, pickled."""
    END = 2
    """To the ranks: return, and why. The number is the milliseconds that they have before they are woken."""
    BEGAN = 3
    """From the ranks: they run."""
    RESULT = 4
    """From a rank: what it returned, pickled."""
    FAILURE = 5
    """From a rank: what it raised, as ``parcel.wrap_error`` makes it."""
    BUSY = 6
    """Of a rank: it was ended, and has not returned in time."""
    DONE = 7
    """From the ranks: nothing more will be said."""


class Frame(NamedTuple):
    word: Word
    number: int
    body: bytearray


class Line:
    """One end. ``receive`` is for one thread, ``send`` for any.

    :param waits: whether sending and receiving wait for the other end.
    """

    def __init__(self, end: socket.socket, *, waits: bool) -> None:
        end.setblocking(waits)
        self.socket = end
        self.ended = False
        """The other end is closed, and all that it said has been received."""
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self._head: tuple[int, int, int] | None
        self._buffer: bytearray
        self._wanted: memoryview
        """What of the buffer has not come yet."""
        self._expect(None)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, word: Word, number: int = 0, body: bytes = b"") -> None:
        """Say it; quietly dropped where nobody listens any more."""
        with self._lock:
            self._unsent.append(memoryview(_HEAD.pack(word, number, len(body))))
            if body:
                self._unsent.append(memoryview(body))

        self.flush()

    def flush(self) -> bool:
        """Send what has not been sent. False if the line takes no more for now."""
        with self._lock:
            while self._unsent:
                try:
                    sent = self.socket.send(self._unsent[0])
                except BlockingIOError:
                    return False
                except OSError:  # closed at the other end, or here
                    self._unsent.clear()
                    break

                self._unsent[0] = self._unsent[0][sent:]
                if not self._unsent[0]:
                    self._unsent.popleft()

            return True

    def receive(self) -> Frame | None:
        """The next frame; None at the line's end, and where it has not come whole on a line that does not wait."""
        while not self.ended:
            if self._wanted:
                try:
                    got = self.socket.recv_into(self._wanted)
                except BlockingIOError:
                    return None
                except OSError:  # reset: the other end was killed before it had read all
                    got = 0

                self.ended = not got
                self._wanted = self._wanted[got:]
            elif self._head is None:
                self._expect(_HEAD.unpack(self._buffer))
            else:
                (word, number, _), body = self._head, self._buffer
                self._expect(None)
                return Frame(Word(word), number, body)

        return None

    def close(self) -> None:
        self.socket.close()

    def _expect(self, head: tuple[int, int, int] | None) -> None:
        """Begin with a head, or with the body that a head announces."""
        self._head = head
        self._buffer = bytearray(_HEAD.size if head is None else head[2])
        self._wanted = memoryview(self._buffer)
