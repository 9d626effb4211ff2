"""Collectives of CPU tensors with the fused kernels, which triton interprets, beside the same ones by torch.

    TRITON_INTERPRET=1 python fused_program.py PARTS

A program of its own: whether kernels are interpreted is settled when triton is imported. Prints how many it launched.
"""

import itertools
import sys
import warnings

import torch
from dtorch_samedevice_group import collectives, fused, fused_kernels
from dtorch_samedevice_group.recipes import recipe

from dtorch_core import DtorchError
from dtorch_core.joint import Offer
from dtorch_core.reduction import OPS, rule

SIZES = 0, 1, 7, 1023, 1025
RANKS = 2, 3, 4, 8, 16
FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
INTEGERS = torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64
DTYPES = *FLOATS, *INTEGERS, torch.bool
SPECIAL = float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-40, 65504.0, 3.4e38

# Blocks of 1 KiB: small tensors have full ones too.
fused.BLOCK_BYTES = 1024


class Launches:
    """In the launcher's place: on the CPU, and counted."""

    usable = True
    count = 0

    def launch(self, variant, device, grid, inputs, outputs, length, in_step=0, out_step=0):
        kernel, constants = fused_kernels.variant(*variant)
        unused = [[0] * (16 - len(some)) for some in (inputs, outputs)]
        kernel[grid](*inputs, *unused[0], *outputs, *unused[1], length, in_step, out_step, *constants)
        self.count += 1
        return True


launches = fused.launcher = Launches()


