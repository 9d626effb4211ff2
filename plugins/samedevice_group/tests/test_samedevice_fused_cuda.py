"""Fused kernels on a GPU: bit by bit what torch's kernels give, on the ranks' streams, and used where they can be."""

import importlib.util
import math
import os
import subprocess
import sys

import pytest
import torch
from dtorch_samedevice_group import fused, fused_launch
from dtorch_samedevice_group.recipes import recipe

from dtorch_core import DtorchError
from dtorch_core.reduction import OPS, rule
from dtorch_core.testing import run_ranks

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get(fused_launch.VARIABLE) == "0", reason="fused kernels are turned off"),
]

GPU = "cuda:0"
LIMIT = 120.0
LONG = 100_000_000
"""Clock cycles: about 50 ms."""

SIZES = 1, 7, 1023, 1025, 20_000
FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
INTEGERS = torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64
DTYPES = *FLOATS, *INTEGERS, torch.bool, torch.complex64
SPECIAL = math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, 6e-8, 65504.0, 3.4e38


@pytest.fixture
def launches(monkeypatch):
    """The variants of all kernels that are launched."""
    seen = []
    launch, repeat = fused.launcher.launch, fused.launcher.repeat

    def noting(variant, *args):
        seen.append(variant)
        return launch(variant, *args)

    def again(known):
        seen.append("again")
        return repeat(known)

    monkeypatch.setattr(fused.launcher, "launch", noting)
    monkeypatch.setattr(fused.launcher, "repeat", again)
    return seen


def on_ranks(body, world_size):
    """``body(group)`` on every rank, with a stream of the rank's own as the current one; all tensors it returns."""

    def rank(ctx):
        with ctx.open_group("own", backend="samedevice", timeout=LIMIT) as group:
            with torch.cuda.stream(torch.cuda.Stream()):
                result = body(group)
                torch.cuda.current_stream().synchronize()
                return result

    return [tensor for tensors in run_ranks(rank, world_size, 2 * LIMIT, devices=GPU) for tensor in tensors]


def check(body, world_size, launches, monkeypatch, strict=True):
    """Both ways give the same bits. Returns how many kernels were launched."""
    launches.clear()
    ours = on_ranks(body, world_size)
    count = len(launches)
    assert fused.launcher.usable, "a launch failed"
    with monkeypatch.context() as patch:
        patch.setattr(fused.launcher, "usable", False)
        theirs = on_ranks(body, world_size)

    assert len(launches) == count, "turned off, and used"
    for number, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        assert same(x, y, strict), f"result {number}: {x} is not {y}"

    return count


