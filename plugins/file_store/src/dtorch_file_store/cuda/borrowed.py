"""Tensors over memory that torch did not allocate, through DLPack: public, without NumPy, the same in each torch."""

from __future__ import annotations

import ctypes
import threading
from ctypes import POINTER, c_char_p, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p

import torch
from torch import Tensor

_CPU, _CUDA = 1, 2
_UNSIGNED = 1
_NAME = b"dltensor"  # kept alive here: a capsule does not copy its name


class _Device(ctypes.Structure):
    _fields_ = [("kind", c_int32), ("ordinal", c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_uint64),
        ("device", _Device),
        ("ndim", c_int32),
        ("dtype", _DataType),
        ("shape", POINTER(c_int64)),
        ("strides", c_uint64),
        ("byte_offset", c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", c_uint64), ("deleter", c_uint64)]


# torch reads the description once, and the missing deleter again when the storage dies: so there is one description,
# which is never freed.
_shape = (c_int64 * 1)()
_managed = _Managed(_Tensor(0, _Device(_CPU, 0), 1, _DataType(_UNSIGNED, 8, 1), _shape, 0, 0), 0, 0)
_mutex = threading.Lock()
_capsule = ctypes.PyDLL(None).PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [c_void_p, c_char_p, c_void_p]


def bytes_at(address: int, nbytes: int, ordinal: int | None) -> Tensor:
    """``nbytes`` of memory as uint8, not owned: whoever calls keeps the memory until the tensor's storage is gone.

    :param ordinal: of the CUDA device; None for memory of the host.
    """
    with _mutex:
        _managed.tensor.data, _shape[0] = address, nbytes
        _managed.tensor.device = _Device(_CPU, 0) if ordinal is None else _Device(_CUDA, ordinal)
        return torch.from_dlpack(_capsule(ctypes.addressof(_managed), _NAME, None))