def values(dtype, size, rank, special=True):
    """Of all magnitudes, other ones for each rank."""
    generator = torch.Generator().manual_seed(1000 * size + rank)
    if dtype is torch.bool:
        return torch.randint(0, 2, (size,), generator=generator).bool()

    if not dtype.is_floating_point:
        return torch.randint(-(2**62), 2**62, (size,), generator=generator).to(dtype)

    if dtype is torch.bfloat16:  # the interpreter cuts it off where a GPU rounds it, and knows none of its NaNs
        return torch.randint(-2, 3, (size,), generator=generator).to(dtype)

    x = torch.randn(size, generator=generator, dtype=torch.float64).mul(100).to(dtype)
    if special:
        # All of them at every rank, and against each other.
        count = len(SPECIAL)
        for number, place in enumerate(range(0, size - size % count, 3)):
            if (number + rank) % 4 == 0:
                x[place] = SPECIAL[(number // 4 + rank * number) % count]

    return x


around = []
"""What lies before and behind tensors, and is not to be written."""


def misaligned(x, by):
    """The same values, that many elements behind a multiple of 16 bytes."""
    room = torch.zeros(x.numel() + by + 32, dtype=x.dtype)
    start = -room.data_ptr() % 16 // x.itemsize + by
    end = start + x.numel()
    around.extend([room[:start], room[end:]])
    return room[start:end].copy_(x)


def work(collective, ranks, by_kernels):
    """What all tensors are after a collective."""
    fused.takes = lambda tensor: by_kernels
    before = launches.count
    for task in collective.work([Offer(rank, "", tuple(tensors)) for rank, tensors in enumerate(ranks)]):
        task()

    return launches.count - before


def same(a, b):
    """Bit by bit; a NaN is as good as another one."""
    a, b = a.resolve_conj().contiguous(), b.resolve_conj().contiguous()
    if a.dtype.is_floating_point:
        nan = a.isnan()
        if not torch.equal(nan, b.isnan()):
            return False

        a, b = a.masked_fill(nan, 0), b.masked_fill(nan, 0)

    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def check(what, collective, make, launched):
    """Make the ranks' tensors twice, and do it in both ways."""
    ours, theirs = make(), make()
    count = work(collective, ours, True)
    assert launched is None or count == launched, f"{what}: {count} kernels, not {launched}"
    assert not any(room.any() for room in around), f"{what}: wrote where there is no tensor"
    around.clear()
    assert not work(collective, theirs, False)
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for number, (x, y) in enumerate(zip(mine, other, strict=True)):
            if not same(x, y):
                where = (x != y).nonzero().flatten()[:4]
                raise AssertionError(f"{what}: rank {rank}, tensor {number}, at {where}: {x[where]} is not {y[where]}")


def reductions():
    """Each op and dtype; of sums and minima also each size with 3 ranks, and each number of ranks with an odd size."""
    few = [(3, 1025), (2, 133)]
    many = [(3, size) for size in SIZES] + [(ranks, 133) for ranks in RANKS if ranks != 3]
    thorough = torch.float32, torch.float16, torch.int64
    for op, dtype in itertools.product(OPS, DTYPES):
        try:
            how = rule(op, dtype)
        except DtorchError:
            continue

        if recipe(how, None) is None or (op, dtype) == ("avg", torch.bfloat16):
            continue

        cases = many if op in ("sum", "min") and dtype in thorough else few
        for (ranks, size), by in itertools.product(cases, (0, 1)):
            what = f"{op} of {dtype}, {ranks} ranks, {size} elements, misaligned by {by}"

            def whole(ranks=ranks, size=size, by=by, dtype=dtype):
                return [[misaligned(values(dtype, size, rank), by * (rank % 2))] for rank in range(ranks)]

            check(f"all_reduce, {what}", collectives.all_reduce(how), whole, size > 0)
            if size in (7, 133):
                check(f"reduce, {what}", collectives.reduce(how, ranks - 1), whole, 1)

            if by or size > 133:
                continue

            def parts(ranks=ranks, size=size, dtype=dtype):
                inputs = [values(dtype, ranks * size, rank) for rank in range(ranks)]
                return [[values(dtype, size, 0), *x.chunk(ranks)] if size else [x] * (ranks + 1) for x in inputs]

            check(f"reduce_scatter, {what}", collectives.reduce_scatter(how), parts, size > 0)


def copies():
    """Each width and alignment, in place and not, spaced and not."""
    dtypes = torch.int8, torch.bfloat16, torch.complex64
    for ranks, size, dtype, by in itertools.product(RANKS, SIZES, dtypes, (0, 1)):
        if ranks > 3 and (size > 7 or dtype is not torch.bfloat16):
            continue

        what = f"of {dtype}, {ranks} ranks, {size} elements, misaligned by {by}"
        floats = values(torch.float32, 2 * ranks * size * 16, 0, special=False)

        def room(number, count, ranks=ranks, size=size, dtype=dtype, by=by, floats=floats):
            """``count`` tensors one behind the other."""
            x = floats.view(dtype)[number : number + count * size] if size else torch.zeros(0, dtype=dtype)
            return list(misaligned(x, by).split(size)) if size else [x] * count

        some = size > 0
        members = range(ranks)
        check(
            f"all_gather {what}",
            collectives.all_gather(),
            lambda room=room, members=members, ranks=ranks: [[*room(0, ranks), *room(r, 1)] for r in members],
            some,
        )
        check(
            f"all_to_all {what}",
            collectives.all_to_all(True),
            lambda room=room, members=members, ranks=ranks: [[*room(0, ranks), *room(r, ranks)] for r in members],
            some,
        )
        check(
            f"broadcast {what}",
            collectives.broadcast(1),
            lambda room=room, members=members: [[*room(r, 1), *room(r + 1, 1)] for r in members],
            None,
        )
        check(
            f"gather {what}",
            collectives.gather(1),
            lambda room=room, members=members, ranks=ranks: [
                [*(room(r, ranks) if r == 1 else ()), *room(r, 1)] for r in members
            ],
            some,
        )
        check(
            f"scatter {what}",
            collectives.scatter(1),
            lambda room=room, members=members, ranks=ranks: [
                [*room(r, 1), *(room(r, ranks) if r == 1 else ())] for r in members
            ],
            some,
        )


def places():
    """Tensors that lie in each other's place, apart from each other, or across each other."""
    how, size, ranks = rule("sum", torch.float32), 133, 4
    members = range(ranks)

    def x(rank, count=1):
        return values(torch.float32, size * count, rank, special=False)

    def in_place_scatter():
        inputs = [x(r, ranks).chunk(ranks) for r in members]
        return [[inputs[r][r], *inputs[r]] for r in members]

    def another_ranks_place():
        inputs = [x(r, ranks).chunk(ranks) for r in members]
        return [[inputs[r][0], *inputs[r]] for r in members]

    def listed(rank):
        """At distances that differ."""
        room = x(rank, 6)
        return [room[start * size :][:size] for start in (0, 1, 3, 4)]

    def lists():
        return [[x(9), *listed(r)] for r in members]

    def one_input():
        shared = x(0, ranks).chunk(ranks)
        return [[x(9), *shared] for _ in members]

    scatter = collectives.reduce_scatter(how)
    check("reduce_scatter in place", scatter, in_place_scatter, 1)
    check("reduce_scatter of lists", scatter, lists, ranks)
    check("reduce_scatter of one input", scatter, one_input, 1)
    # Spaced it can't be done, and job by job only up to where the order counts.
    check("reduce_scatter to the first part", scatter, another_ranks_place, ranks)

    def strided():
        return [[x(r, 2)[::2]] for r in members]

    def across():
        room = x(0, 2)
        return [[room[:size]], [room[size - 1 : 2 * size - 1]]]

    check("all_reduce of strided tensors", collectives.all_reduce(how), strided, 0)
    assert not fused.reduce(recipe(how, None), [t for (t,) in across()], [t for (t,) in across()])
    several = collectives.all_reduce(how)
    check("all_reduce of several", several, lambda: [[x(r), x(r, 2)[::2], x(r + 1)] for r in members], 2)

    def in_place_gather():
        outputs = [x(r, ranks).chunk(ranks) for r in members]
        return [[*outputs[r], outputs[r][r]] for r in members]

    def uneven():
        return [[*x(9, 10).split([size * (1 + s) for s in members]), x(r, 1 + r)] for r in members]

    def empty_first():
        return [[*x(9, 6).split([size * s for s in members]), x(r, r) if r else x(0)[:0]] for r in members]

    gather = collectives.all_gather()
    check("all_gather in place", gather, in_place_gather, 1)
    check("all_gather to lists", gather, lambda: [[*listed(9), x(r)] for r in members], ranks)
    check("all_gather of other sizes", gather, uneven, ranks)
    check("all_gather of nothing and something", gather, empty_first, ranks - 1)
    check("all_gather of conjugates", gather, lambda: [[*_c(r, 4), _c(r, 1)[0].conj()] for r in members], 0)

    def in_place_rooted(rooted):
        def make():
            parts = x(5, ranks).chunk(ranks)
            if rooted == "scatter":
                return [[parts[r], *parts] if r == 1 else [x(r)] for r in members]

            return [[*parts, parts[r]] if r == 1 else [x(r)] for r in members]

        return make

    check("scatter in place", collectives.scatter(1), in_place_rooted("scatter"), 1)
    check("gather in place", collectives.gather(1), in_place_rooted("gather"), 1)
    check("scatter of a list", collectives.scatter(0), lambda: [[x(9), *listed(0)], *[[x(r)] for r in members[1:]]], 0)
    check("broadcast to itself", collectives.broadcast(0), lambda: [[y] for y in [x(0)] * 3], 0)


def _c(rank, count):
    return list(values(torch.float32, 2 * 133 * count, rank, special=False).view(torch.complex64).split(133))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy's, for what overflows on purpose
    for part in sys.argv[1:]:
        {"reductions": reductions, "copies": copies, "places": places}[part]()

    print(launches.count)
