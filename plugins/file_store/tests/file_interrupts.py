"""Ctrl-C at a place of one's choice."""

import dis
import sys

_CALLS = {dis.opmap[name] for name in ("CALL", "CALL_KW", "CALL_FUNCTION_EX") if name in dis.opmap}

_FIRST = 8
"""Bytes of code before a function's first line, at most."""


class Interrupt:
    """Raises KeyboardInterrupt in a ``with`` block: at the n-th of the places where Python runs a signal's handler, of
    those in the files of the file store.

    That is where a function begins, after a call of what is not Python, and where a loop goes round.
    """

    def __init__(self, number):
        self._left = number
        self.place = None
        """Where it was raised; None while it was not."""
        self._last = {}
        # Kept: Python 3.11 was seen to call another object, which lay where a method had been that was gone.
        self._on_call, self._on_opcode = self._called, self._within

    def __enter__(self):
        self._before = sys.gettrace()
        sys.settrace(self._on_call)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)

    def _called(self, frame, event, arg):
        if self._left < 0 or "dtorch_file_store" not in frame.f_code.co_filename:
            return None

        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        # A generator may go on only to be closed, and what a finalizer raises reaches nobody.
        if frame.f_lasti <= _FIRST and frame.f_code.co_name != "__del__":
            self._come(frame)

        return self._on_opcode

    def _within(self, frame, event, arg):
        if event == "opcode":
            at = frame.f_lasti
            before, did = self._last.get(frame, (at, None))
            self._last[frame] = at, frame.f_code.co_code[at]
            if did in _CALLS or at < before:
                self._come(frame)
        elif event == "exception":  # what handles it is not interrupted before its first call
            self._last[frame] = 0, None
        elif event == "return":
            self._last.pop(frame, None)
            self._last[frame.f_back] = 0, None

        return self._on_opcode

    def _come(self, frame):
        self._left -= 1
        if self._left == -1:
            self._last.clear()
            self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
            raise KeyboardInterrupt


def interrupts(most):
    """One after the other, each a place further on, until the block was through before it came.

    :param most: of them: a thread that looks for messages goes round for as long as it looks.
    """
    for number in range(most):
        interrupt = Interrupt(number)
        yield interrupt
        if interrupt.place is None:
            return
