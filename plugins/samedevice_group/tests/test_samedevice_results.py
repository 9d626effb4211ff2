"""What a collective says that it computes, against what it does to tensors in shared memory: bit for bit."""

from __future__ import annotations

import math
import random

import pytest
import torch
from dtorch_samedevice_group import collectives
from dtorch_samedevice_group.engine import Engine

from dtorch_core import CollectiveMismatchError, DtorchError
from dtorch_core._shapes import Shape
from dtorch_core.declared import Declared, Place, at_risk, compute
from dtorch_core.joint import Offer
from dtorch_core.reduction import OPS, rule

pytestmark = pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental:UserWarning")

WORLD_SIZES = (1, 2, 3, 4, 8)
SHAPES = ((), (0,), (1,), (7,), (3, 43))
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
NUMBERS = (
    "float64 float32 float16 bfloat16 complex64 complex32 bool int8 int16 int32 int64 uint8 uint16 uint32 uint64"
).split()


def defined(op, dtype):
    try:
        return rule(op, dtype)
    except DtorchError:
        return None


REDUCED = [(op, name) for op in OPS for name in NUMBERS if defined(op, getattr(torch, name)) is not None]


def values(shape, dtype, code):
    """Different at each position and for each code; sums of them are rounded, or wrap."""
    position = torch.arange(math.prod(shape)) * 7919 + 1 + code * 104729
    if dtype is torch.bool:
        flat = position % 3 > 0
    elif dtype.is_floating_point:
        flat = ((position % 2003 - 1000) / 371.0).to(dtype)
    elif dtype.is_complex:
        real = (position % 2003 - 1000) / 371.0
        flat = torch.complex(real, real.flip(0) / 3).to(dtype)
    else:
        flat = (position * 0x1E3779B97F4A7C15).to(SIGNED[dtype.itemsize]).view(dtype)

    return flat.reshape(shape)


def fresh(world_size, counts, shape, dtype):
    """Each rank's tensors: ``counts[r]`` of rank r."""
    return [[values(shape, dtype, 100 * r + n) for n in range(counts[r])] for r in range(world_size)]


def copied(tensors):
    return [[tensor.clone() for tensor in mine] for mine in tensors]


def worked(collective, tensors, notes=None):
    """What the work makes of the tensors, in place."""
    notes = notes or ["same"] * len(tensors)
    offers = [Offer(r, notes[r], tuple(mine)) for r, mine in enumerate(tensors)]
    for task in collective.work(offers):
        task()

    return tensors


def shapes_of(tensors):
    return [[Shape.of(tensor) for tensor in mine] for mine in tensors]


def blocks(tensors, cuts):
    """The same blocks of each of the tensors; whole ones where there is a strided one."""
    if not tensors[0].dim() or not all(tensor.is_contiguous() for tensor in tensors):
        return [tensors]

    flat = [tensor.view(-1) for tensor in tensors]
    if tensors[0].is_complex():
        cuts = [cut for cut in cuts if cut % 64 == 0]  # torch rounds the product of a row's last few otherwise

    ends = sorted({0, flat[0].numel(), *(cut for cut in cuts if cut < flat[0].numel())})
    return [[tensor[a:b] for tensor in flat] for a, b in zip(ends, ends[1:], strict=False)]


def computed(collective, tensors, process_of, seed=0):
    """What processes make of them that see each other's tensors as they were, and their own as they are."""
    dice = random.Random(seed)
    before = copied(tensors)
    results = collective.results(shapes_of(tensors))
    processes = sorted(set(process_of))
    dice.shuffle(processes)
    for process in processes:
        own = {rank: tensors[rank] for rank in range(len(tensors)) if process_of[rank] == process}
        saved = {place: own[place.rank][place.number].clone() for place in at_risk(results, own)}

        def source(place, own=own, saved=saved):
            return (
                saved.get(place, own[place.rank][place.number])
                if place.rank in own
                else before[place.rank][place.number]
            )

        jobs = []
        for result in results:
            targets = [own[place.rank][place.number] for place in result.targets if place.rank in own]
            if targets:
                sources = [source(place) for place in result.sources]
                for block in blocks([*targets, *sources], [1, 2, 5, 64, 97]):
                    jobs.append((result, block[len(targets) :], block[: len(targets)]))

        dice.shuffle(jobs)
        for result, sources, targets in jobs:
            compute(result.rule, result.factor, sources, targets)

    return tensors


def bits(tensors):
    return [
        [(Shape.of(t), t.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).tolist()) for t in mine]
        for mine in tensors
    ]


