"""Memory that processes share: blocks that never overlap and all come back, nothing left behind."""

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from dtorch_file_store.arena import Arena
from dtorch_file_store.headroom import BUDGET

from dtorch_core import AbortedError
from dtorch_core.testing._group_base import all_dtypes, of_dtype

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    pytest.register_assert_rewrite("file_arena_parts")
    import file_arena_parts as parts
    from file_arena_parts import LIMIT, MIB, numbered, peer_of, run_threads, traces

arena, made = parts.arena, parts.made  # fixtures


class TestBlock:
    def test_bytes_are_the_segments(self, arena, made):
        blocks = [arena.allocate(1000) for _ in range(5)]
        for number, block in enumerate(blocks):
            block.bytes().copy_(numbered(1000, number))

        peer = peer_of(made[0])
        for number, block in enumerate(blocks):
            assert block.segment == made[0].number and block.nbytes == 1000 and block.offset % 64 == 0
            assert peer.bytes(block.offset, 1000).tolist() == numbered(1000, number).tolist()

    def test_storage_spans_the_block_alone(self, arena):
        arena.allocate(64)
        block = arena.allocate(100)
        assert block.bytes().untyped_storage().nbytes() == 100
        assert block.bytes().data_ptr() % 64 == 0

    def test_released_block_is_used_again(self, arena):
        first = arena.allocate(5000)
        place = first.segment, first.offset
        first.release()
        second = arena.allocate(5000)
        assert (second.segment, second.offset) == place

    def test_retained_block_is_not_used_again_before_its_last_release(self, arena):
        block = arena.allocate(5000)
        block.retain()
        block.release()
        other = arena.allocate(5000)
        assert other.offset != block.offset
        block.release()
        assert arena.allocate(5000).offset == block.offset

    def test_no_byte_is_refused(self, arena):
        with pytest.raises(ValueError, match="at least 1 byte"):
            arena.allocate(0)


class TestEmpty:
    @pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
    def test_every_dtype(self, arena, dtype):
        tensor = arena.empty((2, 3), dtype)
        assert tensor.dtype == dtype and tensor.shape == (2, 3) and tensor.is_contiguous()
        tensor.view(torch.uint8).view(-1).copy_(of_dtype(3, dtype, "cpu").view(torch.uint8))
        block, offset = arena.locate(tensor)
        assert offset == 0 and block.bytes().tolist() == of_dtype(3, dtype, "cpu").view(torch.uint8).tolist()

    @pytest.mark.parametrize("size", [(), (1,), (3, 4, 5), torch.Size([2, 7]), [4, 4]])
    def test_every_size(self, arena, size):
        tensor = arena.empty(size, torch.int64)
        assert tensor.shape == torch.Size(size)
        assert tensor.untyped_storage().nbytes() == tensor.numel() * 8

    def test_no_element_needs_no_block(self, arena, made):
        assert arena.empty((3, 0, 2), torch.float32).shape == (3, 0, 2)
        assert made == []

    def test_negative_size_is_refused_as_torch_does(self, arena):
        with pytest.raises(RuntimeError, match="negative"):
            arena.empty((-1,), torch.float32)

        with pytest.raises(RuntimeError, match="invalid shape"):
            arena.empty((-1, -4), torch.float32)

    def test_block_lives_as_long_as_the_storage(self, arena, made):
        tensor = arena.empty((1000,), torch.float32)
        block, _ = arena.locate(tensor)
        view = tensor[500:].copy_(torch.arange(500.0))
        del tensor
        assert arena.allocate(4000).offset != block.offset
        assert view.tolist() == list(range(500))
        del view
        assert arena.allocate(4000).offset == block.offset

    def test_block_that_the_store_holds_outlives_the_tensor(self, arena):
        tensor = arena.empty((10,), torch.int64).copy_(torch.arange(10))
        block, _ = arena.locate(tensor)
        block.retain()
        del tensor
        other = arena.empty((10,), torch.int64).zero_()
        assert block.bytes().view(torch.int64).tolist() == list(range(10))
        block.release()
        assert arena.empty((10,), torch.int64).data_ptr() == block.bytes().data_ptr() != other.data_ptr()


class TestLocate:
    def test_view_is_found_with_the_place_of_its_first_element(self, arena):
        arena.empty((5,), torch.float32)
        base = arena.empty((10, 10), torch.int32)
        for view in (base, base[3:], base[2:, 4::2].t(), base[9, 9], base.view(torch.uint8), base.detach()):
            block, offset = arena.locate(view)
            assert block.bytes().data_ptr() + offset == view.data_ptr()
            assert block.nbytes == 400

    def test_what_lies_elsewhere_is_not_found(self, arena, made):
        base = arena.empty((10, 10), torch.int32)
        assert arena.locate(torch.empty(10)) is None
        assert arena.locate(torch.empty(0)) is None
        assert arena.locate(base[:0]) is None
        assert arena.locate(peer_of(made[0]).bytes(0, 400)) is None
        assert arena.locate(torch.empty(4, device="meta")) is None

    def test_tensor_over_a_block_released_since_is_not_found_in_a_smaller_one(self, arena):
        block = arena.allocate(100)
        stale = block.bytes()
        block.release()
        assert arena.locate(stale) is None
        arena.allocate(70)
        assert arena.locate(stale) is None


