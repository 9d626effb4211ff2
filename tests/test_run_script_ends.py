"""dtorch run: what the ranks print, and how it ends when one of them fails."""

import re
from pathlib import Path

import pytest

from dtorch_core.cli import main

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import script_runs

run = script_runs.run


class TestOutput:
    def test_lines_are_whole_and_labelled(self, run):
        body = """
        dist.init_process_group("gloo")
        for number in range(50):
            print("a", end=" ", flush=True)
            dist.barrier()
            print("b", rank, number)

        thread = threading.Thread(target=lambda: print("helper"))
        thread.start()
        thread.join()
        sys.stdout.write("two\\nlines\\n")
        print("10 %\\r20 %", end="\\r30 %")
        """
        _, out, _ = run(body)
        for rank in range(2):
            own = [line for line in out if line.startswith(f"[rank {rank}] ")]
            rest = [f"[rank {rank}] {text}" for text in ("helper", "two", "lines", "30 %")]
            assert sorted(own) == sorted([*(f"[rank {rank}] a b {rank} {number}" for number in range(50)), *rest])

        assert len(out) == 108

    def test_errors_are_labelled_as_well(self, run):
        status, out, err = run("print('bad', rank, file=sys.stderr)")
        assert (status, out, sorted(err)) == (0, [], ["[rank 0] bad 0", "[rank 1] bad 1"])


class TestFailure:
    def test_the_first_failure_ends_all_with_its_traceback(self, run):
        body = """
        dist.init_process_group("gloo")
        dist.barrier()
        if rank == 1:
            raise ValueError("no")

        dist.barrier()
        print("not reached")
        """
        status, out, err = run(body, nproc=3)
        assert (status, out) == (1, [])
        assert "dtorch run: rank 1 of 3 failed with ValueError: no" in err
        assert any("script.py" in line and "line 11" in line for line in err) and "ValueError: no" in err

    @pytest.mark.parametrize(
        ("code", "status"), [("", 0), ("0", 0), ("None", 0), ("7", 7), ("'text'", 1), ("256 + 3", 3), ("True", 1)]
    )
    def test_exit_status_is_the_scripts(self, run, code, status):
        assert run(f"sys.exit({code})")[0] == status

    @pytest.mark.parametrize("ranks_as", ["threads", "processes"])
    @pytest.mark.parametrize(
        ("code", "lines", "status"),
        [
            ("7", [], 7),
            ("'two\\nlines'", ["[rank 1] two", "[rank 1] lines"], 1),
            ("2.5", ["[rank 1] 2.5"], 1),
            ("-1", [], 255),
        ],
    )
    def test_exit_is_told_as_python_does(self, run, ranks_as, code, lines, status):
        """Without a traceback."""
        got, out, err = run(f"if rank == 1: sys.exit({code})", "--ranks-as", ranks_as)
        assert (got, out) == (status, [])
        assert err == [*lines, f"dtorch run: rank 1 of 2 ended with exit status {status}"]

    def test_exit_says_who_did_not_return(self, run):
        body = """
        dist.init_process_group("gloo")
        dist.barrier()
        if rank == 0:
            sys.exit(3)

        time.sleep(60)
        """
        status, _, err = run(body, "--ranks-as", "processes")
        assert status == 3
        assert re.fullmatch(
            r"dtorch run: rank 0 of 2 ended with exit status 3; rank 1 did not return within 1 s, so its process was "
            r"ended \(pid \d+\)",
            err[-1],
        )

    def test_a_process_may_end_without_exit_handlers(self, run):
        body = """
        dist.init_process_group("gloo")
        dist.barrier()
        print("through", flush=True)
        os._exit(0)
        """
        assert run(body, "--ranks-as", "processes")[:2] == (0, [f"[rank {rank}] through" for rank in range(2)])

    @pytest.mark.parametrize(
        ("code", "status", "told"), [(5, 5, "ended with exit status 5"), (0, 1, "rank 0 of 2 failed with PeerLost")]
    )
    def test_exit_of_a_process_is_the_scripts(self, run, code, status, told):
        """One that says nothing: by os._exit, as a C library's exit does."""
        body = f"""
        dist.init_process_group("gloo")
        dist.barrier()
        if rank == 1:
            os._exit({code})

        dist.barrier()
        """
        got, _, err = run(body, "--ranks-as", "processes")
        assert got == status
        assert any(told in line for line in err)

    def test_a_script_that_is_not_there_is_refused(self, capfd):
        assert main(["run", "nonesuch.py"]) == 2
        assert "dtorch run: error: there is no file 'nonesuch.py'" in capfd.readouterr().err

    @pytest.mark.parametrize("name", ["nosuch.module", "./script.py", "", "__main__"])
    def test_a_module_that_is_not_there_is_refused(self, capfd, name):
        assert main(["run", "-m", name]) == 2
        shown = name.partition(".")[0] or name
        assert f"dtorch run: error: there is no module {shown!r}, neither installed nor in" in capfd.readouterr().err

    def test_a_backend_that_is_not_there_is_refused(self, capfd):
        assert main(["run", "--nccl-as", "samedevise", __file__]) == 2
        assert "there is no group backend 'samedevise'. Did you mean 'samedevice'?" in capfd.readouterr().err

    def test_a_script_that_is_no_python_is_its_ranks_failure(self, run):
        status, _, err = run("", begin="x = = 3\n")
        assert status == 1 and any("SyntaxError" in line for line in err)
