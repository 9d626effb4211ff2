"""Random numbers of a rank's own: torch's default generators, divided among ranks that are threads.

While it is held, the kernels that draw from a default generator are others, which give torch's own kernel the rank's
generator. Whoever calls them is served: Python, a module's dropout, C++. Operations that draw nothing are as they were.
Some CUDA kernels take no generator (fused dropout and attention): for these the rank's state is put into the
default generator, under a lock, for as long as the kernel is being launched.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from dtorch_core import _scope
from dtorch_core._scope import Scope
from dtorch_core._thread_ranks.shared_patch import SharedPatch, lacking, replace
from dtorch_core._thread_ranks.threads import inherited
from dtorch_core.errors import UnsupportedOperationError

_KEY = "random"
"""Of a rank's generators, in ``Scope.own``."""

_DRAW_NOTHING = ("_fused_sdp_choice", "native_dropout_backward", "_masked_scale")
"""Marked as random in torch's tables; so are backward passes of attention, which are told what was drawn."""


class Generators:
    """One rank's default generators, seeded as torch's are when a process begins: each differently every time."""

    def __init__(self) -> None:
        self.cpu = torch.Generator()
        self.cpu.seed()
        self._lock = threading.Lock()
        self._cuda: dict[int, torch.Generator] = {}

    def cuda(self, index: int) -> torch.Generator:
        """Of a device. ``torch.manual_seed`` asks for every device's."""
        with self._lock:
            if index not in self._cuda:
                self._cuda[index] = torch.Generator(f"cuda:{index}")
                self._cuda[index].seed()

            return self._cuda[index]

    def instead_of(self, default: torch.Generator) -> torch.Generator:
        """The rank's, of the same device."""
        return self.cpu if default.device.type == "cpu" else self.cuda(default.device.index)


def missing() -> list[str]:
    """What this torch lacks; empty where random numbers can be divided among threads."""
    needed: dict[Any, tuple[str, ...]] = {
        torch.library: ("get_kernel", "Library"),
        torch._C: ("_dispatch_get_all_op_names", "_dispatch_has_kernel_for_dispatch_key"),
        torch.random: ("default_generator",),
        torch.Generator: ("_cdata", "seed", "graphsafe_get_state", "graphsafe_set_state"),
        torch.Tag: ("nondeterministic_seeded",),
    }
    return lacking(needed)


MISSING = missing()


@contextmanager
def held(devices: Collection[str]) -> Iterator[None]:
    """Ranks on these devices may have generators of their own in here.

    :raises UnsupportedOperationError: if torch has changed too much.
    """
    if MISSING:
        raise UnsupportedOperationError(
            f"rng='per-rank': random numbers of torch {torch.__version__} can't be divided among ranks that are "
            f"threads: {'; '.join(MISSING)}. Give each rank a torch.Generator of its own, or use ranks_as='processes'"
        )

    with ExitStack() as stack:
        stack.enter_context(inherited.held())
        stack.enter_context(_cpu.held())
        gpus = sorted(device for device in devices if device != "cpu")
        if gpus:
            torch.cuda.init()  # which sets the default generators that are replaced here
            _choose_attention(gpus[0])

        if torch.cuda.is_initialized():  # else torch.manual_seed has no GPU to seed
            stack.enter_context(_cuda.held())

        yield


def _choose_attention(gpu: str) -> None:
    """Let torch decide, once in a process, in which order it tries its kernels for attention.

    It does so with the first call. Threads whose first calls come together are given different kernels, and each kernel
    draws other numbers (torch 2.11 on an H200: some ranks had flash attention, the rest cuDNN's).
    """
    query = torch.zeros(1, 1, 16, 64, device=gpu, dtype=torch.float16)
    torch._fused_sdp_choice(query, query, query)


@contextmanager
def entered(scope: Scope) -> Iterator[None]:
    """This thread, and those it starts, draw from generators of the rank's own."""
    scope.own[_KEY] = Generators()
    try:
        with torch.autograd.set_multithreading_enabled(False):  # a forward pass may be repeated in a backward
            yield
    finally:
        scope.own.pop(_KEY, None)


def mine() -> Generators | None:
    """The generators of this thread's rank; None where it draws from the process's."""
    scope = _scope.current()
    return None if scope is None else scope.own.get(_KEY)


class _Default:
    """Stands for a default generator in ``torch.random`` and ``torch.cuda``: the rank's, or the process's."""

    def __init__(self, outside: torch.Generator) -> None:
        self._outside = outside

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        own = mine()
        return getattr(self._outside if own is None else own.instead_of(self._outside), name)


class _Defaults(Sequence[Any]):
    """Stands for ``torch.cuda.default_generators``. Each item is a generator, which a kernel may be given."""

    def __init__(self, outside: Sequence[torch.Generator]) -> None:
        self.outside = outside

    def __len__(self) -> int:
        return len(self.outside)

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401
        own = mine()
        found = self.outside[index]
        if own is None:
            return found

        if isinstance(found, torch.Generator):
            return own.instead_of(found)

        return tuple(own.instead_of(one) for one in found)


