"""What torch keeps in variables of a class: ranks that are threads have one each."""

import subprocess
import sys
import textwrap
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, wrap
from torch.distributed.fsdp._debug_utils import SimpleProfiler
from torch.distributed.tensor import Shard, distribute_tensor

from dtorch_core import spawn

LIMIT = 60.0
WORLD_SIZE = 4


def run(fn, *args):
    return spawn(fn, WORLD_SIZE, args=args, torch_distributed=True, rng="per-rank", timeout=LIMIT)


def state():
    """What is another while ranks run."""
    return [
        *(vars(SimpleProfiler)[name] for name in ("results", "profiling")),
        *(vars(SavePlanner)[name] for name in vars(SavePlanner) if name.startswith("_cached_")),
        wrap._ConfigAutoWrap,
    ]


@pytest.fixture(autouse=True)
def undone():
    before = state()
    yield
    assert all(now is value for now, value in zip(state(), before, strict=True))
    assert not any(before[:-1]) and not wrap._ConfigAutoWrap.in_autowrap_context


def trained():
    """A model of FSDP's first kind, and its optimizer after a step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 8) + dist.get_rank()).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.filterwarnings("ignore")
def test_fsdp_checkpoints():
    def rank(ctx):
        model, optimizer = trained()
        for kind in (StateDictType.SHARDED_STATE_DICT, StateDictType.FULL_STATE_DICT):
            with FullyShardedDataParallel.state_dict_type(model, kind):
                for _ in range(5):
                    model.load_state_dict(model.state_dict())
                    saved = FullyShardedDataParallel.optim_state_dict(model, optimizer)
                    loaded = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, saved)
                    optimizer.load_state_dict(loaded)

        weights, moments = get_state_dict(model, optimizer)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        return len(saved["state"]), len(weights), sorted(moments)

    assert run(rank) == [(4, 4, ["param_groups", "state"])] * WORLD_SIZE


def test_each_ranks_profiler_is_its_own():
    there = threading.Barrier(WORLD_SIZE, timeout=LIMIT)

    def rank(ctx):
        with SimpleProfiler.profile("all"):
            there.wait()
            SimpleProfiler.results[ctx.rank] += 1
            seen = set(SimpleProfiler.profiling), set(SimpleProfiler.results)
            there.wait()

        with pytest.raises(AssertionError, match="already"), SimpleProfiler.profile("one"):
            SimpleProfiler.profile("one").__enter__()

        SimpleProfiler.reset()
        there.wait()
        return seen

    assert run(rank) == [({"all"}, {rank}) for rank in range(WORLD_SIZE)]


def test_each_rank_is_in_its_own_wrapping_context():
    there = threading.Barrier(WORLD_SIZE, timeout=LIMIT)

    def rank(ctx):
        kept = nn.Linear(2, 2)
        with wrap.enable_wrap(wrapper_cls=lambda module, **named: (module, named), mine=ctx.rank):
            there.wait()
            wrapped = wrap.wrap(kept)
            with pytest.raises(NotImplementedError, match="already"), wrap.enable_wrap(wrapper_cls=nn.Sequential):
                pass  # torch's own rule

        there.wait()
        assert wrap.wrap(kept) is kept
        return wrapped == (kept, {"mine": ctx.rank})

    assert run(rank) == [True] * WORLD_SIZE


def test_each_rank_keeps_its_own_plans(tmp_path):
    def rank(ctx, folder):
        from torch.distributed import checkpoint

        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        seen = []
        for turn in range(4):
            whole = torch.arange(8.0 * WORLD_SIZE).view(-1, 4) + turn
            saved = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "b": torch.full((3,), float(turn))}
            if turn == 3:
                saved["late"] = torch.ones(2)  # another plan

            where = str(folder / str(turn))
            checkpoint.save(saved, checkpoint_id=where, planner=DefaultSavePlanner(enable_plan_caching=True))
            found = {"w": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)]), "b": torch.zeros(3)}
            checkpoint.load(found, checkpoint_id=where)
            seen.append(torch.equal(found["w"].full_tensor(), whole) and found["b"].tolist() == [turn] * 3)

        return seen, len(SavePlanner._cached_save_plan), len(SavePlanner._cached_all_plans)

    assert run(rank, tmp_path) == [([True] * 4, 1, int(rank == 0)) for rank in range(WORLD_SIZE)]


def test_what_no_rank_has_imported_is_not_there():
    body = """
        import sys, torch.distributed as dist
        from dtorch_core import spawn
        NAME = "torch.distributed.fsdp._debug_utils"

        def rank(ctx):
            before = NAME in sys.modules
            dist.barrier()
            from torch.distributed.fsdp._debug_utils import SimpleProfiler
            with SimpleProfiler.profile("all"):
                dist.barrier()
                SimpleProfiler.results[ctx.rank] += 1
                dist.barrier()
                return before, set(SimpleProfiler.results)

        for turn in range(2):
            results = spawn(rank, 2, torch_distributed=True, timeout=30)
            assert results == [(turn > 0, {0}), (turn > 0, {1})], results
            kept = vars(sys.modules[NAME].SimpleProfiler)
            assert type(kept["profiling"]) is set and not kept["profiling"] and not kept["results"], kept
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(body)], check=True, timeout=LIMIT)
