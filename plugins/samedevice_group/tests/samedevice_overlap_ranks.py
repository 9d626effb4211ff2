"""Collectives whose outputs lie across their inputs, for ranks that are threads or processes."""

from functools import partial

import torch

LIMIT = 60.0


def value(rank, number, size):
    """What rank gives to rank ``number``: tells where it belongs."""
    return torch.arange(size, dtype=torch.float32).add(1000 * rank + 100 * number)


def row(rank, n, size):
    return [value(rank, number, size) for number in range(n)]


def all_gather(pg, size, slot):
    rank, n = pg.rank(), pg.size()
    outs = [torch.zeros(size) for _ in range(n)]
    outs[slot] = value(rank, 0, size)
    pg.allgather([outs], [outs[slot]]).wait()
    return outs, [value(r, 0, size) for r in range(n)]


def all_gather_single(pg, size, slot, shift=0):
    rank, n = pg.rank(), pg.size()
    out = torch.zeros(n * size)
    x = out[max(slot * size - shift, 0) :][:size]
    x.copy_(value(rank, 0, size))
    pg.all_gather_single(out, x).wait()
    return [out], [torch.cat([value(r, 0, size) for r in range(n)])]


def gather(pg, size, slot):
    rank, n = pg.rank(), pg.size()
    outs = [torch.zeros(size) for _ in range(n)]
    outs[slot] = x = value(rank, 0, size)
    pg.gather([outs] if rank == 0 else [], [x]).wait()
    return (outs, [value(r, 0, size) for r in range(n)]) if rank == 0 else ([x], [value(rank, 0, size)])


def gather_single(pg, size, slot):
    rank, n = pg.rank(), pg.size()
    out = torch.zeros(n * size)
    x = out[slot * size :][:size]
    x.copy_(value(rank, 0, size))
    pg.gather_single(out, x).wait()
    return [out], [torch.cat([value(r, 0, size) for r in range(n)]) if rank == 0 else out]


def scatter(pg, size, slot):
    rank, n = pg.rank(), pg.size()
    inputs = row(rank, n, size)
    out = inputs[slot]
    pg.scatter([out], [inputs] if rank == 0 else []).wait()
    return [out], [value(0, rank, size)]


def reduce_scatter(pg, size, slot):
    rank, n = pg.rank(), pg.size()
    inputs = row(rank, n, size)
    out = inputs[slot]
    pg.reduce_scatter([out], [inputs]).wait()
    return [out], [sum(value(r, rank, size) for r in range(n))]


def reduce_scatter_single(pg, size, slot, shift=0):
    rank, n = pg.rank(), pg.size()
    given = torch.cat(row(rank, n, size))
    out = given[max(slot * size - shift, 0) :][:size]
    pg.reduce_scatter_single(out, given).wait()
    return [out], [sum(value(r, rank, size) for r in range(n))]


def all_to_all(pg, size, slot):
    rank, n = pg.rank(), pg.size()
    inputs = row(rank, n, size)
    outs = inputs[slot:] + inputs[:slot]
    pg.alltoall(outs, inputs).wait()
    return outs, [value(r, rank, size) for r in range(n)]


def all_to_all_single(pg, size, slot):
    rank, n = pg.rank(), pg.size()
    memory = torch.cat([*row(rank, n, size), torch.zeros(slot * size)])
    out = memory[slot * size :]
    pg.all_to_all_single(out, memory[: n * size], [], []).wait()
    return [out], [torch.cat([value(r, rank, size) for r in range(n)])]


def all_to_all_in_pieces(pg, size, slot):
    rank, n = pg.rank(), pg.size()
    sizes = [size + (number + slot) % n for number in range(n)]  # to each rank, from everyone
    given = torch.cat([value(rank, number, length) for number, length in enumerate(sizes)])
    memory = torch.cat([given, torch.zeros(n * n)])
    got = [sizes[rank]] * n
    out = memory[: sum(got)]
    pg.all_to_all_single(out, memory[: sum(sizes)], got, sizes).wait()
    return [out], [torch.cat([value(r, rank, sizes[rank]) for r in range(n)])]


def gather_together(pg, size, slot):
    """Two calls as one, of which each gathers from what the other one gathers to."""
    rank, n = pg.rank(), pg.size()
    outs = [torch.zeros(n * size), torch.zeros(n * size)]
    inputs = [outs[1 - number][slot * size :][:size].copy_(value(rank, number, size)) for number in range(2)]
    pg.all_gather_single_coalesced(outs, inputs).wait()
    return outs, [torch.cat([value(r, number, size) for r in range(n)]) for number in range(2)]


def scatter_together(pg, size, slot):
    rank, n = pg.rank(), pg.size()
    inputs = [torch.cat(row(rank, n, size)), torch.cat(row(rank, n, size)) * 2]
    outs = [inputs[1 - number][slot * size :][:size] for number in range(2)]
    pg.reduce_scatter_single_coalesced(outs, inputs).wait()
    wanted = sum(value(r, rank, size) for r in range(n))
    return outs, [wanted, wanted * 2]


def all_reduce_together(pg, size, slot):
    """One rank's tensors lie across each other. What it gets there is its own affair, not what the others get."""

    def given(rank):
        if rank != slot:
            return row(rank, 3, size)

        memory = value(rank, 0, size + 1)
        return [memory[:size], memory[1:], memory[:size]]

    tensors = given(pg.rank())
    pg.allreduce_coalesced(tensors).wait()
    wanted = [sum(parts) for parts in zip(*[given(rank) for rank in range(pg.size())], strict=True)]
    return ([], []) if pg.rank() == slot else (tensors, wanted)


def transposed(pg, size, slot):
    """The place of the input is its own, and yet it is not the same view."""
    rank, n = pg.rank(), pg.size()
    side = int(size**0.5)
    xs = [value(r, 0, side * side).view(side, side) for r in range(n)]
    x = xs[rank].clone()
    outs = [torch.zeros(side, side) for _ in range(n)]
    outs[rank] = x.t()
    pg.allgather([outs], [x]).wait()
    return outs, xs


CALLS = {
    call.__name__: call
    for call in (
        all_gather,
        all_gather_single,
        gather,
        gather_single,
        scatter,
        reduce_scatter,
        reduce_scatter_single,
        all_to_all,
        all_to_all_single,
        all_to_all_in_pieces,
        gather_together,
        scatter_together,
        all_reduce_together,
        transposed,
    )
}
SHIFTED = {
    "all_gather_single, between two": partial(all_gather_single, shift=1),
    "reduce_scatter_single, between two": partial(reduce_scatter_single, shift=1),
}


def wrong(ctx, sizes):
    """The calls, slots and sizes with which this rank gets something else than from inputs that lie apart."""
    found = []
    with ctx.open_group("overlaps", backend="samedevice", timeout=LIMIT) as group:
        for size in sizes:
            for name, call in (CALLS | SHIFTED).items():
                for slot in range(ctx.world_size):
                    for again in (False, True):  # a call that is like an earlier one is not planned again
                        got, wanted = call(group.process_group, size, slot)
                        if not all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)):
                            found.append((name, size, slot, again))

                        group.barrier()  # nothing of this rank's is read any more

    return found
