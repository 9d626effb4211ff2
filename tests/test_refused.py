"""What ranks that are threads can't share, they are told so."""

import pytest
from torch.distributed import autograd, rpc
from torch.distributed.checkpoint import _async_process_executor, async_save
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.rpc import init_rpc

from dtorch_core import UnsupportedOperationError, spawn

LIMIT = 60.0


def refused(fn):
    """What each of two ranks was told."""

    def rank(ctx):
        with pytest.raises(UnsupportedOperationError) as raised:
            fn(ctx)

        return str(raised.value)

    return spawn(rank, 2, torch_distributed=True, timeout=LIMIT)


@pytest.fixture(autouse=True)
def undone():
    def state():
        return rpc.init_rpc, autograd._init, _async_process_executor._ProcessBasedAsyncCheckpointExecutor.__init__

    before = state()
    yield
    assert state() == before


def test_rpc():
    told = refused(lambda ctx: rpc.init_rpc(f"worker{ctx.rank}", rank=ctx.rank, world_size=2))
    for rank, reason in enumerate(told):
        assert reason.startswith(f"torch.distributed.rpc.init_rpc: RPC has one agent in a process, and rank {rank} is")
        assert reason.endswith("dtorch run --ranks-as processes")


def test_rpc_by_a_name_from_before(tmp_path):
    def begin(ctx):
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/met")
        init_rpc(f"worker{ctx.rank}", rank=ctx.rank, world_size=2, rpc_backend_options=options)

    assert ["RPC has one agent" in reason for reason in refused(begin)] == [True] * 2


def test_a_process_that_saves(tmp_path):
    def save(ctx):
        async_save({}, checkpoint_id=tmp_path, async_checkpointer_type=AsyncCheckpointerType.PROCESS)

    assert ["Use AsyncCheckpointerType.THREAD, or ranks that are" in reason for reason in refused(save)] == [True] * 2


@pytest.mark.filterwarnings("ignore")
def test_one_rank_alone_may(tmp_path):
    def rank(ctx):
        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/alone")
        rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)
        result = rpc.rpc_sync("alone", int, args=("7",))
        rpc.shutdown()
        return result

    assert spawn(rank, 1, torch_distributed=True, timeout=LIMIT) == [7]
