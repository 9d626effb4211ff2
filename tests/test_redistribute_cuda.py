"""Redistribution between ranks that share a GPU. DEVICE in the environment names it."""

from __future__ import annotations

import os

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from dtorch_core import redistribute, redistribute_mesh, spawn
from dtorch_core.reduction import rule

DEVICE = os.environ.get("DEVICE", "cuda:0")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not DEVICE.startswith("cuda"), reason="needs a GPU, named by DEVICE"
    ),
]
CYCLES = 100_000_000
"""Of a GPU: some 50 ms, far more than it takes a rank to call anything."""
MESH = [[0, 1], [2, 3]]


def coded(shape, dtype=torch.float32, device="cpu"):
    """Every element tells where it is."""
    return torch.arange(torch.Size(shape).numel(), device=device).reshape(shape).to(dtype)


def pieces(full, placement, parts):
    """What each rank holds of ``full``; of a Partial(sum) it is the sum of equal parts."""
    if placement.is_shard():
        found = list(full.chunk(parts, placement.dim))
        return found + [full.narrow(placement.dim, 0, 0)] * (parts - len(found))

    return [full] * parts if placement.is_replicate() else [full - part for part in range(parts)]


class TestMatrix:
    @pytest.mark.parametrize("world_size", [2, 3])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint16], ids=str)
    def test_cells_are_as_on_the_cpu(self, world_size, dtype):
        kinds = [Replicate(), Shard(0), Shard(1), Partial(), Partial("max"), Partial("avg")]
        cases = [(shape, src, dst) for shape in [(6, 5), (1, 4), (3, 0)] for src in kinds for dst in kinds]

        def run(ctx):
            group = ctx.open_group(timeout=30)
            results = []
            for shape, src, dst in cases:
                x = pieces(coded(shape, torch.int64) + 5, src, world_size)[ctx.rank].to(ctx.device, dtype)
                results.append(redistribute(x, group, src, dst))
                assert results[-1].device == x.device

            return [result.cpu().to(torch.float64) for result in results]

        on_gpu, on_cpu = spawn(run, world_size, devices=DEVICE, timeout=120), spawn(run, world_size, timeout=120)
        for rank in range(world_size):
            for found, wanted, case in zip(on_gpu[rank], on_cpu[rank], cases, strict=True):
                assert torch.equal(found, wanted), (rank, case)

    def test_mesh(self):
        layouts = [(Shard(0), Shard(0)), (Shard(1), Replicate()), (Partial(), Shard(1)), (Replicate(), Partial())]

        def run(ctx):
            manager = ctx.open_manager(timeout=30)
            results = []
            for src in layouts:
                for dst in layouts:
                    x = coded((4, 6), torch.int32, ctx.device) + ctx.rank * (not src[0].is_replicate())
                    results.append(redistribute_mesh(x, manager, MESH, src, dst).cpu())

            return results

        for found, wanted in zip(spawn(run, 4, devices=DEVICE, timeout=120), spawn(run, 4, timeout=120), strict=True):
            assert all(map(torch.equal, found, wanted))


class TestStreams:
    @pytest.mark.parametrize("slow", [0, 1, 2])
    @pytest.mark.parametrize(
        ("src", "dst"),
        [
            (Shard(0), Replicate()),
            (Shard(0), Shard(1)),
            (Partial(), Replicate()),
            (Partial(), Shard(1)),
            (Partial(), Partial("max")),
        ],
        ids=str,
    )
    def test_result_waits_for_slow_kernels_and_input_can_be_rewritten(self, src, dst, slow):
        full = coded((6, 9), torch.int64) + 1

        def run(ctx):
            group = ctx.open_group(timeout=30)
            mine = pieces(full, src, 3)[ctx.rank].to(ctx.device)
            stream = torch.cuda.Stream(ctx.device)
            stream.wait_stream(torch.cuda.current_stream(ctx.device))
            with torch.cuda.stream(stream):
                x = torch.full_like(mine, -1)
                if ctx.rank == slow:
                    torch.cuda._sleep(CYCLES)

                x.copy_(mine)
                result = redistribute(x, group, src, dst)
                x.fill_(-2)  # the peers may still be reading, if they are slow
                return result.cpu()

        results = spawn(run, 3, devices=DEVICE, timeout=120)
        total = full if not src.is_partial() else 3 * full - 3
        if dst.is_partial():
            out = torch.empty_like(total)
            rule("max", out.dtype).into(out, results)
            assert torch.equal(out, total)
        else:
            assert all(map(torch.equal, results, pieces(total, dst, 3)))

    def test_host_does_not_wait(self):
        src, dst = [Partial(), Shard(0)], [Replicate(), Replicate()]

        def run(ctx):
            manager = ctx.open_manager(timeout=30)
            stream = torch.cuda.Stream(ctx.device)
            with torch.cuda.stream(stream):
                x = coded((8,), torch.float32, ctx.device)
                # Loading kernels and allocating memory can wait for the device: do it now.
                spare = [torch.empty(8, device=ctx.device) for _ in range(16)]
                for _ in range(2):
                    redistribute_mesh(x, manager, MESH, src, dst)

                del spare
                torch.cuda._sleep(1)
                stream.synchronize()
                manager.get(range(4)).barrier()
                torch.cuda._sleep(5 * CYCLES)
                result = redistribute_mesh(x, manager, MESH, src, dst)
                done = torch.cuda.Event()
                done.record()
                queued = not done.query()
                manager.get(range(4)).barrier()  # a copy to the CPU holds up what other threads launch
                stream.synchronize()
                return queued, result.cpu()

        for queued, result in spawn(run, 4, devices=DEVICE, timeout=120):
            assert queued, "the host waited"
            assert torch.equal(result, coded((8,)).repeat(2) * 2)
