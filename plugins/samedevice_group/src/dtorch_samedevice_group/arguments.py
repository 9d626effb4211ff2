"""What a c10d call is given: unpacked from its lists, cut into one piece for each rank, and checked.

What is wrong is raised before anything is posted, so that it can be told to the peers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dtorch_core import UnsupportedTensorError
from dtorch_core._shapes import describe
from dtorch_core.checks import check_tensor, plain_tensor

Cut = Callable[[Sequence[Tensor]], list[Tensor]]
"""Makes the tensors that a collective is about of those that its call was given. They are views."""


def listed(tensors: Sequence[Tensor] | Tensor) -> Sequence[Tensor]:
    """A tensor stands for a list of one, and there is one at least."""
    if isinstance(tensors, Tensor):
        return [tensors]

    if not tensors:
        raise ValueError("takes at least one tensor a rank")

    return tensors


def only(what: str, tensors: Sequence[Tensor] | Tensor) -> Tensor:
    """The only tensor of a list."""
    if isinstance(tensors, Tensor):
        return tensors

    if len(tensors) != 1:
        raise ValueError(f"takes one {what} a rank, not {len(tensors)}")

    return tensors[0]


def only_list(what: str, lists: Sequence[Any]) -> Sequence[Tensor]:
    """The only list in a list of lists, or the list itself."""
    if lists and isinstance(lists[0], Tensor):
        return lists

    if len(lists) != 1:
        raise ValueError(f"takes one list of {what} a rank, not {len(lists)}")

    tensors: Sequence[Tensor] = lists[0]
    return tensors


def one_each(what: str, tensors: Sequence[Tensor], size: int) -> Sequence[Tensor]:
    """One tensor for each of ``size`` ranks."""
    if len(tensors) != size:
        raise ValueError(f"needs {size} {what}, one for each rank, not {len(tensors)}")

    return tensors


def parts(what: str, whole: Tensor, part: Tensor, size: int) -> Sequence[Tensor]:
    """``whole`` as one piece for each of ``size`` ranks, each of ``part``'s shape."""
    if whole.dtype != part.dtype or whole.numel() != part.numel() * size:
        raise ValueError(f"the {what} is {shown(whole)}, and must hold {size} times {shown(part)}")

    shape, given, whole = tuple(part.shape), whole, _uncomputed(whole)
    if shape and shape[0] and tuple(whole.shape) == (size * shape[0], *shape[1:]):
        return list(whole.chunk(size))  # as split does, which takes a way through Python

    if tuple(whole.shape) == (size, *shape):
        return list(whole.unbind(0))

    if not whole.is_contiguous():
        raise ValueError(f"the {what} is {shown(given)}; to be cut into {shown(part)} it must be contiguous")

    return list(whole.view(size, *shape).unbind(0))


def output_in_parts(size: int) -> Cut:
    """Of an output and an input: the output for each rank, and the input."""
    return lambda given: [*parts("output", given[0], given[1], size), given[1]]


def input_in_parts(size: int) -> Cut:
    """Of an output and an input: the output, and the input for each rank."""
    return lambda given: [given[0], *parts("input", given[1], given[0], size)]


def input_alone(given: Sequence[Tensor]) -> list[Tensor]:
    """Of an output and an input: the input."""
    return [given[1]]


def both_in_pieces(output_sizes: Sequence[int], input_sizes: Sequence[int], size: int) -> Cut:
    """Of an output and an input: the output from each rank, and the input for each rank."""
    out, into = tuple(output_sizes), tuple(input_sizes)
    return lambda given: [*pieces("output", given[0], out, size), *pieces("input", given[1], into, size)]


def pieces(what: str, whole: Tensor, sizes: Sequence[int], size: int) -> Sequence[Tensor]:
    """``whole`` cut along its first dim for ``size`` ranks; in equal pieces where no sizes are given."""
    if whole.dim() == 0:
        raise ValueError(f"the {what} is {shown(whole)}, and must have a dim to be cut along")

    length = whole.shape[0]
    if not sizes:
        if length % size:
            raise ValueError(f"the {what} is {shown(whole)}: {length} is no multiple of {size} ranks")

        return list(_uncomputed(whole).split_with_sizes([length // size] * size))

    if len(sizes) != size or sum(sizes) != length or min(sizes) < 0:
        raise ValueError(f"the {what} is {shown(whole)}, and can't be split in {list(sizes)} for {size} ranks")

    return list(_uncomputed(whole).split_with_sizes(list(sizes)))


def _uncomputed(whole: Tensor) -> Tensor:
    """As :func:`plain`, before it is cut: pieces of a leaf would be computed, and the leaf not count as changed."""
    return plain(whole) if whole.requires_grad else whole


def shown(tensor: Tensor) -> str:
    """A tensor in an error: ``dist.*`` gives a complex one as a view of real numbers, and it is called what it was."""
    base = tensor._base if tensor._is_view() else None
    if base is None or not base.is_complex() or tensor.dtype != base.dtype.to_real():
        return describe(tensor)

    *strides, last = tensor.stride() or (0,)
    if tensor.shape[-1:] != (2,) or last != 1 or any(stride % 2 for stride in strides):  # the real part, say
        return describe(tensor)

    return f"{str(base.dtype)[6:]}{list(tensor.shape[:-1])}"  # without "torch."


def plain(tensor: Tensor) -> Tensor:
    """The same memory without its gradients.

    Of what an operator has computed, autograd does not hear that it is written, as with c10d's other backends: programs
    reduce in place what is saved for the backward pass. A leaf counts as changed, as after a step of an optimizer.
    """
    try:
        computed = tensor.grad_fn is not None
    except RuntimeError:  # a view made under no_grad, say, of what was computed since: autograd says no more of it
        computed = True

    return tensor.data if computed else tensor.detach()


def plainly(given: Any) -> Any:  # noqa: ANN401 - what c10d's methods take
    """The same arguments, with tensors of subclasses as the plain tensors that they are.

    As :func:`dtorch_core.checks.plain_tensor`, but that autograd hears as much of what is written as of other tensors.
    """
    if isinstance(given, dict):
        return {name: plainly(each) for name, each in given.items()}

    if type(given) in (list, tuple):
        return [plainly(each) for each in given]

    if plain_tensor(given) is given:
        return given

    with torch._C.DisableTorchFunctionSubclass():
        return plain(given)


def one_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    """The dtype of all of them."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) != 1:
        raise ValueError(f"the tensors must have one dtype, and are {', '.join(map(shown, tensors))}")

    return dtypes.pop()


def check_fits(what: str, tensor: Tensor, other: Tensor) -> None:
    """``tensor`` is of the shape that this rank's place among the ranks has."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        raise ValueError(f"this rank's {what} is {shown(tensor)}, but {shown(other)} among the ranks'")


def check_together(call: str, tensors: Sequence[Tensor]) -> None:
    """They can be exchanged, and are on one device.

    :raises UnsupportedTensorError: if not.
    """
    for tensor in tensors:
        check_tensor(call, tensor)

    if len(tensors) > 1 and len(devices := {tensor.device for tensor in tensors}) > 1:
        where = ", ".join(sorted(map(str, devices)))
        raise UnsupportedTensorError(f"{call}: its tensors are on {where}; they must be on one device")
