"""Complex tensors, which ``dist.*`` hands over as views of real numbers, are called complex in errors."""

import pytest
import torch
import torch.distributed as dist
from dtorch_samedevice_group.arguments import shown

from dtorch_core import spawn
from dtorch_core._shapes import describe

LIMIT = 60.0


def numbers(*sizes):
    return torch.zeros(*sizes, dtype=torch.complex64)


@pytest.mark.filterwarnings("ignore")  # torch 2.13 has other names for some calls
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: dist.all_to_all_single(numbers(4), numbers(4)),
            "the output is complex64[4]: 4 is no multiple of 3 ranks",
        ),
        (
            lambda: dist.all_gather_into_tensor(numbers(5), numbers(2)),
            "the output is complex64[5], and must hold 3 times complex64[2]",
        ),
        (
            lambda: dist.all_gather([numbers(2)] * 3, numbers(3)),
            "this rank's input is complex64[3], but complex64[2] among the ranks'",
        ),
    ],
)
def test_errors_name_what_the_program_has(call, words):
    def rank(ctx):
        with pytest.raises(ValueError) as caught:
            call()

        return words in str(caught.value) or str(caught.value)

    assert spawn(rank, 3, torch_distributed=True, timeout=LIMIT) == [True] * 3


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 2),
        torch.zeros(6).view(3, 2),
        numbers(3, 2).real,
        numbers(3, 2).imag,
        torch.view_as_real(numbers(3)).select(1, 0),
        torch.view_as_real(numbers(3)).sum(1).view(3),
        torch.view_as_real(numbers(())).select(0, 0),
    ],
)
def test_real_ones_are_called_real(tensor):
    assert shown(tensor) == describe(tensor)


@pytest.mark.parametrize("whole", [numbers(6), numbers(6, 2), numbers(())])
def test_pieces_of_them_are_complex_too(whole):
    view = torch.view_as_real(whole)
    assert shown(view) == describe(whole)
    if whole.dim():
        assert [shown(piece) for piece in view.split(2)] == [describe(piece) for piece in whole.split(2)]
