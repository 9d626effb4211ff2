"""The samedevice group on a GPU: values, devices and memory."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtorch_core import CollectiveMismatchError, UnsupportedTensorError

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    from samedevice_gpu_ranks import GPU, on_ranks, part

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


class TestValues:
    @pytest.mark.parametrize("world_size", [2, 4])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
    def test_large_reduction_is_bitwise_equal_on_every_rank(self, world_size, dtype):
        size = (1 << 24) + 3

        def body(pg, group):
            generator = torch.Generator(GPU).manual_seed(pg.rank())
            x = torch.randint(-1000, 1000, (size,), device=GPU, generator=generator).div(7).to(dtype)
            pg.allreduce([x]).wait()
            return x

        first, *others = on_ranks(body, world_size)
        wide = torch.float32 if dtype.is_floating_point else torch.int64
        wanted = torch.zeros(size, device=GPU, dtype=wide)
        for rank in range(world_size):
            generator = torch.Generator(GPU).manual_seed(rank)
            wanted += torch.randint(-1000, 1000, (size,), device=GPU, generator=generator).div(7).to(dtype)

        assert torch.equal(first, wanted.to(dtype))
        assert all(torch.equal(first.view(torch.uint8), other.view(torch.uint8)) for other in others)

    def test_cpu_tensors_travel_too(self):
        """As those of torch's object collectives do."""

        def body(pg, group):
            x = torch.arange(5.0) + pg.rank()
            pg.allreduce([x]).wait()
            assert torch.equal(x, 2 * torch.arange(5.0) + 1)
            assert torch.equal(group.all_gather(torch.arange(3) + pg.rank()), torch.tensor([0, 1, 2, 1, 2, 3]))
            out = [None, None]
            dist.all_gather_object(out, {"rank": pg.rank()}, group=pg)
            assert out == [{"rank": 0}, {"rank": 1}]

        on_ranks(body)

    def test_devices_that_differ_are_no_wrong_values(self):
        def body(pg, group):
            x = part(pg.rank(), 3) if pg.rank() else part(pg.rank(), 3).cpu()
            with pytest.raises(CollectiveMismatchError, match=r"rank 1: all_reduce\(float32\[3\], sum\) on cuda:0"):
                pg.allreduce([x]).wait()

            with pytest.raises(UnsupportedTensorError, match="cpu, cuda:0"):
                pg.allreduce([part(0, 3), part(0, 3).cpu()])

            pg.barrier().wait()

        on_ranks(body)

    def test_memory_of_the_work_is_let_go(self):
        def body(pg, group):
            for _ in range(5):
                x = part(pg.rank(), 1 << 20)
                pg.allreduce([x]).wait()

        on_ranks(body)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        on_ranks(body)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == before
