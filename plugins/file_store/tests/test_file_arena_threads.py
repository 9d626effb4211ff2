"""Many blocks, of several threads, and a garbage collector amid it: no overlap, no deadlock, all comes back."""

import gc
import random
from pathlib import Path

import pytest
import torch

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    pytest.register_assert_rewrite("file_arena_parts")
    import file_arena_parts as parts
    from file_arena_parts import MIB, free_bytes, numbered, run_threads

arena, made = parts.arena, parts.made  # fixtures


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
