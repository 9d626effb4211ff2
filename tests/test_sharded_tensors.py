"""torch's ShardedTensor on groups of this project: on the CPU, as with Gloo."""

import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtorch_core import spawn
from dtorch_core._groups import sharded_tensors
from dtorch_core._groups import torch_state as _torch_state

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import script_runs

run = script_runs.run

WORLD_SIZE = 3

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of what it has that is newer


def sharded_rows(ctx):
    """A tensor of two rows: the last rank has none."""
    from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

    row = torch.full((1, 3), ctx.rank + 1.0)
    shards = [Shard.from_tensor_and_offsets(row, [ctx.rank, 0], ctx.rank)] if ctx.rank < 2 else []
    rows = init_from_local_shards(shards, 2, 3)
    whole = torch.empty(2, 3) if ctx.rank == 1 else None
    rows.gather(1, whole)
    moved = rows.to(torch.float64)
    return len(rows.local_shards()), str(rows.device), moved.dtype, rows.to("cpu") is rows, whole


def test_rank_without_a_shard_is_on_the_cpu():
    """Under the names of this project."""
    results = spawn(sharded_rows, WORLD_SIZE, torch_distributed=True, timeout=60)
    for rank, (shards, *rest, whole) in enumerate(results):
        assert (shards, rest) == (int(rank < 2), ["cpu", torch.float64, True])
        assert (whole is not None) == (rank == 1)

    assert results[1][-1].tolist() == [[1.0] * 3, [2.0] * 3]


@pytest.mark.parametrize("ranks_as", ["threads", "processes"])
def test_sharded_state_of_fsdp1_with_an_empty_shard(run, ranks_as):
    """In a script that asks for Gloo."""
    body = """
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType

    dist.init_process_group("gloo")
    torch.manual_seed(5)
    inner = torch.nn.Linear(2, 1)
    values = {f"{name}": value.detach().clone() for name, value in inner.named_parameters()}
    model = FSDP(inner, use_orig_params=True, device_id=torch.device("cpu"))
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
        for name, value in sorted(state.items()):
            whole = torch.empty(value.size()) if rank == 0 else None
            value.gather(0, whole)
            print(name, value.device, rank or torch.equal(whole, values[name]))

        model.load_state_dict(state)

    dist.destroy_process_group()
    """
    status, out, err = run(body, "--ranks-as", ranks_as, nproc=WORLD_SIZE)
    assert status == 0, err
    said = [f"[rank {rank}] {name} cpu {rank or True}" for rank in range(WORLD_SIZE) for name in ("bias", "weight")]
    assert out == said


def test_torch_without_the_method_is_told(monkeypatch):
    monkeypatch.setattr(_torch_state, "missed", [])
    monkeypatch.setitem(sys.modules, sharded_tensors._HOME, types.ModuleType("other"))
    sharded_tensors._ask_the_group()
    assert "gather() fails for groups on the CPU" in _torch_state.missed[0]


def test_groups_of_torch_are_asked_as_before(monkeypatch):
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for given in (None, dist.group.WORLD):
            assert ShardedTensor._get_preferred_device(types.SimpleNamespace(_process_group=given)).type == "cpu"
    finally:
        dist.destroy_process_group()
