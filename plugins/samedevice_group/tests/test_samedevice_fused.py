"""Fused kernels without a GPU: what they compute (triton interprets them), and what is decided before a launch."""

import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import dtorch_samedevice_group
import pytest
import torch
from dtorch_samedevice_group import fused, fused_launch
from dtorch_samedevice_group.fused_launch import MOST, Launcher
from dtorch_samedevice_group.places import alignment, apart, step_of, word
from dtorch_samedevice_group.recipes import Recipe, recipe

from dtorch_core import DtorchError
from dtorch_core._selection import catalogue
from dtorch_core.reduction import OPS, rule

HERE = Path(__file__).parent
LIMIT = 240
FLOATS = torch.float32, torch.float64, torch.float16, torch.bfloat16
KINDS = *FLOATS, torch.int8, torch.int32, torch.int64, torch.uint64, torch.bool, torch.complex64


@pytest.mark.parametrize("part", ["places", "copies", "reductions"])
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="triton's interpreter needs NumPy")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU itself tells")
def test_interpreted_kernels_do_what_torch_does(part):
    done = subprocess.run(
        [sys.executable, "-P", str(HERE / "fused_program.py"), part],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 20


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are not compiled")
def test_compiled_kernel_serves_all_numbers():
    """Only the constants are compiled in: what was compiled for the first call is launched for the next ones."""
    fused_kernels = importlib.import_module("dtorch_samedevice_group.fused_kernels")
    for kernel in (fused_kernels.reduce, fused_kernels.copy):
        numbers = [param for param in kernel.params if not param.is_constexpr]
        assert len(numbers) == 2 * MOST + 3
        assert all(param.do_not_specialize and param.annotation_type == "i64" for param in numbers)


class TestRecipes:
    def test_table(self):
        """What is fused is what the table in the docstring says."""
        fused_ops = {}
        for op in OPS:
            for dtype in KINDS:
                try:
                    known = recipe(rule(op, dtype), None)
                except DtorchError:
                    continue

                if known is not None:
                    fused_ops.setdefault(dtype, set()).add(op)

        numbers = {"sum", "product", "min", "max", "avg"}
        assert fused_ops == {
            torch.float64: {"sum", "product", "avg"},
            **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), numbers),
            **dict.fromkeys((torch.int32, torch.int64), {"sum", "min", "max"}),
        }

    def test_half_is_added_up_in_float32_and_ordered_as_it_is(self):
        assert recipe(rule("avg", torch.float16), None) == Recipe("add", True, torch.float16, torch.float32)
        assert recipe(rule("min", torch.bfloat16), None) == Recipe("min", False, torch.bfloat16, torch.bfloat16)

    def test_factor_is_left_to_torch(self):
        assert recipe(rule("premul_sum", torch.float32), 0.5) is None


class TestPlaces:
    def test_step(self):
        assert step_of([[100, 140, 180], [500, 540, 580]], 40) == 40
        assert step_of([[100, 164, 228]], 40) == 64
        assert step_of([[7], [9]], 40) == 0

    @pytest.mark.parametrize(
        "rows",
        [
            [[100, 140, 181]],
            [[100, 140], [500, 541]],
            [[100, 139]],
            [[140, 100]],
            [[100, 100]],
            [None, [100, 140]],
            [[100, 140], None],
            [[100], None],
        ],
    )
    def test_no_step(self, rows):
        assert step_of(rows, 40) is None

    def test_apart(self):
        assert apart([0, 40], 40, [80, 80, 100], 40)
        assert apart([100], 10, [], 0)
        assert apart([], 0, [5, 5], 10)

    @pytest.mark.parametrize(
        ("written", "read"),
        [([0, 39], []), ([0, 0], []), ([0], [0]), ([0], [39]), ([39], [0]), ([0, 80], [41]), ([60], [0, 40])],
    )
    def test_not_apart(self, written, read):
        assert not apart(written, 40, read, 40)

    def test_long_span_is_not_forgotten_behind_a_short_one(self):
        assert not apart([200], 10, [0], 1000)
        assert not apart([0, 2000], 1000, [500], 1)
        assert apart([1000], 10, [0], 1000)

    def test_alignment(self):
        assert alignment(4, 0, 160, 3200) == 16
        assert alignment(4, 164, 160) == 4
        assert alignment(4, 162) == 0

    def test_word(self):
        assert word(160, 0, 320) == (8, 16)
        assert word(164, 0, 320) == (4, 16)
        assert word(161, 16) == (1, 16)
        assert word(160, 8, 328) == (8, 8)
        assert word(160, 2, 320) == (2, 2)