def same(a, b, strict):
    """Bit by bit; where not strict, a NaN is as good as another one."""
    a, b = a.resolve_conj().contiguous(), b.resolve_conj().contiguous()
    if not strict and a.dtype.is_floating_point:
        nan = a.isnan()
        if not torch.equal(nan, b.isnan()):
            return False

        a, b = a.masked_fill(nan, 0), b.masked_fill(nan, 0)

    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def values(dtype, size, rank, offset=0):
    """Other ones for each rank, of all magnitudes; ``offset`` elements behind an aligned address."""
    generator = torch.Generator().manual_seed(1000 * size + rank)
    if dtype is torch.bool:
        x = torch.randint(0, 2, (size,), generator=generator).bool()
    elif dtype.is_complex:
        x = torch.randn(2 * size, generator=generator).view(torch.complex64)
    elif dtype.is_floating_point:
        x = torch.randn(size, generator=generator, dtype=torch.float64).mul(100)
        for number, place in enumerate(range(0, size, 3)):
            if (number + rank) % 4 == 0:
                x[place] = SPECIAL[(number // 4 + rank * number) % len(SPECIAL)]
    else:
        x = torch.randint(-(2**62), 2**62, (size,), generator=generator)

    room = torch.empty(size + offset, dtype=dtype, device=GPU)
    return room[offset:].copy_(x.to(dtype))


def ops_of(dtype):
    for op in OPS:
        try:
            rule(op, dtype)
        except DtorchError:
            continue

        if op != "premul_sum":
            yield op


class TestReductions:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_op(self, dtype, launches, monkeypatch):
        for op in ops_of(dtype):

            def body(group, op=op):
                return [group.all_reduce(values(dtype, size, group.rank), op) for size in SIZES]

            count = check(body, 3, launches, monkeypatch, strict=op in ("min", "max"))
            known = recipe(rule(op, dtype), None) is not None
            assert count == (len(SIZES) if known else 0), op

    @pytest.mark.parametrize("world_size", [2, 4, 8, 16])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_every_kind_of_reduction(self, world_size, dtype, launches, monkeypatch):
        def body(group):
            results = []
            for size, offset in ((1025, 0), (1023, 1)):
                x = values(dtype, size, group.rank, offset * (group.rank % 2))
                group.all_reduce(x, "avg", out=x)
                reduced = group.reduce(values(dtype, size, group.rank), 1, "sum")
                whole = values(dtype, size * group.world_size, group.rank)
                results += [x, group.reduce_scatter(whole, op="avg"), whole]
                results += [] if reduced is None else [reduced]

            return results

        assert check(body, world_size, launches, monkeypatch, strict=False) == 6

    def test_more_ranks_than_a_kernel_takes(self, launches, monkeypatch):
        def body(group):
            return [group.all_reduce(values(torch.float32, 99, group.rank))]

        assert check(body, 17, launches, monkeypatch, strict=False) == 0

    def test_in_place_and_in_lists(self, launches, monkeypatch):
        def body(group):
            pg, rank, size = group.process_group, group.rank, group.world_size
            whole = list(values(torch.float32, 1000 * size, rank).chunk(size))
            pg.reduce_scatter([whole[rank]], [whole]).wait()
            apart = [values(torch.float32, 1000, 10 * rank + other) for other in range(size)]
            out = torch.zeros(1000, device=GPU)
            pg.reduce_scatter([out], [apart]).wait()
            return [*whole, out, *apart]

        assert check(body, 4, launches, monkeypatch, strict=False) == 5, "one, and one for each tensor of the lists"

    def test_strided_tensors_are_left_to_torch(self, launches, monkeypatch):
        def body(group):
            x = values(torch.float32, 2000, group.rank)
            y = x[::2]
            group.process_group.allreduce([y]).wait()
            return [x]

        assert check(body, 3, launches, monkeypatch, strict=False) == 0


class TestCopies:
    @pytest.mark.parametrize("world_size", [2, 3, 4, 16])
    @pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.complex64])
    def test_every_collective(self, world_size, dtype, launches, monkeypatch):
        def body(group):
            rank, results = group.rank, []
            for size, offset in ((1024, 0), (1023, 0), (7, 1)):
                x = values(dtype, size, rank, offset)
                whole = values(dtype, size * group.world_size, rank, offset)
                sent = torch.empty_like(whole)
                group.process_group.alltoall_base(sent, whole, [], []).wait()
                results += [group.all_gather(x), sent, group.broadcast(x, 1), x, whole]
                results += group.all_gather_list(x)
                results += group.gather(x, 1) or []
                results.append(group.scatter(list(whole.chunk(group.world_size)) if rank == 1 else None, 1))

            return results

        assert check(body, world_size, launches, monkeypatch) >= 6

    def test_of_other_sizes(self, launches, monkeypatch):
        """Each source of an uneven all_gather is read once; an uneven all_to_all is left to torch."""

        def body(group):
            rank, size = group.rank, group.world_size
            gathered = group.all_gather_list(values(torch.bfloat16, 1000 * (1 + rank), rank))
            sent = [values(torch.uint16, 10 * (1 + rank + other), rank) for other in range(size)]
            return [*gathered, *group.all_to_all_list(sent)]

        assert check(body, 4, launches, monkeypatch) == 4

    def test_in_place(self, launches, monkeypatch):
        def body(group):
            pg, rank, size = group.process_group, group.rank, group.world_size
            whole = values(torch.float32, 1000 * size, rank)
            pg._allgather_base(whole, whole.chunk(size)[rank]).wait()
            return [whole]

        assert check(body, 4, launches, monkeypatch) == 1

    def test_conjugates_are_resolved(self, launches, monkeypatch):
        def body(group):
            return [group.all_gather(values(torch.complex64, 100, group.rank).conj())]

        check(body, 3, launches, monkeypatch)


