"""The dtorch command: how it is called, and how it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dtorch_core
from dtorch_core._selection import registry

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import command_runs

dtorch = command_runs.dtorch


class TestMain:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ([], "the following arguments are required: COMMAND"),
            (["explian"], "invalid choice: 'explian'"),
            (["plugins", "--yaml"], "unrecognized arguments: --yaml"),
            (["check"], "the following arguments are required: NAME"),
        ],
    )
    def test_bad_usage(self, dtorch, arguments, said):
        status, out, err = dtorch(*arguments)
        assert (status, out) == (2, "")
        assert said in err

    def test_help_names_each_command(self, dtorch):
        status, out, _ = dtorch("--help")
        assert status == 0
        for command in ("plugins", "explain", "doctor", "check", "run", "bench"):
            assert f"    {command} " in out

    def test_version(self, dtorch):
        assert dtorch("--version")[:2] == (0, f"dtorch-core {dtorch_core.__version__}\n")

    def test_runs_as_a_module(self, site):
        done = subprocess.run([sys.executable, "-m", "dtorch_core", "--version"], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, f"dtorch-core {dtorch_core.__version__}\n")

    def test_error_of_ours_is_its_message(self, dtorch, site):
        site.add("bad-dist", "raise ValueError('at import')", plugin="bad")
        site.env("DTORCH_STRICT_PLUGINS", "1")
        status, out, err = dtorch("explain")
        assert (status, out) == (1, "")
        assert err.startswith("dtorch explain: plugin 'bad' of bad-dist 1.0 is broken: ValueError: at import")
        assert "Traceback" not in err

    def test_interrupt(self, dtorch, monkeypatch):
        def interrupt():
            raise KeyboardInterrupt

        monkeypatch.setattr(registry, "inspect", interrupt)
        assert dtorch("plugins") == (130, "", "")

    def test_reader_that_has_seen_enough(self, site):
        for i in range(300):
            site.point(f"many-{i}", "no_such_module_of_ours")

        command = f"{sys.executable} -m dtorch_core plugins | head -1"
        done = subprocess.run(
            command, shell=True, env=site.environment, capture_output=True, text=True
        )
        assert len(done.stdout.splitlines()) == 1
        assert done.stderr == ""

    @pytest.mark.parametrize("command", ["plugins", "explain", "explain --json", "doctor", "bench"])
    @pytest.mark.parametrize(
        ("where", "said"),
        [
            ("/dev/full", "standard output can't be written: No space left on device"),
            ("&-", "standard output is closed: there is nowhere to print to; > /dev/null is for seeing nothing"),
        ],
    )
    def test_answer_that_can_not_be_written(self, site, command, where, said):
        if command == "bench":
            pytest.importorskip("dtorch_samedevice_group")
            command += " --only collectives --ranks-as threads --operations barrier --ranks 2 --rounds 1 --no-gloo"

        done = subprocess.run(
            f"{sys.executable} -m dtorch_core {command} >{where}",
            shell=True, env=site.environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (1, f"dtorch {command.split()[0]}: {said}\n")

    def test_script_whose_output_is_closed_prints_nowhere(self, site, tmp_path):
        (tmp_path / "script.py").write_text("print('hello')\nopen('done', 'w').close()\n")
        command = f"{sys.executable} -m dtorch_core run --nproc 1 script.py >&-"
        done = subprocess.run(
            command, shell=True, env=site.environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert (tmp_path / "done").exists()
