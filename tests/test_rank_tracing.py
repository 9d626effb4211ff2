"""torch traces for one thread at a time: ranks that are threads take turns, and the others go on meanwhile."""

import inspect
import textwrap
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.fx import _symbolic_trace

from dtorch_core import spawn

LIMIT = 120.0
WORLD_SIZE = 4

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of what it does itself


def run(fn, *args):
    return spawn(fn, WORLD_SIZE, args=args, torch_distributed=True, timeout=LIMIT)


@pytest.fixture(autouse=True)
def undone():
    import torch.export._trace

    def state():
        functions = torch.export._trace._export, _symbolic_trace.Tracer.trace, _symbolic_trace._Patcher.patch_method
        return [*functions, nn.Module.__call__, nn.Module.__getattr__]

    before = state()
    yield
    assert state() == before


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(WORLD_SIZE)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()

        return x


def places(program):
    """The module that each operation of an exported program is in."""
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    return [[path for path, _ in node.meta["nn_module_stack"].values()][-1] for node in nodes]


IN_LAYERS = [name for layer in range(WORLD_SIZE) for name in (f"layers.{layer}", "")]


def test_each_rank_exports_its_model():
    def rank(ctx):
        given = torch.ones(2 + ctx.rank, 8)
        dist.barrier()
        for _ in range(2):
            program = torch.export.export(Layers(), (given,))
            assert places(program) == IN_LAYERS
            program.run_decompositions()

        return program.module()(given).shape[0]

    assert run(rank) == [2, 3, 4, 5]


def test_each_rank_traces_its_model():
    def rank(ctx):
        model = Layers()
        dist.barrier()
        return {len(torch.fx.symbolic_trace(model).graph.nodes) for _ in range(20)}

    assert run(rank) == [{2 + 2 * WORLD_SIZE}] * WORLD_SIZE


def test_a_rank_that_traces_does_not_see_what_others_compute():
    traced, inside, computed = threading.Event(), threading.Event(), threading.Event()

    class Waits(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            inside.set()
            assert computed.wait(LIMIT / 4)
            return self.layer(x)

    def rank(ctx):
        if ctx.rank == 0:
            graph = torch.fx.symbolic_trace(Waits()).graph
            traced.set()
            return [node.op for node in graph.nodes]

        assert inside.wait(LIMIT)
        if ctx.rank == 1:
            values = nn.Linear(8, 8)(torch.ones(1, 8)).shape
            computed.set()
            return list(values), traced.wait(LIMIT)

    assert run(rank)[:2] == [["placeholder", "call_module", "output"], ([1, 8], True)]


def test_a_rank_that_fails_while_it_traces_holds_up_nobody():
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError("not today")

    def rank(ctx):
        dist.barrier()
        for _ in range(3):
            with pytest.raises(ValueError, match="not today"):
                torch.export.export(Fails(), (torch.ones(1),))

        return len(torch.fx.symbolic_trace(Layers()).graph.nodes)

    assert run(rank) == [2 + 2 * WORLD_SIZE] * WORLD_SIZE


def test_a_rank_compiles_while_others_trace():
    def rank(ctx):
        dist.barrier()
        for turn in range(3):
            if (ctx.rank + turn) % 2:
                torch.export.export(Layers(), (torch.ones(2, 8),))
            else:
                torch.compile(lambda x, by: x * 2 + by, backend="aot_eager")(torch.ones(ctx.rank + 1), turn)

        return True

    assert run(rank) == [True] * WORLD_SIZE


def test_a_script_of_a_traced_pipeline(tmp_path, capfd):
    from dtorch_core.cli import main

    script = tmp_path / "script.py"
    body = textwrap.dedent("""
        import torch
        import torch.distributed as dist
        from torch.distributed.pipelining import ScheduleGPipe, SplitPoint, pipeline

        dist.init_process_group("gloo")
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        x, model = torch.randn(8, 8), Layers()
        expected = model(x)
        split = {f"layers.{i}": SplitPoint.BEGINNING for i in range(1, size)}
        pipe = pipeline(model, mb_args=(x[:2],), split_spec=split)
        schedule = ScheduleGPipe(pipe.build_stage(rank, torch.device("cpu")), 4)
        out = schedule.step(x) if rank == 0 else schedule.step()
        if rank == size - 1:
            torch.testing.assert_close(out, expected)
            print("one by one")
    """)
    model = f"import torch\nfrom torch import nn\nWORLD_SIZE = {WORLD_SIZE}\n{inspect.getsource(Layers)}"
    script.write_text(model + body)
    assert main(["run", "--nproc", str(WORLD_SIZE), "--device", "cpu", str(script)]) == 0
    assert "[rank 3] one by one" in capfd.readouterr().out
