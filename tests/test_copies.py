"""Copies of what torch can copy, and of what it can't."""

import itertools

import pytest
import torch

from dtorch_core._copies import bare, cloned, copy_into, plain
from dtorch_core.reduction import HALF_COMPLEX

WITHOUT_KERNELS = [getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8)]

VIEWS = {
    "as it is": lambda tensor: tensor,
    "conjugate": lambda tensor: tensor.conj(),
    "negative": lambda tensor: torch._neg_view(tensor),
    "conjugate and negative": lambda tensor: torch._neg_view(tensor.conj()),
}

pytestmark = pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")


def as_written(tensor):
    """The numbers of a complex tensor, read without torch's bits."""
    memory, conjugate, negative = tensor, tensor.is_conj(), tensor.is_neg()
    memory = memory.conj() if conjugate else memory
    memory = torch._neg_view(memory) if negative else memory
    sign, other = (-1 if negative else 1), (-1 if conjugate else 1)
    return [complex(sign * real, sign * other * imaginary) for real, imaginary in torch.view_as_real(memory).tolist()]


@pytest.mark.parametrize("dtype", WITHOUT_KERNELS, ids=str)
def test_dtype_that_torch_cannot_copy(dtype):
    raw = torch.arange(12, dtype=torch.uint8).view(3, 4)
    source = raw.view(dtype).t()
    for copy in (copy_into(torch.empty(4, 3, dtype=dtype), source), cloned(source), plain(source)):
        assert copy.dtype == dtype
        assert copy.is_contiguous()
        assert copy.data_ptr() != source.data_ptr()
        assert torch.equal(copy.view(torch.uint8), raw.t())


@pytest.mark.parametrize("dtype", [*HALF_COMPLEX, torch.complex64], ids=str)
@pytest.mark.parametrize(("target", "source"), list(itertools.product(VIEWS, VIEWS)))
def test_complex_views(target, source, dtype):
    values = torch.complex(torch.arange(5.0), torch.arange(5.0) + 10).to(dtype)
    given, memory = VIEWS[source](values), VIEWS[target](torch.zeros(5, dtype=dtype))
    wanted = as_written(given)
    assert copy_into(memory, given) is memory
    assert as_written(memory) == wanted
    assert as_written(cloned(given)) == as_written(plain(given)) == wanted
    assert not plain(given).is_conj()
    assert not plain(given).is_neg()
    assert as_written(values) == [complex(number, number + 10) for number in range(5)]


def test_no_dtype_is_taken_for_another():
    with pytest.raises(NotImplementedError):
        copy_into(torch.empty(3, dtype=torch.int8), torch.empty(3, dtype=torch.uint4))


def test_what_is_plain_is_not_copied():
    tensor = torch.arange(5)
    assert plain(tensor) is tensor


@pytest.mark.parametrize("view", VIEWS)
def test_bare_memory(view):
    values = torch.complex(torch.arange(5.0), torch.arange(5.0) + 10)
    given = VIEWS[view](values)[1:4]
    memory = bare(given)
    assert (memory is given) == (view == "as it is")
    assert memory.data_ptr() == given.data_ptr()
    assert torch.equal(memory, values[1:4])
    assert not memory.is_conj()
    assert not memory.is_neg()


def test_bare_memory_of_the_imaginary_part():
    values = torch.complex(torch.arange(5.0), torch.arange(5.0) + 10)
    assert torch.equal(bare(values.conj().imag), values.imag)
