"""The free parts of segments: how they are cut and joined again."""

import random

from dtorch_file_store.extents import GRANULE, Extents, part_size


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
