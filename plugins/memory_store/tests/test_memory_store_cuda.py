"""The memory store on CUDA: what is its own, beside the contract that the kit holds it to."""

import pytest
import torch

from dtorch_core import open_store
from dtorch_core.testing import run_ranks

LIMIT = 15.0

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def on_ranks(body, world_size, devices="cuda:0"):
    def rank(ctx):
        with ctx.open_store("own", backend="memory", timeout=LIMIT) as store:
            return body(store)

    return run_ranks(rank, world_size, 2 * LIMIT, devices=devices)


class TestSharing:
    def test_any_cuda_tensor_is_shared_not_copied(self):
        def body(store):
            tensor = torch.arange(24.0, device="cuda:0").reshape(4, 6)[1:, ::2]
            if store.rank == 0:
                store.src_set("k", tensor, 2)
                store.src_wait_until_get_finished("k")
                return tensor.data_ptr(), tensor.stride()

            got = store.dest_get("k")
            assert torch.equal(got, tensor)
            store.dest_finish_get("k")
            return got.data_ptr(), got.stride()

        producer, *consumers = on_ranks(body, 3)
        assert consumers == [producer] * 2

    def test_cpu_and_cuda_tensors_share_a_store(self):
        def body(store):
            for turn in range(4):
                device = ("cpu", "cuda:0")[turn % 2]
                if store.rank == 0:
                    with store.publish("k", torch.arange(5, device=device) + turn, 1):
                        pass
                else:
                    with store.borrow("k") as got:
                        assert str(got.device) == device
                        assert got.tolist() == [turn + n for n in range(5)]

        on_ranks(body, 2)
        on_ranks(body, 2, ["cpu", "cuda:0"])

    def test_published_copy_for_the_gpu_is_independent_of_its_source(self):
        def body(store):
            source = torch.arange(1 << 20, dtype=torch.float32)
            store.src_set("k", source, 1, dest_device="cuda:0")
            source.fill_(-1)  # staged already: the transfer may still run
            got = store.dest_get("k")
            assert torch.equal(got.cpu(), torch.arange(1 << 20, dtype=torch.float32))
            store.dest_finish_get("k")
            store.src_wait_until_get_finished("k")

        on_ranks(body, 1)

    def test_source_of_a_download_may_be_freed_at_once(self):
        """It was made on one stream, is copied on another, and its memory is asked for again on the first."""

        def body(store):
            made_on, copied_on = torch.cuda.Stream(), torch.cuda.Stream()
            with torch.cuda.stream(made_on):
                source = torch.arange(1 << 20, dtype=torch.float32, device="cuda:0")
                [torch.empty(1 << 20, device="cuda:0") for _ in range(2)]

            made_on.synchronize()
            with torch.cuda.stream(copied_on):
                torch.cuda._sleep(200_000_000)
                store.src_set("k", source, 1, dest_device="cpu")

            del source
            with torch.cuda.stream(made_on):
                trash = [torch.full((1 << 20,), -1.0, device="cuda:0") for _ in range(4)]

            got = store.dest_get("k")
            assert torch.equal(got, torch.arange(1 << 20, dtype=torch.float32))
            store.dest_finish_get("k")
            del trash

        on_ranks(body, 1)


class TestHost:
    @pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
    def test_no_step_synchronizes(self):
        """As far as torch can tell: a call that waits for the device raises."""

        def body(store):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                tensor = torch.arange(1000.0, device="cuda:0")
                for _ in range(3):
                    if store.rank == 0:
                        store.src_set("k", tensor, 1, writable=True)
                        store.src_wait_until_get_finished("k")
                        tensor.add_(1)
                    else:
                        store.dest_get("k").mul_(2)
                        store.dest_finish_get("k")

                store.barrier()
                return tensor

        torch.arange(1000.0, device="cuda:0").mul_(2).add_(1)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            tensor, _ = on_ranks(body, 2)
        finally:
            torch.cuda.set_sync_debug_mode("default")

        torch.cuda.synchronize()
        assert torch.equal(tensor.cpu(), torch.arange(1000.0) * 8 + 7)

    def test_wait_on_another_stream_orders_that_stream(self):
        with open_store("alone", rank=0, world_size=1, device="cuda:0") as store:
            tensor = torch.arange(1 << 20, dtype=torch.float32, device="cuda:0")
            reader, writer = torch.cuda.Stream(), torch.cuda.Stream()
            copy = torch.empty_like(tensor)
            torch.cuda.synchronize()
            store.src_set("k", tensor, 1)
            with torch.cuda.stream(reader):
                got = store.dest_get("k")
                torch.cuda._sleep(200_000_000)
                copy.copy_(got)
                store.dest_finish_get("k")

            store.src_wait_until_get_finished("k", stream=writer)
            with torch.cuda.stream(writer):
                tensor.fill_(-1)

            torch.cuda.synchronize()
            assert torch.equal(copy.cpu(), torch.arange(1 << 20, dtype=torch.float32))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one CUDA device only")
class TestTwoDevices:
    def test_tensor_stays_where_it_is(self):
        def body(store):
            if store.rank == 0:
                with store.publish("k", torch.arange(5, device="cuda:0"), 1):
                    pass
            else:
                with store.borrow("k") as got:
                    assert str(got.device) == "cuda:0"
                    assert got.tolist() == [0, 1, 2, 3, 4]

        on_ranks(body, 2, ["cuda:0", "cuda:1"])

    @pytest.mark.parametrize("target", ["cpu", "cuda:1", "cuda:0"])
    def test_copy_from_a_peer_is_ordered_after_its_work(self, target):
        def body(store):
            wanted = torch.arange(1 << 20, dtype=torch.float32)
            if store.rank == 0:
                with torch.cuda.stream(torch.cuda.Stream()):
                    tensor = torch.zeros(1 << 20, device="cuda:0")
                    torch.cuda._sleep(400_000_000)
                    tensor.copy_(torch.arange(1 << 20, device="cuda:0"))
                    store.src_set("k", tensor, 1)
                    store.src_wait_until_get_finished("k")
                    tensor.fill_(-1)
            else:
                copy = store.dest_get_to_device("k", target)
                assert str(copy.device) == target
                assert torch.equal(copy.cpu(), wanted)

        on_ranks(body, 2, ["cuda:0", "cuda:1"])
