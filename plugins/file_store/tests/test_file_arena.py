"""Memory that processes share: blocks that never overlap and all come back, limits in words, nothing left behind."""

import errno
import gc
import os
import random
import subprocess
import sys
import threading
import time

import pytest
import torch
from dtorch_file_store import headroom, segments
from dtorch_file_store.arena import Arena, Mapping
from dtorch_file_store.extents import GRANULE, Extents, part_size
from dtorch_file_store.headroom import BUDGET, VARIABLE, NoRoomError

from dtorch_core import AbortedError, DtorchError
from dtorch_core.testing._group_base import all_dtypes, of_dtype

MIB = 1 << 20
LIMIT = 30.0


@pytest.fixture
def made():
    """The segments that the arena has announced."""
    return []


@pytest.fixture
def arena(made):
    arena = Arena("store 's'", made.append)
    yield arena
    arena.close()


def numbered(nbytes, start=0):
    """Bytes that tell where they belong."""
    return (torch.arange(nbytes) + start).remainder(251).to(torch.uint8)


def peer_of(segment):
    return Mapping(os.dup(segment.fd), segment.size)


def descriptors():
    return {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if fd_is_there(fd)}


def fd_is_there(fd):
    return os.path.lexists(f"/proc/self/fd/{fd}")


def traces():
    """How many descriptors and mappings of shared memory this process has."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        mapped = sum("/memfd:dtorch" in line for line in maps)

    return sum("/memfd:dtorch" in target for target in descriptors().values()), mapped


def free_bytes(arena):
    gc.collect()
    with arena._mutex:
        arena._settle()
        return arena._extents.free_bytes()[0]


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


class TestLimits:
    def test_variable_limits_all_arenas_of_the_process(self, arena, monkeypatch):
        monkeypatch.setenv(VARIABLE, str(BUDGET.held + 6 * MIB))
        other = Arena("store 'other'", lambda segment: None)
        kept = arena.allocate(3 * MIB)
        with pytest.raises(NoRoomError) as caught:
            other.allocate(3 * MIB)

        text = str(caught.value)
        assert text.startswith("store 'other': no shared memory for 3 MiB: this process holds ")
        assert VARIABLE in text and "wait for them earlier" in text
        assert isinstance(caught.value, DtorchError) and isinstance(caught.value, MemoryError)
        assert other.allocate(MIB).bytes().copy_(numbered(MIB))[77] == 77  # what is left can be had
        kept.release()
        assert arena.allocate(3 * MIB).offset == kept.offset
        other.close()

    def test_message_says_what_is_free_and_in_how_large_pieces(self, arena, monkeypatch):
        monkeypatch.setenv(VARIABLE, str(BUDGET.held + 4 * MIB))
        blocks = [arena.allocate(MIB) for _ in range(4)]
        blocks[0].release()
        blocks[2].release()
        with pytest.raises(NoRoomError, match="Of the 4 MiB .* in this process, 2 MiB are free, 1 MiB in one"):
            arena.allocate(2 * MIB)

    def test_idle_segments_make_room(self, arena, monkeypatch):
        monkeypatch.setenv(VARIABLE, str(BUDGET.held + 16 * MIB))
        for size in (6, 9, 14, 3, 16, 5):
            arena.allocate(size * MIB).release()

    @pytest.mark.parametrize("text", ["4GB", "-1", "1e9", "²"])
    def test_variable_that_is_no_number_is_an_error(self, arena, monkeypatch, text):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(DtorchError, match=f"{VARIABLE} must be a whole number of bytes, not '{text}'"):
            arena.allocate(10)

    def test_machine_without_memory_is_said(self, arena, monkeypatch):
        monkeypatch.setattr(headroom, "_room", lambda: iter([(100 * MIB, "this machine")]))
        with pytest.raises(NoRoomError, match=r"for 50 MiB: this machine has 100 MiB left, of which 64 MiB stay free"):
            arena.allocate(50 * MIB)

        arena.allocate(MIB)

    def test_more_than_the_machine_has_is_refused(self, arena):
        before, held = traces(), BUDGET.held
        with pytest.raises(NoRoomError, match="this machine has|control group"):
            arena.allocate(1 << 45)

        assert (traces(), BUDGET.held) == (before, held)

    def test_memory_that_others_take_meanwhile_is_noticed(self, arena, monkeypatch):
        looks = iter([None] * 2 + ["this machine has nothing left"] * 20)
        monkeypatch.setattr(segments, "why_not", lambda nbytes: next(looks))
        before, held = traces(), BUDGET.held
        with pytest.raises(NoRoomError, match="this machine has nothing left"):
            arena.allocate(200 * MIB)

        assert (traces(), BUDGET.held) == (before, held)

    @pytest.mark.parametrize(
        ("call", "number", "text"),
        [
            ("memfd_create", errno.EMFILE, "no file can be made for it: Too many open files"),
            ("ftruncate", errno.EFBIG, "the kernel refused it: File too large"),
            ("posix_fallocate", errno.ENOSPC, "the kernel refused it: No space left on device"),
        ],
    )
    def test_refusal_by_the_kernel_is_said(self, arena, monkeypatch, call, number, text):
        def refuse(*args):
            raise OSError(number, os.strerror(number))

        before, held = traces(), BUDGET.held
        monkeypatch.setattr(os, call, refuse)
        with pytest.raises(NoRoomError, match=text):
            arena.allocate(10)

        monkeypatch.undo()
        assert (traces(), BUDGET.held) == (before, held)
        arena.allocate(10)

    def test_mapping_that_the_kernel_refuses_is_said(self, arena, monkeypatch):
        def refuse(fd, size):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        before, held = traces(), BUDGET.held
        monkeypatch.setattr(segments, "_map", refuse)
        with pytest.raises(NoRoomError, match="the kernel refused it: Cannot allocate memory"):
            arena.allocate(10)

        assert (traces(), BUDGET.held) == (before, held)

    def test_control_group_is_read(self, tmp_path):
        inner = tmp_path / "outer" / "inner"
        inner.mkdir(parents=True)
        (inner / "memory.max").write_text("max\n")
        (inner / "memory.current").write_text("5\n")
        (inner.parent / "memory.max").write_text(f"{100 * MIB}\n")
        (inner.parent / "memory.current").write_text(f"{70 * MIB}\n")
        (inner.parent / "memory.stat").write_text(f"anon 7\ninactive_file {20 * MIB}\n")
        found = list(headroom._room_above(tmp_path, "/outer/inner", "memory.max", "memory.current"))
        assert found == [(50 * MIB, f"the control group {inner.parent}")]

    @pytest.mark.parametrize(
        ("nbytes", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (3 << 29, "1.5 GiB")]
    )
    def test_sizes_are_written_in_one_way(self, nbytes, text):
        assert headroom.size_text(nbytes) == text


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


class TestMapping:
    def test_another_process_sees_what_is_written_and_writes_itself(self, arena, made):
        tensor = arena.empty((1000,), torch.int64).copy_(torch.arange(1000))
        block, offset = arena.locate(tensor)
        code = (
            "import sys, torch\n"
            "from dtorch_file_store.arena import Mapping\n"
            "fd, size, offset = map(int, sys.argv[1:])\n"
            "memory = Mapping(fd, size).bytes(offset, 8000).view(torch.int64)\n"
            "assert memory.tolist() == list(range(1000))\n"
            "memory.mul_(3)\n"
        )
        arguments = [str(made[0].fd), str(made[0].size), str(block.offset + offset)]
        command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
        done = subprocess.run(command, pass_fds=[made[0].fd], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert tensor.tolist() == list(range(0, 3000, 3))

    def test_segment_can_be_neither_shortened_nor_lengthened(self, arena, made):
        arena.allocate(10)
        fd = os.dup(made[0].fd)
        for size in (0, made[0].size + 4096):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)

        os.close(fd)

    def test_bytes_outside_are_refused(self, arena, made):
        arena.allocate(10)
        peer = peer_of(made[0])
        for offset, nbytes in ((0, peer.size + 1), (peer.size, 1), (-1, 10), (10, -1)):
            with pytest.raises(DtorchError, match="are outside of a peer's 4 MiB of shared memory"):
                peer.bytes(offset, nbytes)

        assert peer.bytes(peer.size, 0).shape == (0,)

    def test_closed_mapping_gives_nothing(self, arena, made):
        arena.allocate(10)
        peer = peer_of(made[0])
        peer.close()
        with pytest.raises(DtorchError, match="outside"):
            peer.bytes(0, 10)

    def test_what_is_no_sealed_segment_is_refused_and_closed(self, tmp_path):
        def unsealed():
            fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, MIB)
            return fd

        def file():
            fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
            os.ftruncate(fd, MIB)
            return fd

        for make in (unsealed, file):
            fd = make()
            with pytest.raises(DtorchError, match="a peer's shared memory of 1 MiB"):
                Mapping(fd, MIB)

            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)

    def test_segment_of_another_size_is_refused(self, arena, made):
        arena.allocate(10)
        with pytest.raises(DtorchError, match="a peer's shared memory of 8 MiB"):
            Mapping(os.dup(made[0].fd), 8 * MIB)


class TestMany:
    def test_random_use_by_threads_overlaps_nowhere_and_all_comes_back(self, arena):
        errors = []

        def work(seed):
            rng = random.Random(seed)
            held = []
            for step in range(400):
                if held and rng.random() < 0.48:
                    block, values = held.pop(rng.randrange(len(held)))
                    if not torch.equal(block.bytes(), values):
                        errors.append((seed, step, block.offset))

                    block.release()
                else:
                    nbytes = rng.choice([1, 64, 65, 1000, 4096, rng.randrange(1, 200_000)])
                    block = arena.allocate(nbytes)
                    values = numbered(nbytes, rng.randrange(251))
                    block.bytes().copy_(values)
                    held.append((block, values))

            for block, _ in held:
                block.release()

        run_threads([lambda seed=seed: work(seed) for seed in range(4)])
        assert errors == []
        assert free_bytes(arena) == sum(segment.size for segment in arena.segments)
        assert len(arena._extents._sizes) == len(arena.segments)  # joined to whole segments again

    def test_tensors_dropped_by_other_threads_come_back(self, arena):
        tensors = [arena.empty((500,), torch.float32) for _ in range(200)]
        parts = [tensors[part::4] for part in range(4)]
        tensors.clear()
        run_threads([part.clear for part in parts])
        assert free_bytes(arena) == sum(segment.size for segment in arena.segments)

    def test_tensor_dropped_while_this_thread_is_at_work_in_the_arena_is_no_deadlock(self, arena):
        tensors = [arena.empty((100,), torch.float32)]

        def work():
            with arena._mutex:  # as when the garbage collector runs in the middle of an allocation
                tensors.clear()

        run_threads([work])
        assert free_bytes(arena) == 4 * MIB

    def test_garbage_collection_in_the_middle_of_an_allocation_is_no_deadlock(self, arena):
        class Cycle:
            def __init__(self, tensor):
                self.tensor, self.me = tensor, self

        def work():
            for _ in range(300):
                Cycle(arena.empty((100,), torch.float32))
                arena.allocate(100).release()

        before = gc.get_threshold()
        gc.set_threshold(1)
        try:
            run_threads([work, work])
        finally:
            gc.set_threshold(*before)

        assert free_bytes(arena) == sum(segment.size for segment in arena.segments)

    def test_five_thousand_blocks(self, arena, made):
        blocks = [arena.allocate(3000) for _ in range(5000)]
        places = sorted((block.segment, block.offset) for block in blocks)
        assert all(a != b or y - x >= 3000 for (a, x), (b, y) in zip(places, places[1:], strict=False))
        assert len(made) <= 4
        for block in blocks:
            block.release()

        assert free_bytes(arena) == sum(segment.size for segment in made)


class TestExtents:
    def test_parts_hold_what_is_asked_and_little_more(self):
        sizes = [*range(1, 5000), *(2**power + more for power in range(12, 33) for more in (-1, 0, 1))]
        for nbytes in sizes:
            size = part_size(nbytes)
            assert nbytes <= size and size % GRANULE == 0
            assert size - nbytes < max(64, nbytes / 8) and size - nbytes < 1 << 16
            assert part_size(size) == size

    def test_random_use_agrees_with_a_map_of_every_granule(self):
        rng = random.Random(7)
        total = 200
        extents = Extents()
        extents.give(0, 0, total * GRANULE)
        taken = {}
        for _ in range(5000):
            if taken and rng.random() < 0.5:
                start = rng.choice(list(taken))
                extents.give(0, start * GRANULE, taken.pop(start) * GRANULE)
            else:
                count = rng.choice([1, 2, 3, 10, 40])
                used = {granule for start, length in taken.items() for granule in range(start, start + length)}
                place = extents.take(count * GRANULE)
                if place is None:
                    runs = "".join("x" if granule in used else "." for granule in range(total))
                    assert "." * count not in runs
                else:
                    start = place[1] // GRANULE
                    assert used.isdisjoint(range(start, start + count)) and start + count <= total
                    taken[start] = count

        for start, count in taken.items():
            extents.give(0, start * GRANULE, count * GRANULE)

        assert extents.free_bytes() == (total * GRANULE, total * GRANULE)

    def test_part_of_another_segment_is_no_neighbour(self):
        extents = Extents()
        extents.give(0, 0, 64)
        extents.give(1, 64, 64)
        assert extents.take(128) is None

    def test_segment_is_withdrawn_only_if_all_of_it_is_free(self):
        extents = Extents()
        extents.give(3, 0, 256)
        assert extents.take(64) == (3, 0)
        assert not extents.withdraw(3, 256)
        extents.give(3, 0, 64)
        assert extents.withdraw(3, 256)
        assert extents.take(64) is None


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


def run_threads(bodies):
    errors = []

    def guarded(body):
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()

    for thread in threads:
        thread.join(LIMIT)

    assert not any(thread.is_alive() for thread in threads)
    assert errors == []
