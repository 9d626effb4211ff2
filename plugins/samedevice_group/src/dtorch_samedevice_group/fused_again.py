"""Launches what was launched for the same tensors before, without deciding anything anew.

Programs reduce and gather the same buffers again and again. Which kernel that takes, and with which numbers, follows
from where the tensors lie and how long they are: as long as that is the same, so are they.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.autograd.graph import increment_version

from dtorch_samedevice_group.blocks import Job
from dtorch_samedevice_group.fused_launch import Launch, launcher

Where = tuple[int, ...]
"""The addresses and lengths of a call's tensors."""

_MOST = 100
"""Sets of tensors that are remembered."""


class Again:
    """The memory of one collective, whose tensors have one dtype each, whatever they are."""

    def __init__(self) -> None:
        self._known: dict[Where, Launch] = {}

    @staticmethod
    def where(tensors: Sequence[Tensor]) -> Where | None:
        """Where they lie; None if one is not simply the memory there."""
        where: list[int] = []
        for tensor in tensors:
            if not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
                return None

            where += tensor.data_ptr(), tensor.nbytes

        return tuple(where)

    def done(self, where: Where | None, written: Sequence[Tensor]) -> bool:
        """Whether all is done, by what was launched for the same place before.

        :param written: the tensors that the collective writes.
        """
        known = None if where is None else self._known.get(where)
        if known is None or not launcher.repeat(known):
            return False

        increment_version(written)
        return True

    def left(self, where: Where | None, attempt: Callable[[], Sequence[Job]]) -> Sequence[Job]:
        """The jobs that are left to torch after ``attempt``, whose launch is remembered if it has done it all."""
        with launcher.noting() as launches:
            left = attempt()

        if where is not None and len(launches) == 1 and not left:  # of several, the first could be done twice
            if len(self._known) >= _MOST:
                self._known.clear()

            (self._known[where],) = launches

        return left
