"""What tensors of subclasses are taken as."""

import pytest
import torch
from torch import Tensor

from dtorch_core.checks import check_tensor, plain_tensor
from dtorch_core.errors import UnsupportedTensorError
from dtorch_core.placement import redistribute
from dtorch_core.testing import run_ranks
from dtorch_core.testing._subclasses import Wrapper, loud


def test_subclass_is_the_same_memory_without_its_history():
    leaf = torch.ones(3, requires_grad=True)
    plain = plain_tensor(loud(leaf * 2))
    assert (type(plain), plain.requires_grad, plain.tolist()) == (Tensor, False, [2, 2, 2])
    values = torch.arange(3)
    assert plain_tensor(loud(values)).data_ptr() == values.data_ptr()


@pytest.mark.parametrize("x", [torch.ones(3), torch.nn.Parameter(torch.ones(3)), None, [1.0], "text", Tensor], ids=repr)
def test_all_else_stays(x):
    assert plain_tensor(x) is x


def test_what_holds_more_than_its_values_stays_and_is_refused():
    wrapper = Wrapper.around(torch.ones(3))
    assert plain_tensor(wrapper) is wrapper
    with pytest.raises(UnsupportedTensorError, match="Wrapper holds more than its values"):
        check_tensor("call", plain_tensor(wrapper))


def test_redistribution_takes_it_as_a_plain_tensor():
    placements = pytest.importorskip("torch.distributed.tensor.placement_types")

    def body(ctx):
        with ctx.open_group(timeout=20) as group:
            x = loud(torch.arange(3) + 3 * ctx.rank, ctx.rank)
            return redistribute(x, group, placements.Shard(0), placements.Replicate())

    for whole in run_ranks(body, 2, 40):
        assert type(whole) is Tensor
        assert whole.tolist() == list(range(6))
