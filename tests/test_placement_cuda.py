"""Scatter, gather and copy between the CPU and a GPU. DEVICE in the environment names the GPU."""

from __future__ import annotations

import os

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from dtorch_core import Layout, copy_tensor, gather_tensor, scatter_tensor, spawn

DEVICE = os.environ.get("DEVICE", "cuda:0")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not DEVICE.startswith("cuda"), reason="needs a GPU, named by DEVICE"
    ),
]


def coded(shape, dtype=torch.float32, device=None):
    """Every element tells where it is."""
    return torch.arange(torch.Size(shape).numel(), device=device).reshape(shape).to(dtype)


def gpu():
    """The GPU with its index."""
    device = torch.device(DEVICE)
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def spying(store, seen):
    """Note what the store is given to publish, except for the hellos."""
    plain = store.src_set

    def src_set(key, tensor, get_count, **kw):
        if tensor.dtype is not torch.uint8:
            seen.append((store.rank, tensor.device.type, get_count, kw.get("dest_device")))

        plain(key, tensor, get_count, **kw)

    store.src_set = src_set


class TestOneGpu:
    def test_scatter_and_gather(self):
        def run(ctx):
            store = ctx.open_store("gpu", timeout=30)
            full = coded((7, 5), device=DEVICE) if ctx.rank == 1 else None
            part = scatter_tensor(full, store, [0, 1, 2], [Shard(0)], src=1)
            assert part.device == gpu()
            assert torch.equal(part.cpu(), coded((7, 5)).chunk(3)[ctx.rank])
            return gather_tensor(part, store, [0, 1, 2], [Shard(0)], dst=2)

        whole = spawn(run, 3, devices=DEVICE, timeout=120)[2]
        assert whole.device == gpu()
        assert torch.equal(whole.cpu(), coded((7, 5)))

    @pytest.mark.parametrize("op", ["sum", "avg", "max", "product"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint16], ids=str)
    def test_partial_is_reduced_as_on_the_cpu(self, op, dtype):
        parts = [(coded((4, 3), torch.int64) % 5 + rank).to(dtype) for rank in range(3)]

        def run(ctx):
            store = ctx.open_store("partial", timeout=30)
            return gather_tensor(parts[ctx.rank].to(ctx.device), store, [2, 0, 1], [Partial(op)], dst=0)

        on_gpu = spawn(run, 3, devices=DEVICE, timeout=120)[0]
        on_cpu = spawn(run, 3, timeout=120)[0]
        assert on_gpu.is_cuda
        assert torch.equal(on_gpu.cpu().to(torch.float64), on_cpu.to(torch.float64))

    def test_neutral_elements_and_dtypes(self):
        dtypes = [torch.bool, torch.uint8, torch.uint16, torch.uint64, torch.int64, torch.float16, torch.complex64]

        def run(ctx):
            store = ctx.open_store("neutral", timeout=30)
            for dtype in dtypes:
                full = coded((3,), torch.int64).to(dtype)
                held = full.to(ctx.device) if ctx.rank == 0 else None
                part = scatter_tensor(held, store, [0, 1], [Partial("product")], src=0)
                assert part.tolist() == (full if ctx.rank == 0 else torch.ones(3, dtype=dtype)).tolist(), dtype

            fp8 = coded((4,)).to(torch.float8_e4m3fn)
            part = scatter_tensor(fp8.to(ctx.device) if ctx.rank == 0 else None, store, [0, 1], [Shard(0)], src=0)
            assert part.cpu().float().tolist() == [[0, 1], [2, 3]][ctx.rank]

        spawn(run, 2, devices=DEVICE, timeout=120)

    def test_source_may_be_written_once_the_call_returns(self):
        def run(ctx):
            store = ctx.open_store("reuse", timeout=30)
            full = torch.zeros(400, 300, device=DEVICE)
            for turn in range(5):
                if ctx.rank == 0:
                    torch.cuda._sleep(20_000_000)
                    full.copy_(coded((400, 300), device=DEVICE) + turn)
                else:
                    torch.cuda._sleep(40_000_000)  # reads late

                part = scatter_tensor(full if ctx.rank == 0 else None, store, [1, 2], [Shard(0)], src=0)
                if ctx.rank == 0:
                    full.fill_(-1)
                else:
                    assert torch.equal(part.cpu(), (coded((400, 300)) + turn).chunk(2)[ctx.rank - 1])

        spawn(run, 3, devices=DEVICE, timeout=120)


class TestAcrossDevices:
    def test_cpu_source_is_moved_once_for_all_its_gpu_readers(self):
        seen = []

        def run(ctx):
            store = ctx.open_store("once", timeout=30)
            spying(store, seen)
            full = coded((6, 2)) if ctx.rank == 0 else None
            part = scatter_tensor(full, store, [0, 1, 2], [Replicate()], src=0)
            assert part.device == torch.device(ctx.device)
            return part.cpu()

        for part in spawn(run, 3, devices=["cpu", DEVICE, DEVICE], timeout=120):
            assert torch.equal(part, coded((6, 2)))

        assert seen == [(0, "cpu", 2, str(gpu()))]

    def test_gpu_source_is_moved_once_for_all_its_cpu_readers(self):
        seen = []

        def run(ctx):
            store = ctx.open_store("back", timeout=30)
            spying(store, seen)
            held = coded((6, 2), device=DEVICE) if ctx.rank == 0 else None
            return copy_tensor(held, store, Layout([0], [Replicate()]), Layout([1, 2], [Replicate()], "cpu"))

        _, one, two = spawn(run, 3, devices=DEVICE, timeout=120)
        assert torch.equal(one, coded((6, 2)))
        assert torch.equal(two, coded((6, 2)))
        assert seen == [(0, "cuda", 2, "cpu")]

    @pytest.mark.parametrize("devices", ["cpu", DEVICE, ["cpu", DEVICE, "cpu", DEVICE]], ids=str)
    def test_cpu_to_gpu_to_cpu(self, devices):
        shards = Layout([[0, 1], [2, 3]], [Shard(0), Shard(1)], "cpu")
        on_gpu = Layout([3, 0, 1], [Shard(1)], DEVICE)
        partial = Layout([2, 1], [Partial()], DEVICE)

        def run(ctx):
            store = ctx.open_store("there and back", timeout=30)
            full = coded((5, 7))
            held = full.chunk(2)[ctx.rank // 2].chunk(2, 1)[ctx.rank % 2]
            there = copy_tensor(held, store, shards, on_gpu)
            assert (there is None) == (ctx.rank == 2)
            assert there is None or there.device == gpu()
            onward = copy_tensor(there, store, on_gpu, partial)
            assert onward is None or onward.device == gpu()
            back = copy_tensor(onward, store, partial, shards)
            assert back.device.type == "cpu"
            assert torch.equal(back, held)

        spawn(run, 4, devices=devices, timeout=120)

    def test_value_is_what_the_producers_stream_will_have_written(self):
        def run(ctx):
            store = ctx.open_store("late", timeout=30)
            held = None
            if ctx.rank == 0:
                held = torch.zeros(1000, device=DEVICE)
                torch.cuda._sleep(100_000_000)
                held.copy_(coded((1000,), device=DEVICE))

            return copy_tensor(held, store, Layout([0], [Replicate()]), Layout([0, 1], [Shard(0)], "cpu"))

        zero, one = spawn(run, 2, devices=DEVICE, timeout=120)
        assert torch.equal(torch.cat([zero, one]), coded((1000,)))
