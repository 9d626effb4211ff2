"""Partial: the sum (or product, minimum ...) of the contributions is the value."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dtorch_core.errors import UnsupportedTensorError
from dtorch_core.placement._placements import Specs, partial_op
from dtorch_core.reduction import neutral, rule


def check_partial(specs: Specs, dtype: torch.dtype, what: str) -> None:
    """Refuse a Partial that could never be reduced.

    :param what: begins the message.
    :raises UnsupportedTensorError: if its op has no meaning on ``dtype``.
    """
    op = partial_op(specs)
    if op is not None:
        try:
            rule(op, dtype)
        except UnsupportedTensorError as error:
            raise UnsupportedTensorError(f"{what}: Partial({op}): {error}") from None


def reduce_into(out: Tensor, parts: Sequence[Tensor], op: str) -> None:
    """Write the reduction of ``parts``, in their order, to ``out``. They may be on other devices."""
    here = [part.to(out.device) for part in parts]
    rule(op, out.dtype).into(out, [part.resolve_conj().resolve_neg() for part in here])


def fill_neutral(out: Tensor, op: str) -> None:
    """Make ``out`` a contribution that changes nothing."""
    out.fill_(neutral(op, out.dtype))
