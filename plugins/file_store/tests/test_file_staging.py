"""Staged work: simulated processes, run in many interleavings, write what the work itself writes in shared memory."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from dtorch_file_store import staged
from dtorch_file_store.staged import Flat, Staged
from dtorch_file_store.staging import GRAIN, Plan

from dtorch_core._shapes import Shape
from dtorch_core.declared import Place, Result
from dtorch_core.joint import Offer
from dtorch_core.reduction import rule

collectives = pytest.importorskip("dtorch_samedevice_group.collectives")


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


def values(length, code, dtype=torch.float32):
    """Different at each position and for each code; sums are rounded."""
    flat = (torch.arange(length) * 7919 + code * 104729) % 2003
    return ((flat - 1000) / 371.0).to(dtype) if dtype.is_floating_point or dtype.is_complex else flat.to(dtype)


class Case(NamedTuple):
    """Joint work and what each rank offers."""

    collective: object
    tensors: list[list[torch.Tensor]]
    reads: set[Place]
    """Sources that are no targets: what a caller may rewrite at once."""

    @classmethod
    def of(cls, collective, tensors):
        results = collective.results([[Shape.of(t) for t in mine] for mine in tensors])
        targets = {place for result in results for place in result.targets}
        return cls(collective, tensors, {place for r in results for place in r.sources} - targets)

    def results(self):
        return self.collective.results(self.shapes())

    def shapes(self):
        return [[Shape.of(tensor) for tensor in mine] for mine in self.tensors]

    def wanted(self):
        """What each target becomes."""
        copies = [[tensor.clone() for tensor in mine] for mine in self.tensors]
        for task in self.collective.work([Offer(r, "same", tuple(mine)) for r, mine in enumerate(copies)]):
            task()

        return {p: copies[p.rank][p.number].clone() for result in self.results() for p in result.targets}


def cases(size, length=400, dtype=torch.float32):
    """Each collective, once."""

    def fresh(counts, seed):
        return [[values(length, seed + 50 * r + n, dtype) for n in range(counts[r])] for r in range(size)]

    root, add = size // 2, rule("sum", dtype)
    some = [1 + size * (r == root) for r in range(size)]
    yield Case.of(collectives.all_reduce(add), fresh([2] * size, 1))
    yield Case.of(collectives.reduce(add, root), fresh([1] * size, 2))
    yield Case.of(collectives.reduce_scatter(add), fresh([size + 1] * size, 3))
    yield Case.of(collectives.all_gather(), fresh([size + 1] * size, 4))
    yield Case.of(collectives.broadcast(root), fresh([2] * size, 5))
    yield Case.of(collectives.gather(root), fresh(some, 6))
    yield Case.of(collectives.scatter(root), fresh(some, 7))
    yield Case.of(collectives.all_to_all(True), fresh([2 * size] * size, 8))


class Schedule:
    """Which process goes on next."""

    def __init__(self, seed, hurried=None, late=None):
        self.dice, self.hurried, self.late = random.Random(seed), hurried, late

    def choose(self, ready):
        if self.hurried in ready:
            return self.hurried

        return self.dice.choice([p for p in ready if p != self.late] or ready)


def schedules(processes):
    first, last = min(processes), max(processes)
    return [Schedule(1), Schedule(2, hurried=first), Schedule(3, late=first), Schedule(4, hurried=last)]


def simulate(works, process_of, schedule, *, halves=2, waits=True, mapped=False, **options):
    """Do several pieces of work one after the other, all processes at once; what each target became."""
    processes = sorted(set(process_of))
    options.setdefault("split_homes", 2)
    plans, flats, tables = [], [], []
    for case in works:
        own = {p: {r: case.tensors[r] for r, q in enumerate(process_of) if q == p} for p in processes}
        flats.append({p: Flat(case.results(), own[p]) for p in processes})
        places = {Place(r, n) for r, mine in enumerate(case.tensors) for n in range(len(mine))}
        shown = {place for place in places if mapped and not any(place in f.copies for f in flats[-1].values())}
        plans.append(Plan(case.results(), case.shapes(), process_of, mapped=shown, **options))
        tables.append({place: case.tensors[place.rank][place.number].view(-1) for place in shown})

    room = max(plan.half_bytes for plan in plans)
    buffers = {
        p: [torch.full((room,), 255, dtype=torch.uint8) for _ in range(halves)] * (3 - halves) for p in processes
    }
    said = dict.fromkeys(processes, 0)
    became = [{} for _ in works]

    def process(me):
        turn = 0
        for index, (case, plan) in enumerate(zip(works, plans, strict=True)):
            flat = flats[index][me]
            part = Staged(plan, me, flat, buffers, tables[index].__getitem__, turn)
            for number in range(plan.steps):
                for tasks, exchange in ((part.stage, True), (part.compute, False)):
                    todo = list(tasks(number))
                    schedule.dice.shuffle(todo)
                    for task in todo:
                        task()
                        yield True

                    if exchange:
                        said[me] += 1
                        while waits and min(said.values()) < said[me]:
                            yield False

            flat.finish()
            turn += plan.steps
            # The caller has its results, and writes to its tensors at once.
            for result in case.results():
                for place in result.targets:
                    if process_of[place.rank] == me:
                        became[index][place] = case.tensors[place.rank][place.number].clone()

            for mine in (m for r, m in enumerate(case.tensors) if process_of[r] == me):
                for tensor in mine:
                    tensor.view(torch.uint8).fill_(171) if tensor.is_contiguous() else tensor.zero_()

    running = {p: process(p) for p in processes}
    ready = list(processes)
    while running:
        chosen = schedule.choose(ready)
        try:
            moved = next(running[chosen])
        except StopIteration:
            del running[chosen]
            moved = True

        # Who only waited lets the others go first.
        ready = list(running) if moved else [p for p in ready if p != chosen] or list(running)

    return became, plans


def check(make, process_of, **options):
    """All schedules give what the work gives."""
    for schedule in schedules(process_of):
        works = list(make())
        wanted = [case.wanted() for case in works]
        became, plans = simulate(works, process_of, schedule, **options)
        for number, (mine, right) in enumerate(zip(became, wanted, strict=True)):
            assert mine.keys() == right.keys()
            for place, tensor in right.items():
                assert torch.equal(mine[place], tensor), (number, place, process_of, options)

    return plans


LAYOUTS = {
    "2 processes": [0, 1],
    "3 processes": [0, 1, 2],
    "4 processes": [0, 1, 2, 3],
    "2 ranks in each of 2": [0, 0, 1, 1],
    "2 processes in turn": [0, 1, 0, 1],
    "one more in the first": [4, 4, 7],
}


@pytest.mark.parametrize("process_of", LAYOUTS.values(), ids=LAYOUTS)
class TestCollectives:
    @pytest.mark.parametrize("mapped", [False, True], ids=["staged", "mapped"])
    @pytest.mark.parametrize("split_bytes", [0, 1 << 40], ids=["split", "whole"])
    @pytest.mark.parametrize("chunk_bytes", [256, 1 << 20])
    def test_all_after_each_other(self, process_of, chunk_bytes, split_bytes, mapped):
        def make():
            return cases(len(process_of))

        plans = check(make, process_of, chunk_bytes=chunk_bytes, split_bytes=split_bytes, mapped=mapped)
        if chunk_bytes == 256 and not mapped:
            assert all(plan.steps > 3 for plan in plans)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.complex128], ids=str)
    @pytest.mark.parametrize("length", [0, 1, 65, 129])
    def test_odd_lengths_and_dtypes(self, process_of, length, dtype):
        for split_bytes in (0, 1 << 40):
            check(lambda: cases(len(process_of), length, dtype), process_of, chunk_bytes=100, split_bytes=split_bytes)


@pytest.mark.parametrize("process_of", LAYOUTS.values(), ids=LAYOUTS)
class TestTensors:
    @pytest.mark.parametrize("mapped", [False, True], ids=["staged", "mapped"])
    def test_outputs_that_are_inputs(self, process_of, mapped):
        size, add = len(process_of), rule("sum", torch.float32)

        def make():
            inputs = [[values(333, 9 * r + n) for n in range(size)] for r in range(size)]
            yield Case.of(collectives.reduce_scatter(add), [[mine[r], *mine] for r, mine in enumerate(inputs)])
            wholes = [values(size * 333, 20 + r).split(333) for r in range(size)]
            yield Case.of(collectives.all_gather(), [[*mine, mine[r]] for r, mine in enumerate(wholes)])

        check(make, process_of, chunk_bytes=512, mapped=mapped)

    def test_strided_and_conjugate_tensors(self, process_of):
        size, add = len(process_of), rule("sum", torch.complex64)

        def make():
            def strided(code):
                return values(24 * 20, code, torch.complex64).view(24, 20).t()[::2]

            yield Case.of(collectives.all_reduce(add), [[strided(r), strided(r + 50).conj()] for r in range(size)])
            yield Case.of(
                collectives.all_gather(), [[strided(9 * r + n) for n in range(size + 1)] for r in range(size)]
            )

        for mapped in (False, True):
            check(make, process_of, chunk_bytes=512, split_bytes=0, mapped=mapped)

    def test_blocks_larger_than_the_cache(self, process_of, monkeypatch):
        monkeypatch.setattr(staged, "BLOCK_BYTES", 300)
        for dtype in (torch.float32, torch.bfloat16):
            check(lambda: cases(len(process_of), 999, dtype), process_of, chunk_bytes=2048, split_bytes=1000)  # noqa: B023

    def test_many_of_different_sizes_together(self, process_of):
        size = len(process_of)
        lengths = [1, 700, 0, 64, 5, 2000, 130, 65]

        def make():
            mixed = [torch.float32, torch.int8, torch.float64]
            works, counts, tensors = [], [], [[] for _ in range(size)]
            for number, length in enumerate(lengths):
                dtype = mixed[number % 3]
                works.append(collectives.all_reduce(rule("max", dtype)) if number % 2 else collectives.all_gather())
                counts.append(1 if number % 2 else size + 1)
                for r in range(size):
                    tensors[r] += [values(length, 31 * r + 7 * n + number, dtype) for n in range(counts[-1])]

            yield Case.of(collectives.together(works, counts), tensors)

        for split_bytes in (0, 1000):
            check(make, process_of, chunk_bytes=700, split_bytes=split_bytes)

    def test_much_that_one_process_reduces_and_then_much_that_it_stages(self, process_of):
        """Tensors of one grain are reduced by the last home, whole; a half has room for that and for the next step."""
        size, add = len(process_of), rule("sum", torch.float32)

        def make():
            lengths = [GRAIN] * 16 + [16 * GRAIN]
            tensors = [[values(length, 99 * r + n) for n, length in enumerate(lengths)] for r in range(size)]
            yield Case.of(collectives.all_reduce(add), tensors)

        check(make, process_of, chunk_bytes=16 * GRAIN * 4, split_bytes=0)


class TestProof:
    """What the plans rely on is needed, and these tests see it."""

    @staticmethod
    def wrong(**options):
        for schedule in schedules([0, 1]):
            works = [next(cases(2))]
            wanted = works[0].wanted()
            (became,), _ = simulate(works, [0, 1], schedule, chunk_bytes=256, **options)
            if any(not torch.equal(became[place], tensor) for place, tensor in wanted.items()):
                return True

        return False

    @pytest.mark.parametrize("split_bytes", [0, 1 << 40])
    def test_two_halves_and_an_exchange_are_enough(self, split_bytes):
        assert not self.wrong(split_bytes=split_bytes)

    @pytest.mark.parametrize("split_bytes", [0, 1 << 40])
    def test_one_half_is_not(self, split_bytes):
        assert self.wrong(halves=1, split_bytes=split_bytes)

    @pytest.mark.parametrize("split_bytes", [0, 1 << 40])
    def test_halves_without_an_exchange_are_not(self, split_bytes):
        assert self.wrong(waits=False, split_bytes=split_bytes)


def plan_of(case, process_of, **options):
    return Plan(case.results(), case.shapes(), process_of, **options)


def moved(plan, process):
    """Bytes that a process stages, and that it computes from."""
    steps = [plan.step(process, number) for number in range(plan.steps)]
    staged = sum(b.length * b.dtype.itemsize for step in steps for b in step.stage)
    read = sum(b.length * b.dtype.itemsize * len(b.sources) for step in steps for b in step.compute)
    return staged, read


class TestPlans:
    def test_ranks_of_one_process_stage_nothing(self):
        for case in cases(3):
            plan = plan_of(case, [5, 5, 5], chunk_bytes=64)
            assert plan.steps == 1
            assert moved(plan, 5)[0] == 0

    def test_only_what_others_need_is_staged(self):
        size, nbytes = 4, 400 * 4
        found = {}
        names = ["all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "gather", "scatter", "all_to_all"]
        for name, case in zip(names, cases(size), strict=True):
            plan = plan_of(case, range(size), chunk_bytes=512, split_bytes=1 << 40)
            found[name] = [moved(plan, process)[0] // nbytes for process in range(size)]

        assert found == {
            "all_reduce": [2, 2, 2, 2],
            "reduce": [1, 1, 0, 1],
            "reduce_scatter": [3, 3, 3, 3],
            "all_gather": [1, 1, 1, 1],
            "broadcast": [0, 0, 2, 0],
            "gather": [1, 1, 0, 1],
            "scatter": [0, 0, 3, 0],
            "all_to_all": [3, 3, 3, 3],
        }

    def test_split_reductions_read_less(self):
        case = Case.of(
            collectives.all_reduce(rule("sum", torch.float32)), [[values(8 * 8 * GRAIN, r)] for r in range(8)]
        )
        nbytes = 8 * 8 * GRAIN * 4
        whole, split = (plan_of(case, range(8), split_bytes=b) for b in (nbytes + 1, nbytes))
        assert {moved(whole, process) for process in range(8)} == {(nbytes, 8 * nbytes)}
        assert {moved(split, process) for process in range(8)} == {(nbytes * 7 // 8, nbytes + nbytes * 7 // 8)}
        assert split.steps == whole.steps + 1

    def test_reductions_are_split_where_that_moves_less(self):
        def steps(processes, **options):
            case = Case.of(
                collectives.all_reduce(rule("sum", torch.float32)), [[values(99, r)] for r in range(processes)]
            )
            return plan_of(case, range(processes), split_bytes=99 * 4, **options).steps

        assert [steps(n) for n in (1, 2, 3, 4)] == [1, 1, 2, 2]
        assert steps(2, split_homes=2) == 2
        both = [Place(0, 0), Place(1, 0)]
        assert steps(2, mapped=both) == 3  # the last one: nobody reads them any more
        assert steps(2, mapped=both[:1]) == 3

    def test_mapped_tensors_are_staged_only_where_it_is_unsafe(self):
        everywhere = {Place(r, n) for r in range(2) for n in range(4)}
        for case in cases(2):
            reduced_in_place = case.collective.results is not None and not case.reads
            plan = plan_of(case, [0, 1], mapped=everywhere, split_bytes=0)
            assert [moved(plan, process)[0] for process in (0, 1)] == [0, 0]
            whole = plan_of(case, [0, 1], mapped=everywhere, split_bytes=1 << 40)
            assert (moved(whole, 0)[0] > 0) == reduced_in_place

    def test_steps_are_alike(self):
        """No process waits long for another one: each has as much to do in every step."""
        for case in cases(4, length=64 * GRAIN):
            plan = plan_of(case, range(4), chunk_bytes=4096, split_bytes=0)
            for process in range(4):
                steps = [plan.step(process, number) for number in range(plan.steps)]
                sizes = [sum(b.length for b in step.stage) for step in steps if step.stage]
                assert not sizes or max(sizes) - min(sizes) <= 8 * GRAIN

    def test_complex_products_are_computed_once(self):
        """Their last bits depend on where they are computed."""
        what = rule("product", torch.complex64)
        case = Case.of(collectives.all_reduce(what), [[values(100, r, torch.complex64)] for r in range(2)])
        plan = plan_of(case, [0, 1], split_bytes=1 << 40)
        reduced = [b.length for p in (0, 1) for k in range(plan.steps) for b in plan.step(p, k).compute if b.rule]
        assert sum(reduced) == 100

    def test_results_that_nobody_wants(self):
        plan = Plan([Result([], [Place(0, 0)])], [[Shape(torch.float32, (5,))]], [0])
        assert plan.steps == 1
        assert plan.step(0, 0) == ([], [])
        assert Plan([], [[], []], [0, 1]).steps == 1
