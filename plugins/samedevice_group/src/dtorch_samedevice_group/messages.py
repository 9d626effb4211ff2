"""Point to point: messages from rank to rank, which the store carries."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from dtorch_core.checks import check_tensor, check_written
from dtorch_samedevice_group.arguments import only, plainly
from dtorch_samedevice_group.calls import Calls
from dtorch_samedevice_group.ranges import Range, label_of, profiling
from dtorch_samedevice_group.unreal import UnrealWork, is_unreal
from dtorch_samedevice_group.work import ReceiveWork, SendWork, Waited


class Messages(Calls):
    """Mixed into the process group, before torch's class."""

    def send(self, tensors: Sequence[Tensor] | Tensor, dst: int, tag: int = 0) -> SendWork:
        with Range(label_of("send"), (tensors,)) if profiling() else nullcontext():
            return self._send(plainly(only("tensor", tensors)), dst, tag)

    def _send(self, tensor: Tensor, dst: int, tag: int) -> SendWork:
        if is_unreal(tensor):
            self._check_rank(dst)
            return SendWork()

        check_tensor(f"group {self._name!r}, rank {self._rank}, send", tensor)
        self._check_rank(dst)
        with torch.inference_mode(False):  # the copy is the receiver's, who may be in no inference mode
            self._store.send(tensor, dst, tag)

        return SendWork()

    def recv(self, tensors: Sequence[Tensor] | Tensor, src: int, tag: int = 0) -> Waited:
        return self._receive(src, tag, plainly(only("buffer", tensors)))

    def recv_anysource(self, tensors: Sequence[Tensor] | Tensor, tag: int = 0) -> Waited:
        return self._receive(None, tag, plainly(only("buffer", tensors)))

    recvAnysource = recv_anysource  # called from C++ since torch 2.14

    def receive(
        self, src: int | None, tag: int, buffer: Tensor | None = None, *, of_its_shape: bool = True
    ) -> ReceiveWork:
        """The next message of ``src`` (any rank where None); without a buffer it may have any shape. The core calls it.

        :param of_its_shape: the message has the buffer's shape, and not only as many elements.
        """
        call = f"group {self._name!r}, rank {self._rank}, recv"
        if src is not None:
            self._check_rank(src)

        if buffer is not None:
            buffer = plainly(buffer)
            check_written(call, buffer)

        work = ReceiveWork(self._store.expect(src, tag), buffer, self._device, self._timeout, call, of_its_shape)
        if self._coalesced is not None:
            self._coalesced.append(work)

        return work

    def _receive(self, src: int | None, tag: int, buffer: Tensor) -> Waited:
        if not is_unreal(buffer):
            work = self.receive(src, tag, buffer, of_its_shape=False)
            if profiling():
                work.range = Range(label_of("recv" if src is not None else "recv_anysource"), (buffer,))

            return work

        if src is not None:
            self._check_rank(src)

        return UnrealWork([buffer])