class TestDecisions:
    """With a launcher that only notes what it is asked for."""

    how = Recipe("add", False, torch.float32, torch.float32)

    @pytest.fixture(autouse=True)
    def noted(self, monkeypatch):
        class Noting:
            usable = True
            launches = []

            def launch(self, variant, device, grid, *others):
                self.launches.append((variant, grid))
                return True

        self.launcher = Noting()
        self.launcher.launches = []
        monkeypatch.setattr(fused, "launcher", self.launcher)

    def test_cpu_tensors_are_none_of_its_business(self):
        assert not fused.takes(torch.ones(3))

    def test_one_launch_for_all_blocks(self):
        x = [torch.ones(5000) for _ in range(3)]
        assert fused.reduce(self.how, x, x)
        ((variant, grid),) = self.launcher.launches
        assert variant[:4] == ("reduce", 3, 3, True)
        assert grid == (-(-20000 // fused_launch.BLOCK_BYTES), 1, 1)

    def test_more_ranks_than_a_kernel_takes(self):
        x = [torch.ones(8) for _ in range(MOST + 1)]
        assert not fused.reduce(self.how, x, x)
        assert not self.launcher.launches
        assert not fused.spread([x]), "a source and 16 targets fit"
        assert len(fused.spread([[*x, torch.ones(8)]])) == 1
        assert not fused.exchange([[y] for y in x], [list(torch.ones(17 * 8).chunk(17))])

    @pytest.mark.parametrize(
        "other",
        [
            torch.ones(16)[::2],
            torch.ones(9)[:9],
            torch.ones(8, dtype=torch.float64),
            torch._neg_view(torch.ones(8)),
            torch.ones(2, 4).t(),
        ],
        ids=["strided", "longer", "wider", "negative", "transposed"],
    )
    def test_tensors_that_are_not_alike_in_memory(self, other):
        x = torch.ones(8)
        assert not fused.reduce(self.how, [x, other], [x, other])
        assert len(fused.spread([[x, torch.ones(8), other]])) == 1
        assert not fused.exchange([[x], [other]], [list(torch.ones(16).chunk(2))])
        assert not self.launcher.launches

    def test_tensors_across_each_other(self):
        room = torch.ones(100)
        a, b = room[:50], room[49:99]
        assert not fused.reduce(self.how, [a, b], [a, b])
        assert not fused.reduce(self.how, [a, b], [a])
        assert fused.reduce(self.how, [a, b], [torch.ones(50)])
        assert len(fused.spread([[a, b, torch.ones(50)]])) == 1
        assert not fused.exchange([[a], [torch.ones(50)]], [[b, torch.ones(50)]])

    def test_tensors_of_their_own_are_not_taken_for_parts_of_one(self):
        """By chance they lie evenly, and the next time they do not: each time another kernel would be compiled."""
        room = torch.ones(40)
        even = [torch.empty(0).set_(part.untyped_storage(), 0, (10,)) for part in (torch.ones(10), torch.ones(10))]
        parts = list(room.split(10))
        assert fused._row(parts, 40) == [room.data_ptr() + 40 * number for number in range(4)]
        assert fused._row(even, 40) is None
        assert fused._row(even[:1], 40) == [even[0].data_ptr()]

    def test_parts_of_another_processs_tensor_are_storages(self):
        memory = bytearray(160)
        parts = [torch.frombuffer(memory, dtype=torch.float32, count=10, offset=40 * number) for number in range(4)]
        first = parts[0].data_ptr()
        assert fused._row(parts, 40) == [first + 40 * number for number in range(4)]

    def test_reduce_scatter_in_place_is_only_for_ones_own_part(self):
        inputs = [list(torch.ones(40).chunk(4)) for _ in range(4)]

        def left(*outputs):
            self.launcher.launches.clear()
            return fused.reduce_each(self.how, [(out, *[x[k] for x in inputs]) for k, out in enumerate(outputs)])

        assert not left(*[inputs[k][k] for k in range(4)])
        assert len(self.launcher.launches) == 1
        assert not left(*[inputs[k][0] for k in range(4)])
        assert len(self.launcher.launches) == 4, "an output is read for another one: not in one launch"

    def test_reduce_scatter_in_place_of_inputs_across_each_other(self):
        room = torch.ones(60)
        inputs = [list(room[start : start + 20].chunk(2)) for start in (0, 15)]
        jobs = [(out, *[x[k] for x in inputs]) for k, out in enumerate((inputs[0][0], torch.ones(10)))]
        fused.reduce_each(self.how, jobs)
        assert [variant[3] for variant, _ in self.launcher.launches] == [True, True], "each job by itself"
        self.launcher.launches.clear()
        fused.reduce_each(self.how, [(torch.ones(10), *job[1:]) for job in jobs])
        assert [variant[3] for variant, _ in self.launcher.launches] == [False], "what is only read may lie anyhow"

    def test_failed_launch_leaves_all_to_torch(self):
        self.launcher.launch = lambda *_: False
        x = [torch.ones(8) for _ in range(3)]
        versions = [t._version for t in x]
        jobs = [tuple(x)]
        assert not fused.reduce(self.how, x, x)
        assert fused.reduce_each(self.how, jobs) == jobs
        assert fused.spread(jobs) == jobs
        assert not fused.exchange([x], [[torch.ones(8)] for _ in range(3)])
        assert [t._version for t in x] == versions

    def test_what_was_written_is_no_longer_what_autograd_saved(self):
        x = [torch.ones(8) for _ in range(3)]
        assert fused.reduce(self.how, x, x)
        assert [t._version for t in x] == [1, 1, 1]

    def test_nothing_is_launched_for_nothing(self):
        x = [torch.ones(0) for _ in range(3)]
        assert not fused.reduce(self.how, x, x)
        fused.spread([x])
        fused.exchange([x], [[t] for t in x])
        assert not self.launcher.launches


class TestLauncher:
    """With a kernel that triton has not made."""

    @pytest.fixture(autouse=True)
    def without_a_gpu(self, monkeypatch):
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        self.launcher = Launcher()
        self.launcher.usable = True

    def launch(self, launcher=None):
        return (launcher or self.launcher).launch(("reduce",), 0, (1, 1, 1), [1, 2], [3], 10)

    @staticmethod
    def compiled(calls, error=None):
        class Compiled:
            def __getitem__(self, grid):
                def runner(*args, stream=None):
                    if error is not None:
                        raise error

                    calls.append((grid, args, stream))

                return runner

        return Compiled()

    def test_doctor_knows_the_variable(self):
        known = {name for name, text in catalogue.VARIABLES.items() if "dtorch-samedevice-group" in text}
        assert known == {fused_launch.VARIABLE}

    def test_environment_turns_it_off(self, monkeypatch):
        monkeypatch.setenv("DTORCH_FUSED", "0")
        assert not Launcher().usable
        monkeypatch.setenv("DTORCH_FUSED", "1")
        assert Launcher().usable

    def test_handle_gets_addresses_padded_and_the_stream(self):
        calls = []
        self.launcher._compiled[0, ("reduce",)] = self.compiled(calls), ("constant",)
        assert self.launch()
        assert calls == [((1, 1, 1), (1, 2, *[0] * 14, 3, *[0] * 15, 10, 0, 0, "constant"), 77)]

    def test_handle_that_takes_other_arguments_is_not_asked_again(self, monkeypatch):
        calls, asked = [], []
        handle = self.compiled(calls, TypeError("takes 3 arguments"))
        self.launcher._compiled[0, ("reduce",)] = handle, ("constant",)

        class Kernel:
            def __getitem__(self, grid):
                return lambda *args, **options: asked.append((grid, args, options))

        monkeypatch.setattr(self.launcher, "_slow", lambda variant: fused_launch._Slow(Kernel()))
        assert self.launch() and self.launch()
        assert len(asked) == 2 and asked[0][1][-1] == "constant" and asked[0][2]["enable_fp_fusion"] is False
        assert self.launcher.usable

    def test_failure_is_said_once_and_ends_it(self):
        self.launcher._compiled[0, ("reduce",)] = self.compiled([], RuntimeError("no C compiler")), ()
        with pytest.warns(RuntimeWarning, match="no C compiler.*DTORCH_FUSED=0"):
            assert not self.launch()

        assert not self.launcher.usable
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not self.launch()

    def test_first_launch_holds_no_lock(self, monkeypatch):
        """It may have to wait until the GPU is through with something, and others compile meanwhile."""
        done = []

        class Kernel:
            def warmup(self, *args, grid, **options):
                done.append(("compiled", launcher._compiling.locked(), args[-1], options["enable_fp_fusion"]))

            def __getitem__(self, grid):
                return lambda *args, **options: done.append(("launched", launcher._compiling.locked(), grid))

        launcher = self.launcher
        kernels = SimpleNamespace(variant=lambda *variant: (Kernel(), ("constant",)))
        monkeypatch.setattr(dtorch_samedevice_group, "fused_kernels", kernels, raising=False)
        assert self.launch()
        assert done == [("compiled", True, "constant", False), ("launched", False, (1, 1, 1))]

    def test_nothing_is_loaded_into_a_graph(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert not self.launch()
        assert self.launcher.usable, "the next call may"
        calls = []
        self.launcher._compiled[0, ("reduce",)] = self.compiled(calls), ()
        assert self.launch() and calls, "what is loaded is captured"

    def test_without_triton_nothing_is_said(self, monkeypatch):
        def missing(variant):
            raise ModuleNotFoundError("No module named 'triton'", name="triton")

        monkeypatch.setattr(self.launcher, "_slow", missing)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not self.launch()

        assert not self.launcher.usable