def check(collective, tensors):
    """The same bits, with every rank in a process of its own, all in one, and two in each."""
    size = len(tensors)
    wanted = bits(worked(collective, copied(tensors)))
    for seed, process_of in enumerate(
        ([*range(size)], [0] * size, [r // 2 for r in range(size)], [r % 2 for r in range(size)])
    ):
        assert bits(computed(collective, copied(tensors), process_of, seed)) == wanted, process_of


@pytest.mark.parametrize("size", WORLD_SIZES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
class TestCopies:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64", "int64", "uint16", "float8_e4m3fn"])
    @pytest.mark.parametrize("kind", ["all_gather", "broadcast", "gather", "scatter", "all_to_all"])
    def test_results_of_copies_are_those_of_the_work(self, kind, dtype, shape, size):
        dtype, root = getattr(torch, dtype), size // 2
        each = [1 + size * (r == root) for r in range(size)]
        collective, counts = {
            "all_gather": (collectives.all_gather(), [size + 1] * size),
            "broadcast": (collectives.broadcast(root), [3] * size),
            "gather": (collectives.gather(root), each),
            "scatter": (collectives.scatter(root), each),
            "all_to_all": (collectives.all_to_all(True), [2 * size] * size),
        }[kind]
        if dtype is torch.float8_e4m3fn:
            tensors = [[t.view(dtype) for t in mine] for mine in fresh(size, counts, shape, torch.uint8)]
        else:
            tensors = fresh(size, counts, shape, dtype)

        check(collective, tensors)


@pytest.mark.parametrize("size", WORLD_SIZES)
class TestReductions:
    @pytest.mark.parametrize(("op", "dtype"), REDUCED)
    def test_results_of_reductions_are_those_of_the_work(self, op, dtype, size):
        dtype, shape = getattr(torch, dtype), (3, 43)
        what, factor = rule(op, dtype), 0.37 if op == "premul_sum" else None
        check(collectives.all_reduce(what, factor), fresh(size, [2] * size, shape, dtype))
        check(collectives.reduce(what, size - 1, factor), fresh(size, [1] * size, shape, dtype))
        check(collectives.reduce_scatter(what, factor), fresh(size, [size + 1] * size, shape, dtype))

    @pytest.mark.parametrize("shape", [(), (0,), (1,)], ids=str)
    @pytest.mark.parametrize("op", ["avg", "max"])
    def test_results_of_next_to_nothing(self, op, shape, size):
        check(collectives.all_reduce(rule(op, torch.bfloat16)), fresh(size, [1] * size, shape, torch.bfloat16))


class TestLarge:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
    @pytest.mark.parametrize("size", [2, 3])
    def test_work_that_is_shared_says_the_same(self, dtype, size):
        dtype = getattr(torch, dtype)
        shape = (9 * 1024 * 1024 // dtype.itemsize // size + 3,)
        tensors = fresh(size, [1] * size, shape, dtype)
        collective = collectives.all_reduce(rule("sum", dtype))
        wanted = worked(collective, copied(tensors))
        got = computed(collective, tensors, [*range(size)])
        assert all(torch.equal(a[0], b[0]) for a, b in zip(got, wanted, strict=True))


class TestUneven:
    @pytest.mark.parametrize("size", WORLD_SIZES)
    def test_ranks_bring_different_sizes(self, size):
        lengths = [3 * r % 5 for r in range(size)]
        parts = [[values((n,), torch.float32, 10 * r + s) for s, n in enumerate(lengths)] for r in range(size)]
        own = [values((lengths[r],), torch.float32, 99 + r) for r in range(size)]
        check(collectives.all_gather(), [[*parts[r], own[r]] for r in range(size)])
        check(collectives.reduce_scatter(rule("sum", torch.float32)), [[own[r], *parts[r]] for r in range(size)])

        table = [[values(((r + s) % 3,), torch.int32, 10 * r + s) for s in range(size)] for r in range(size)]
        check(collectives.all_to_all(False), [[*copied(table)[r], *table[r]] for r in range(size)])

    @pytest.mark.parametrize("size", WORLD_SIZES)
    def test_several_as_one(self, size):
        dtype = torch.float32
        both = collectives.together(
            [collectives.all_gather(), collectives.reduce_scatter(rule("avg", dtype))], [size + 1, size + 1]
        )
        first, second = fresh(size, [size + 1] * size, (5,), dtype), fresh(size, [size + 1] * size, (2, 3), dtype)
        check(both, [[*a, *b] for a, b in zip(first, second, strict=True)])


class TestLayouts:
    @pytest.mark.parametrize("size", WORLD_SIZES)
    def test_strided_conjugate_and_negative_tensors(self, size):
        def views(code):
            return values((5, 4), torch.complex64, code), values((6,), torch.complex64, code)

        collective = collectives.all_reduce(rule("avg", torch.complex64))

        def tensors():
            made = [views(10 * r) for r in range(size)]
            return [[matrix.t()[::2], vector.conj()] for matrix, vector in made]

        wanted = bits(worked(collective, tensors()))
        assert bits(computed(collective, tensors(), [*range(size)])) == wanted
        assert bits(computed(collective, tensors(), [0] * size)) == wanted

        imaginary = [[values((6,), torch.complex64, r).conj().imag] for r in range(size)]
        assert imaginary[0][0].is_neg()
        check(collectives.broadcast(0), imaginary)


class TestAliases:
    """Outputs that are inputs, as callers are used to."""

    def run_both(self, collective, make):
        wanted = bits(worked(collective, make()))
        size = len(wanted)
        for seed, process_of in enumerate(([*range(size)], [0] * size, [r // 2 for r in range(size)])):
            assert bits(computed(collective, make(), process_of, seed)) == wanted, process_of

    @pytest.mark.parametrize("size", WORLD_SIZES)
    def test_reduce_scatter_to_the_input_of_this_rank(self, size):
        def make():
            inputs = fresh(size, [size] * size, (67,), torch.float32)
            return [[mine[r], *mine] for r, mine in enumerate(inputs)]

        self.run_both(collectives.reduce_scatter(rule("sum", torch.float32)), make)
        for rank, mine in enumerate(make()):
            results = collectives.reduce_scatter(rule("sum", torch.float32)).results(shapes_of(make()))
            assert not at_risk(results, {rank: mine})

    @pytest.mark.parametrize("size", WORLD_SIZES)
    def test_all_gather_from_the_output_of_this_rank(self, size):
        def make():
            wholes = [values((size * 67,), torch.int32, 100 * r).split(67) for r in range(size)]
            return [[*whole, whole[r]] for r, whole in enumerate(wholes)]

        self.run_both(collectives.all_gather(), make)
        results = collectives.all_gather().results(shapes_of(make()))
        assert not at_risk(results, dict(enumerate(make())))

    @pytest.mark.parametrize("size", [2, 3, 4])
    def test_output_over_the_input_for_another_rank_is_at_risk(self, size):
        """The work itself gives no such promise."""
        collective = collectives.reduce_scatter(rule("sum", torch.float32))
        inputs = fresh(size, [size] * size, (67,), torch.float32)
        tensors = [[mine[(r + 1) % size], *mine] for r, mine in enumerate(inputs)]
        results = collective.results(shapes_of(tensors))
        for rank in range(size):
            assert at_risk(results, {rank: tensors[rank]}) == [Place(rank, 1 + (rank + 1) % size)]

        outputs = [[values((67,), torch.float32, 7), *copied(inputs)[r]] for r in range(size)]
        wanted = bits([[mine[0]] for mine in worked(collective, outputs)])
        assert bits([[mine[0]] for mine in computed(collective, tensors, [*range(size)])]) == wanted


class Posted:
    """Where an engine posts to: it keeps the work."""

    rank, world_size = 0, 3

    def post(self, key, note, tensors, work, *, stream=None):
        self.work = work


def raised(call):
    with pytest.raises(CollectiveMismatchError) as caught:
        call()

    return str(caught.value)


class TestMismatches:
    def work(self, collective):
        store = Posted()
        Engine(store, "g").post("call", (), collective)
        assert isinstance(store.work, Declared)
        return store.work

    @pytest.mark.parametrize(
        "notes",
        [["a", "a", "b"], ["a", "b", "c"], ["a\nsaid", "b\nso\nmore", "a\nsaid"]],
        ids=["one odd", "all different", "written otherwise"],
    )
    def test_different_calls_are_the_same_error(self, notes):
        work = self.work(collectives.nothing())
        offers = [Offer(r, note, ()) for r, note in enumerate(notes)]
        text = raised(lambda: work(offers))
        assert "group 'g', collective #1: " in text
        assert raised(lambda: work.results(notes, [[], [], []])) == text

    def test_calls_that_differ_in_data_are_alike(self):
        work = self.work(collectives.nothing())
        assert work.results(["a\na\n1", "a\na\n2", "a\na\n3"], [[], [], []]) == ()

    @pytest.mark.parametrize("kind", ["gather", "scatter", "all_to_all"])
    @pytest.mark.parametrize("other", [((3,), torch.float32), ((2,), torch.float64), ((2, 1), torch.float32)], ids=str)
    def test_tensors_that_do_not_fit_are_the_same_error(self, kind, other):
        collective, counts = {
            "gather": (collectives.gather(1), [1, 4, 1]),
            "scatter": (collectives.scatter(1), [1, 4, 1]),
            "all_to_all": (collectives.all_to_all(False), [6, 6, 6]),
        }[kind]
        tensors = fresh(3, counts, (2,), torch.float32)
        tensors[1][3], tensors[2][0] = values(*other, 1), values(*other, 2)
        if kind != "all_to_all":
            tensors[2][0] = values((2,), torch.float32, 2)
            tensors[1][2] = values(*other, 1)

        work, notes = self.work(collective), ["x\nx\n1", "x\nx\n2", "x\nx\n3"]
        text = raised(lambda: work([Offer(r, notes[r], tuple(mine)) for r, mine in enumerate(tensors)]))
        assert text.startswith("group 'g', collective #1, x: rank ")
        assert raised(lambda: work.results(notes, shapes_of(tensors))) == text
