"""Operators of torch that a process group written in Python does not serve.

Their kernels call, in C++, methods that torch passes on to Python for no group. For groups of this project these
kernels call the group; for all others they call what was there before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d

from dtorch_core._groups.torch_state import is_ours, miss

_NAMESPACE = "_c10d_functional"
_lock = threading.Lock()
_library: torch.library.Library | None = None


def serve(device_types: Sequence[str]) -> None:
    """Put the kernels in their places, once; before the first group of this project is used."""
    global _library
    with _lock:
        if _library is not None:
            return

        _library = torch.library.Library(_NAMESPACE, "IMPL")
        for name, ours in _replaced().items():
            for device_type in device_types:
                _replace(_library, name, ours, device_type.upper())


def missing(device_types: Sequence[str]) -> list[str]:
    """What :func:`serve` would miss. Changes nothing."""
    kernels = [_before(name, device_type.upper()) for name in _replaced() for device_type in device_types]
    return [lack for lack in kernels if isinstance(lack, str)]


def _replaced() -> dict[str, Callable[..., Any]]:
    return {"all_gather_into_tensor_out": _all_gather_out, "batch_p2p_ops": _batch_p2p}


def _before(name: str, key: str) -> Any:  # noqa: ANN401
    """The kernel that is there; None where there is no such operator yet; else, in words, why it can't be had."""
    if not hasattr(getattr(torch.ops, _NAMESPACE), name):
        return None  # an operator that came later

    try:
        return torch.library.get_kernel(f"{_NAMESPACE}::{name}", key)
    except (AttributeError, RuntimeError) as error:
        return f"{_NAMESPACE}::{name} does not serve groups of dtorch on {key}: {error}"


def _replace(library: torch.library.Library, name: str, ours: Callable[..., Any], key: str) -> None:
    before = _before(name, key)
    if before is None:
        return

    if isinstance(before, str):
        miss(before)
        return

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **named: Any) -> Any:  # noqa: ANN401
        # The group comes last, by its name or as it is.
        *others, group = args
        if isinstance(group, str):
            group = _distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]

        if is_ours(group):
            return ours(group, *others, **named)

        return before.call_boxed(keys, *args, **named)

    library.impl(name, kernel, key, with_keyset=True)


def _all_gather_out(group: Any, tensor: Tensor, group_size: int, *, out: Tensor) -> Tensor:  # noqa: ANN401
    _distributed_c10d._register_work(out, group.all_gather_single(out, tensor))
    return out


def _batch_p2p(
    group: Any,  # noqa: ANN401
    names: Sequence[str],
    peers: Sequence[int],
    tags: Sequence[int],
    tensors: Sequence[Tensor],
) -> list[Tensor]:
    results = []
    for name, peer, tag, tensor in zip(names, peers, tags, tensors, strict=True):
        if name == "isend":
            group.send([tensor], peer, tag)  # a copy: nothing to wait for
            results.append(tensor.new_empty(0))
        else:
            _distributed_c10d._register_work(tensor, group.recv([tensor], peer, tag))
            results.append(tensor)

    return results
