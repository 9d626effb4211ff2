"""Tensors without values, fake ones and those on meta: c10d's calls of them end at once, with the right shapes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dtorch_core import UnsupportedTensorError, spawn

LIMIT = 60.0
SIZE = 2

pytestmark = pytest.mark.filterwarnings("ignore")  # torch 2.13 has other names for some calls


def run(body):
    """``body(rank)`` on every rank, which are then still together."""

    def rank(ctx):
        result = body(ctx.rank)
        x = torch.tensor([1.0 + ctx.rank])
        dist.all_reduce(x)
        assert x.item() == 3
        return result

    return spawn(rank, SIZE, torch_distributed=True, timeout=LIMIT)


def on_meta(*sizes):
    return torch.ones(*sizes, device="meta")


def fake(*sizes):
    with FakeTensorMode():
        return torch.ones(*sizes)


def parameter(*sizes):
    return nn.Parameter(on_meta(*sizes))


CALLS = {
    "all_reduce": lambda new: dist.all_reduce(new(4)),
    "all_reduce_coalesced": lambda new: dist.all_reduce_coalesced([new(4), new(2)]),
    "broadcast": lambda new: dist.broadcast(new(4), 0),
    "reduce": lambda new: dist.reduce(new(4), 0),
    "all_gather": lambda new: dist.all_gather([new(4), new(4)], new(4)),
    "all_gather_into_tensor": lambda new: dist.all_gather_into_tensor(new(8), new(4)),
    "gather": lambda new: dist.gather(new(4), [new(4), new(4)] if dist.get_rank() == 0 else None, 0),
    "scatter": lambda new: dist.scatter(new(4), [new(4), new(4)] if dist.get_rank() == 0 else None, 0),
    "reduce_scatter": lambda new: dist.reduce_scatter(new(4), [new(4), new(4)]),
    "reduce_scatter_tensor": lambda new: dist.reduce_scatter_tensor(new(4), new(8)),
    "all_to_all": lambda new: dist.all_to_all([new(4), new(4)], [new(4), new(4)]),
    "all_to_all_single": lambda new: dist.all_to_all_single(new(4), new(4)),
    "send": lambda new: dist.send(new(4), 1 - dist.get_rank()),
    "recv": lambda new: dist.recv(new(4), 1 - dist.get_rank()),
}


def one_mode(call):
    with FakeTensorMode():
        return call(torch.ones)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_ends_though_no_other_rank_makes_it(name):
    def body(rank):
        number = dist.group.WORLD._get_sequence_number_for_group()
        if rank == 0:
            CALLS[name](on_meta)
            one_mode(CALLS[name])

        assert dist.group.WORLD._get_sequence_number_for_group() == number

    run(body)


@pytest.mark.parametrize("new", [on_meta, fake, parameter])
def test_its_work_is_done(new):
    def body(rank):
        x, group = new(4).detach() if new is parameter else new(4), dist.group.WORLD
        work = dist.all_reduce(x, async_op=True)
        assert work.is_completed() and work.is_success() and work.wait()
        assert work.result()[0] is x
        assert work.get_future().wait()[0] is x
        whole = new(8)
        assert group.all_gather_single(whole, x).result()[-1].shape == (4,)
        with dist._coalescing_manager(async_ops=True) as together:
            dist.all_reduce(x)

        together.wait()

    run(body)


def test_what_does_not_fit_is_an_error_of_the_caller_alone():
    def body(rank):
        if rank == 0:
            with pytest.raises(ValueError, match=r"the output is float32\[7\], and must hold 2 times float32\[4\]"):
                dist.all_gather_into_tensor(on_meta(7), on_meta(4))

            with pytest.raises(ValueError, match="there is no rank 7"):
                dist.group.WORLD.send([on_meta(4)], 7)

    run(body)


@pytest.mark.parametrize(("new", "words"), [(on_meta, "a tensor on meta"), (fake, "a FakeTensor holds")])
def test_some_without_values_among_others_are_refused(new, words):
    def body(rank):
        for whole, part in ((torch.ones(8), new(4)), (new(8), torch.ones(4))):
            with pytest.raises(UnsupportedTensorError, match=words):
                dist.all_gather_into_tensor(whole, part)

        with pytest.raises(UnsupportedTensorError, match=words):
            dist.all_gather([torch.ones(4), new(4)], torch.ones(4))

    run(body)


@pytest.mark.parametrize("new", [on_meta, fake])
def test_groups_of_this_project_refuse_them_as_before(new):
    def rank(ctx):
        with ctx.open_group("own", backend="samedevice", timeout=LIMIT) as group:
            for call in (
                lambda: group.all_reduce(new(4)),
                lambda: group.send(new(4), 1 - ctx.rank),
                lambda: group.recv(1 - ctx.rank, out=new(4)),
            ):
                with pytest.raises(UnsupportedTensorError):
                    call()

    spawn(rank, SIZE, timeout=LIMIT)


def test_a_dry_run_of_fsdp_and_dtensor():
    def body(rank):
        mesh = init_device_mesh("cpu", (SIZE,))
        with FakeTensorMode():
            model = fully_shard(nn.Linear(8, 8), mesh=mesh)
            model(torch.ones(2, 8)).sum().backward()
            shard = distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)])
            whole = shard.redistribute(mesh, [Replicate()]).to_local()

        return model.weight.grad.to_local().shape, shard.to_local().shape, whole.shape

    assert run(body) == [((4, 8), (4, 4), (8, 4))] * SIZE