class TestLaunches:
    def test_large_tensors(self, launches, monkeypatch):
        """Of more than 2^31 bytes in all: offsets are 64 bits wide."""
        size = 300 * 2**20 + 3

        def body(group):
            x = torch.arange(size, device=GPU, dtype=torch.int32).mul_(group.rank + 1)
            whole = torch.empty(2 * size, device=GPU, dtype=torch.int32)
            group.process_group._allgather_base(whole, x).wait()
            group.process_group.allreduce([x]).wait()
            ends = [whole[size - 5 : size + 5].clone(), whole[-5:].clone(), x[-5:].clone()]
            return [*ends, whole.sum()[None], x.sum()[None]]

        assert check(body, 2, launches, monkeypatch) == 2

    def test_the_same_buffers_again_and_again(self, launches):
        """One launch is decided on; what the values are is another matter."""

        def body(group):
            pg, rank, size = group.process_group, group.rank, group.world_size
            x, whole, out = (torch.empty(count, device=GPU) for count in (999, 999 * size, 999))
            results = []
            for turn in range(6):
                x.fill_(rank + turn)
                pg.allreduce([x]).wait()
                results.append(x.clone())
                pg._allgather_base(whole, x + rank if turn % 2 else x.add_(rank)).wait()
                pg._reduce_scatter_base(out, whole).wait()
                results += [whole.clone(), out.clone()]

            return results

        results = iter(on_ranks(body, 3))
        for _ in range(3):
            for turn in range(6):
                total = 3.0 + 3 * turn
                assert torch.equal(next(results), torch.full((999,), total, device=GPU))
                parts = [torch.full((999,), total + rank, device=GPU) for rank in range(3)]
                assert torch.equal(next(results), torch.cat(parts))
                assert next(results).unique().numel() == 1

        assert len(launches) == 18 and launches.count("again") >= 3

    def test_behind_slow_kernels_of_each_ranks_stream(self, launches):
        def body(group):
            results = []
            for turn in range(4):
                x = torch.zeros(5000, device=GPU)
                if turn % 3 == group.rank:
                    torch.cuda._sleep(LONG)

                x.fill_(group.rank + turn)
                group.process_group.allreduce([x]).wait()
                results.append(x.clone())
                x.fill_(-1)

            return results

        results = on_ranks(body, 3)
        assert len(launches) == 4
        for number, x in enumerate(results):
            assert torch.equal(x, torch.full_like(x, 3 + 3 * (number % 4)))

    def test_versions_tell_autograd_what_was_written(self, launches):
        def body(group):
            x = values(torch.float32, 100, group.rank)
            before = x._version
            group.process_group.allreduce([x]).wait()
            assert x._version > before
            return []

        on_ranks(body, 2)
        assert len(launches) == 1

    def test_failure_is_said_and_torch_does_the_work(self, launches, monkeypatch):
        class Failing:
            def warmup(self, *args, **options):
                raise RuntimeError("Failed to find C compiler")

        def body(group):
            results = []
            for _ in range(2):
                x = torch.full((100,), group.rank + 1.0, device=GPU)
                group.process_group.allreduce([x]).wait()
                results.append(x)

            return results

        monkeypatch.setattr(fused.launcher, "usable", True)  # set back at the end
        monkeypatch.setattr(fused.launcher, "_compiled", {})
        monkeypatch.setattr(fused_launch.Launcher, "_slow", lambda self, variant: fused_launch._Slow(Failing()))
        with pytest.warns(RuntimeWarning, match="C compiler") as told:
            results = on_ranks(body, 2)

        assert len([w for w in told if "C compiler" in str(w.message)]) == 1
        assert len(launches) == 1 and not fused.launcher.usable
        assert all(torch.equal(x, torch.full_like(x, 3.0)) for x in results)

    def test_processes_use_them_too(self, tmp_path):
        program = tmp_path / "program.py"
        program.write_text(
            f"""
import torch
from dtorch_core import spawn
from dtorch_samedevice_group import fused


def rank(ctx):
    launch, count = fused.launcher.launch, []
    fused.launcher.launch = lambda *args: count.append(1) or launch(*args)
    with ctx.open_group(timeout={LIMIT}) as group:
        x = torch.full((1000,), group.rank + 1.0, device="{GPU}")
        got = group.all_gather(group.all_reduce(x))
        torch.cuda.synchronize()
        return len(count), got.tolist() == [3.0] * 2000


if __name__ == "__main__":
    (first, right), (second, also) = spawn(rank, 2, ranks_as="processes", devices="{GPU}", timeout={LIMIT})
    print(first + second, right and also)
"""
        )
        done = subprocess.run(
            [sys.executable, "-P", str(program)], capture_output=True, text=True, timeout=2 * LIMIT, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["2", "True"]
