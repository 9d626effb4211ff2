"""``dtorch bench``: what it makes of its arguments; and one small run."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
import types
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dtorch_core.bench import exchange, sizes
from dtorch_core.bench.cells import OPERATIONS
from dtorch_core.bench.groups import DTORCH
from dtorch_core.bench.sizes import GIB, KIB, MIB
from dtorch_core.cli import bench

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import bench_runs

dtorch = bench_runs.dtorch


class TestCommand:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--sizes", "12"], "a size is a multiple of 1 KiB: every rank has a whole share of it; '12' is not"),
            (["--sizes", "1TB"], "a whole number of KiB, MiB, GiB or TiB, or of bytes (as in 64MiB), not '1TB'"),
            (["--max-bytes", "much"], "not 'much'"),
            (["--sizes", "1MiB", "--max-bytes", "1KiB"], "no size is left: all are larger than 1 KiB"),
            (["--operations", "allreduce"], "no 'allreduce'. Did you mean 'all_reduce'? There are: all_reduce, "),
            (["--profile", "bcast"], "--profile: there is no 'bcast'. Did you mean 'broadcast'?"),
            (["--plot", "x.png", "--only", "exchange"], "--plot is of collectives: not with --only exchange"),
            (["--ranks", "2", "--only", "exchange"], "--ranks is of collectives and own-gpus: not with "),
            (["--profile", "--plot", "x.png"], "--plot is not for --profile: it measures one operation of one size, "),
            (["--profile", "--ranks", "3"], "--ranks is not for --profile"),
            (["--profile", "--no-gloo"], "--no-gloo is not for --profile"),
            (["--profile", "--operations", "all_reduce"], "--operations is not for --profile"),
            (["--profile", "--only", "exchange"], "--only is not for --profile"),
            (["--profile", "--max-bytes", "1GiB"], "--max-bytes is not for --profile"),
            (["--profile", "--sizes", "1KiB", "2KiB"], "--profile measures one size: give --sizes one, not 2"),
            (["--profile", "barrier", "--sizes", "1KiB"], "--sizes is not for --profile barrier: it moves no bytes"),
            (["--plot", "x.svg"], "--plot writes a PNG: name it so, as in FILE.png, not 'x.svg'"),
            (["--plot", "/no/such/folder/x.png"], "--plot: '/no/such/folder/x.png' can't be written: No such file"),
            (["--json", "/"], "--json: '/' can't be written: Is a directory"),
            (["--json", "/proc/x.json"], "--json: '/proc/x.json' can't be written: No such file or directory"),
            (["--json", ""], "--json: '' can't be written: No such file or directory"),
            (["--only", "own-gpus"], "--only own-gpus needs --device cuda"),
            (["--device", "cuda:99"], "there is no cuda:99: torch sees "),
            (["--json", "/no/such/folder/x.json"], "'/no/such/folder/x.json' can't be written: No such file"),
            (["--ranks", "2", "100000"], "threads or processes of this machine, 128 at most, not 100000"),
            (["--ranks", "none"], "must be a number of at least 1"),
        ],
    )
    def test_refusal(self, dtorch, monkeypatch, arguments, said):
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "matplotlib" or find(name))
        status, out, err = dtorch(*arguments)
        assert (status, out) == (2, "")
        assert said in err

    def test_plot_without_matplotlib_is_refused_before_anything_is_measured(self, dtorch, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        status, out, err = dtorch("--plot", "x.png")
        assert (status, out) == (2, "")
        assert err == 'dtorch bench: error: --plot needs matplotlib: pip install "dtorch-core[bench]"\n'

    def test_file_is_as_it_was_until_there_are_results(self, dtorch, tmp_path):
        old, new, link = tmp_path / "old.json", tmp_path / "new.json", tmp_path / "link.json"
        old.write_text("of yesterday")
        link.symlink_to(new)
        for path in (old, new, link):
            assert dtorch("--json", str(path), "--sizes", "much")[0] == 2

        assert old.read_text() == "of yesterday" and not new.exists() and link.is_symlink()

    def test_pipe_is_not_opened_and_closed_before(self, dtorch, tmp_path):
        path = tmp_path / "pipe"
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        try:
            assert dtorch("--json", str(path), "--sizes", "much")[0] == 2
            assert poll.poll(0) == [], "its reader sees an end"
        finally:
            os.close(reader)

    def test_help_names_each_operation_and_size(self, dtorch):
        words = dtorch("--help")[1].replace(",", " ").replace("(", " ").split()
        assert set(OPERATIONS) <= set(words)
        assert {sizes.size(nbytes).replace(" ", "") for nbytes in sizes.SIZES} <= set(words)

    def test_sizes_end_at_the_largest(self):
        def chosen(**named):
            options = {"sizes": [], "max_bytes": None, "quick": False, "device": "cpu"}
            return list(bench._sizes(types.SimpleNamespace(**options | named)))

        assert chosen() == [nbytes for nbytes in sizes.SIZES if nbytes <= 64 * MIB]
        assert chosen(device="cuda:0")[-1] == 256 * MIB
        assert chosen(max_bytes="1GiB") == list(sizes.SIZES)
        assert chosen(sizes=["1GiB", "1KiB"]) == [KIB, GIB]
        assert chosen(quick=True) == [KIB, MIB, 64 * MIB]

    def test_other_commands_do_not_import_it_and_it_imports_no_plugin(self):
        code = (
            "import dtorch_core.cli, sys\n"
            "print([name for name in sys.modules if '.bench' in name])\n"
            "import dtorch_core.bench.program\n"
            "print([name for name in sys.modules if name.startswith('dtorch_') and not name.startswith('dtorch_core')])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert done.stdout == "['dtorch_core.cli.bench']\n[]\n", done.stderr

    def test_what_is_not_installed_is_skipped_or_refused(self, dtorch, monkeypatch):
        from dtorch_core import NoBackendError
        from dtorch_core.bench import program

        error = NoBackendError("no store\nhere")
        monkeypatch.setattr(program, "choose", lambda kind, topology: (None, error if kind == "store" else None))
        status, out, err = dtorch("--sizes", "1KiB")
        assert (status, out) == (1, "") and err.startswith("dtorch bench: no store\nhere")


class TestRun:
    def test_one_operation_of_threads(self, dtorch, tmp_path):
        pytest.importorskip("dtorch_samedevice_group")
        path = tmp_path / "bench.json"
        status, out, _ = dtorch(
            "--only", "collectives", "--ranks", "2", "--ranks-as", "threads", "--no-gloo", "--rounds", "2",
            "--operations", "all_reduce", "--sizes", "1KiB", "32KiB", "--json", str(path),
        )  # fmt: skip
        assert status == 0
        assert "\nall_reduce  1 KiB " in out and "\nall_reduce  32 KiB " in out and "fixed cost" in out
        told = json.loads(path.read_text())
        assert [cell["bytes"] for cell in told["collectives"]] == [KIB, 32 * KIB]
        for cell in told["collectives"]:
            assert 0 < cell["subjects"][DTORCH]["fraction_of_limit"] < 20
            assert len(cell["subjects"][DTORCH]["rounds"]) == 2

    def test_one_rank_copies(self, dtorch):
        pytest.importorskip("dtorch_samedevice_group")
        status, out, _ = dtorch(
            "--only", "collectives", "--ranks", "1", "--ranks-as", "threads", "--no-gloo", "--rounds", "1",
            "--sizes", "1KiB", "2KiB",
        )  # fmt: skip
        assert status == 0 and "\n1 rank " in out and "\n1 rank: time = " in out
        for operation in OPERATIONS:
            assert f"\n{operation} " in out

    @pytest.mark.parametrize("arguments", [["--profile"], ["--only", "collectives", "--ranks", "2", "--no-gloo"]])
    def test_what_was_measured_is_not_lost_with_a_file(self, dtorch, monkeypatch, arguments):
        pytest.importorskip("dtorch_samedevice_group")
        status, out, err = dtorch(
            *arguments, "--ranks-as", "threads", "--rounds", "1", "--sizes", "1KiB", "--json", "/dev/full"
        )  # fmt: skip
        assert (status, err) == (1, "dtorch bench: /dev/full can't be written: No space left on device\n")
        assert "all_reduce" in out

    def test_what_was_measured_is_not_lost_with_standard_output(self, tmp_path):
        pytest.importorskip("dtorch_samedevice_group")
        command = (
            f"{sys.executable} -m dtorch_core bench --only collectives --ranks-as threads --operations barrier "
            f"--ranks 2 --rounds 1 --no-gloo --json x.json >/dev/full"
        )
        done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 1 and "standard output can't be written" in done.stderr
        assert json.loads((tmp_path / "x.json").read_text())["collectives"]

    def test_barrier_has_no_picture(self, dtorch, monkeypatch, tmp_path):
        pytest.importorskip("dtorch_samedevice_group")
        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "matplotlib" or find(name))
        path = tmp_path / "x.png"
        status, out, _ = dtorch(
            "--only", "collectives", "--ranks", "2", "--ranks-as", "threads", "--no-gloo", "--rounds", "1",
            "--operations", "barrier", "--plot", str(path),
        )  # fmt: skip
        assert status == 0 and not path.exists()
        assert f"\nskipped: {path}: no collective of tensors was measured\n" in out

    def test_exchange_of_processes(self, dtorch):
        pytest.importorskip("dtorch_file_store")
        status, out, _ = dtorch(
            "--only", "exchange", "--ranks-as", "processes", "--rounds", "1", "--sizes", "1KiB", "--json"
        )  # fmt: skip
        assert status == 0
        (one,) = json.loads(out)["exchange"]
        assert set(one["subjects"]) == {*exchange._BY_CREW, exchange.PUBLISHED_SMALL, exchange.QUEUE}
        assert all(each["median_seconds"] > 0 for each in one["subjects"].values())