def _install_cpu(stack: ExitStack) -> None:
    replace(stack, torch.random, "default_generator", _Default(torch.default_generator))
    _replace_kernels(stack, "CPU")


def _install_cuda(stack: ExitStack) -> None:
    replace(stack, torch.cuda, "default_generators", _Defaults(torch.cuda.default_generators))
    _replace_kernels(stack, "CUDA")


def _replace_kernels(stack: ExitStack, key: str) -> None:
    library = torch.library.Library("aten", "IMPL")
    stack.callback(library._destroy)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")  # as is intended
        for operator in _random_operators(key):
            kernel = torch.library.get_kernel(operator, key)
            place = _generator_place(operator)
            if place is not None:
                library.impl(operator, _with_own_generator(kernel, *place, key == "CPU"), key, with_keyset=True)
            elif key == "CUDA":  # on the CPU these call others
                library.impl(operator, _with_own_state(kernel), key, with_keyset=True)


@functools.cache
def _random_operators(key: str) -> list[torch._ops.OpOverload]:
    """torch's operators that may draw from a default generator in a kernel for that dispatch key."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            base, _, overload = name.removeprefix("aten::").partition(".")
            operator = getattr(getattr(torch.ops.aten, base), overload or "default", None)
            draws = base not in _DRAW_NOTHING and not base.endswith("_backward")
            if draws and operator is not None and torch.Tag.nondeterministic_seeded in operator.tags:
                found.append(operator)

    return found


def _generator_place(operator: torch._ops.OpOverload) -> tuple[int, bool] | None:
    """Where its argument ``generator`` is, and whether it is given by name."""
    for index, argument in enumerate(operator._schema.arguments):
        if argument.name == "generator":
            return index, argument.kwarg_only

    return None


def _with_own_generator(kernel: Any, index: int, by_name: bool, cpu: bool) -> Callable[..., Any]:  # noqa: ANN401
    call = kernel.call_boxed if cpu else _while_whole(kernel.call_boxed)

    def chosen(given: torch.Generator | None, args: tuple[Any, ...], others: dict[str, Any]) -> torch.Generator | None:
        own = mine()
        if own is None or (given is not None and _address(given) not in defaults):
            return given

        return own.cpu if cpu else own.cuda(_gpu(args, others) if given is None else given.device.index)

    def named(keys: Any, *args: Any, generator: torch.Generator | None = None, **others: Any) -> Any:  # noqa: ANN401
        return call(keys, *args, generator=chosen(generator, args, others), **others)

    def placed(keys: Any, *args: Any, **others: Any) -> Any:  # noqa: ANN401
        if len(args) <= index:
            return named(keys, *args, **others)

        return call(keys, *args[:index], chosen(args[index], args, others), *args[index + 1 :], **others)

    # A default generator that is given is the rank's as well: functions of torch have it as a default argument.
    defaults = {_address(one) for one in ((torch.default_generator,) if cpu else _process_defaults())}
    return named if by_name else placed


def _address(generator: Any) -> int:  # noqa: ANN401 - what torch's stub does not have
    """Of the generator in C++: a kernel is given another Python object of it."""
    address: int = generator._cdata
    return address


def _gpu(args: tuple[Any, ...], named: dict[str, Any]) -> int:
    """The index of the GPU that a kernel is called for."""
    for value in (*args, *named.values()):
        if isinstance(value, torch.Tensor) and value.is_cuda:
            return value.get_device()

    return torch.cuda.current_device()


_state = threading.RLock()  # such a kernel calls another one
"""Of the default CUDA generators, one of which may have a rank's state meanwhile."""


def _while_whole(call: Callable[..., Any]) -> Callable[..., Any]:
    """Threads that draw from a default CUDA generator itself do that while it has the process's state."""

    def guarded(*args: Any, **named: Any) -> Any:  # noqa: ANN401
        if mine() is not None:
            return call(*args, **named)

        with _state:
            return call(*args, **named)

    return guarded


def _with_own_state(kernel: Any) -> Callable[..., Any]:  # noqa: ANN401
    call = kernel.call_boxed

    def swapped(keys: Any, *args: Any, **named: Any) -> Any:  # noqa: ANN401
        own = mine()
        if own is None:
            with _state:
                return call(keys, *args, **named)

        index = _gpu(args, named)
        default, generator = _process_defaults()[index], own.cuda(index)
        with _state:
            before = default.graphsafe_get_state()
            default.graphsafe_set_state(generator.graphsafe_get_state())
            try:
                return call(keys, *args, **named)
            finally:
                default.graphsafe_set_state(before)

    return swapped


def _process_defaults() -> Sequence[torch.Generator]:
    found = torch.cuda.default_generators
    return found.outside if isinstance(found, _Defaults) else found


_cpu, _cuda = SharedPatch(_install_cpu), SharedPatch(_install_cuda)