class TestGrowth:
    def test_segment_is_announced_before_its_blocks_are_handed_out(self):
        seen = []

        def on_segment(segment):
            seen.append((segment.number, [s.number for s in arena.segments], threading.current_thread()))

        arena = Arena("store 's'", on_segment)
        block = arena.allocate(10)
        assert seen == [(block.segment, [block.segment], threading.current_thread())]
        arena.close()

    def test_segments_are_few(self, arena, made):
        blocks = [arena.allocate(MIB) for _ in range(100)]
        assert len(made) <= 7
        assert len({(b.segment, b.offset) for b in blocks}) == 100
        assert [s.number for s in arena.segments] == [s.number for s in made]

    def test_large_block_has_a_segment_of_its_size(self, arena, made):
        block = arena.allocate(100 * MIB + 1)
        assert block.nbytes == 100 * MIB + 1
        assert made[0].size < 101 * MIB

    def test_segment_that_could_not_be_announced_is_dropped(self):
        def on_segment(segment):
            raise OSError("the peer's queue is full")

        before, held = traces(), BUDGET.held
        arena = Arena("store 's'", on_segment)
        for _ in range(3):
            with pytest.raises(OSError, match="queue is full"):
                arena.allocate(10)

        assert arena.segments == []
        assert (traces(), BUDGET.held) == (before, held)
        arena.close()

    def test_threads_that_need_room_at_once_make_one_segment(self, arena, made):
        ready = threading.Barrier(8)
        blocks = []

        def work():
            ready.wait(LIMIT)
            blocks.append(arena.allocate(1000))

        run_threads([work] * 8)
        assert len(made) == 1
        assert len({block.offset for block in blocks}) == 8


class TestTrim:
    def test_pages_of_an_idle_segment_go_back_and_return(self, arena, made):
        held = BUDGET.held
        arena.allocate(8 * MIB).release()
        arena.trim()
        assert os.fstat(made[0].fd).st_blocks == 0
        assert BUDGET.held == held
        peer = peer_of(made[0])
        again = arena.allocate(8 * MIB)
        assert len(made) == 1 and os.fstat(made[0].fd).st_blocks * 512 == made[0].size
        again.bytes().copy_(numbered(8 * MIB))
        assert torch.equal(peer.bytes(again.offset, 8 * MIB), numbered(8 * MIB))

    def test_segment_in_use_is_left_alone(self, arena, made):
        kept = arena.allocate(1000)
        kept.bytes().copy_(numbered(1000))
        arena.allocate(3 * MIB).release()
        arena.trim()
        assert kept.bytes().tolist() == numbered(1000).tolist()
        assert arena.allocate(3 * MIB).segment == kept.segment


class TestClose:
    def test_nothing_is_left(self):
        before, held = traces(), BUDGET.held
        arena = Arena("store 's'", lambda segment: None)
        tensor = arena.empty((10,), torch.float32)
        block = arena.allocate(30 * MIB)
        peer = peer_of(arena.segments[0])
        assert traces() == (before[0] + 2, before[1] + 3)  # a descriptor for each segment, none for a mapping
        block.release()
        arena.close()
        peer.close()
        del tensor, block, peer
        assert (traces(), BUDGET.held) == (before, held)

    def test_tensors_keep_their_memory(self):
        before = traces()
        arena = Arena("store 's'", lambda segment: None)
        tensor = arena.empty((1000,), torch.int64).copy_(torch.arange(1000))
        peer = peer_of(arena.segments[0])
        seen = peer.bytes(0, 8000).view(torch.int64)
        arena.close()
        peer.close()
        del arena, peer
        gc.collect()
        tensor += 1
        assert seen.tolist() == list(range(1, 1001))
        del tensor, seen
        assert traces() == before

    def test_closed_arena_says_so(self, arena):
        block = arena.allocate(10)
        arena.close()
        arena.close()
        block.release()
        with pytest.raises(AbortedError, match="store 's': its shared memory is closed"):
            arena.allocate(10)

    def test_many_arenas_leave_nothing(self):
        before, held = traces(), BUDGET.held
        for _ in range(200):
            arena = Arena("store 's'", lambda segment: None)
            peer = arena.empty((3,), torch.float32), peer_of(arena.segments[0])
            arena.close()

        del arena, peer
        assert (traces(), BUDGET.held) == (before, held)


class TestCost:
    def test_reused_block_costs_microseconds(self, arena):
        arena.allocate(1000).release()
        assert fastest(lambda: arena.allocate(1000).release()) < 50e-6


def fastest(call):
    """Seconds of the fastest of a few thousand calls: what it takes when nothing else runs."""
    times = []
    for _ in range(3000):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)

    return min(times)
