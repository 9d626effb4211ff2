"""The dtorch command: what it prints, its exit status, and that it starts whatever plugins do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import distributed_c10d

import dtorch_core
from dtorch_core import _metadata, _registry, _thread_world, _torch_kernels, _torch_state, explain, select
from dtorch_core._topology import imagine
from dtorch_core.cli import _installations, check, doctor, main
from dtorch_core.testing._harness import DEVICES

PLUGIN = """
    from dtorch_core import BackendSpec, Support, hookimpl

    {before}

    @hookimpl
    def dtorch_register_tensor_stores():
        return [BackendSpec({name!r}, "a:b", lambda topology: Support.yes(1000, "fits"), capabilities={words!r})]
"""

DOCTOR = """
    from dtorch_core import hookimpl

    @hookimpl
    def dtorch_doctor():
        {body}
"""

PARTS = {
    "system", "environment", "plugins", "metadata", "torch", "torch.distributed", "ranks as threads", "selection",
    "reports", "flight recorder",
}  # fmt: skip
"""Of the doctor's report."""


def source(name, before="", words=frozenset()):
    return PLUGIN.replace("{before}", before).replace("{name!r}", repr(name)).replace("{words!r}", repr(set(words)))


@pytest.fixture
def dtorch(site, capsys, monkeypatch):
    """Run the command in this process, as if nothing had been loaded yet: its status, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(_registry, "_current", None)
        capsys.readouterr()
        status = main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def fresh(site, code, *arguments):
    """Run ``code`` and then the command in a Python of its own that sees the site."""
    program = f"{code}\nimport sys\nfrom dtorch_core.cli import main\nsys.exit(main({list(arguments)!r}))"
    return subprocess.run(
        [sys.executable, "-c", program],
        env=site.environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


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

        monkeypatch.setattr(_registry, "inspect", interrupt)
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


class TestPlugins:
    def test_lists_what_each_offers(self, dtorch, site):
        module = site.add("mine-dist", source("my_store", words={"cpu", "zero_copy"}), plugin="mine", version="1.5")
        status, out, _ = dtorch("plugins")
        assert status == 0
        lines = out.splitlines()
        at = lines.index(f"mine  ok  mine-dist 1.5  ({module})")
        assert lines[at + 1].split() == ["store", "my_store", "cpu", "zero_copy"]
        assert lines[at + 2].split() == ["hooks", "dtorch_register_tensor_stores"]

    def test_json(self, dtorch, site):
        module = site.add("mine-dist", source("my_store", words={"cpu"}), plugin="mine")
        status, out, _ = dtorch("plugins", "--json")
        facts = json.loads(out)
        (mine,) = [plugin for plugin in facts["plugins"] if plugin["name"] == "mine"]
        assert status == 0
        assert mine == {
            "name": "mine",
            "distribution": "mine-dist",
            "version": "1.0",
            "module": module,
            "state": "ok",
            "why": "",
            "imports_torch": False,
            "hooks": ["dtorch_register_tensor_stores"],
            "backends": {"store": [{"name": "my_store", "capabilities": ["cpu"]}]},
        }
        assert facts["problems"] == []

    def test_shows_root_causes(self, dtorch, site):
        site.add("bad-dist", "raise ValueError('at import')", plugin="bad")
        site.add("exits-dist", "import sys; sys.exit(3)", plugin="exits")
        status, out, _ = dtorch("plugins")
        assert status == 0
        assert "bad  broken  bad-dist 1.0" in out
        assert "  ValueError: at import (" in out
        assert "  SystemExit: 3 (" in out

    def test_shows_a_conflict_on_both(self, dtorch, site):
        site.add("one-dist", source("clash"), plugin="one")
        site.add("two-dist", source("clash"), plugin="two")
        _, out, _ = dtorch("plugins")
        assert "its store backend 'clash' is also offered by two-dist 1.0; neither is used" in out
        assert "its store backend 'clash' is also offered by one-dist 1.0; neither is used" in out
        states = {plugin["name"]: plugin["state"] for plugin in json.loads(dtorch("plugins", "--json")[1])["plugins"]}
        assert states["one"] == states["two"] == "broken"

    def test_shows_what_is_disabled_and_names_that_nobody_has(self, dtorch, site):
        site.add("mine-dist", source("my_store"), plugin="mine")
        site.env("DTORCH_DISABLE_PLUGINS", "mine,mien")
        _, out, _ = dtorch("plugins")
        assert "mine  disabled  mine-dist 1.0" in out
        assert "problem: DTORCH_DISABLE_PLUGINS names 'mien'" in out

    def test_says_what_to_install_where_nothing_is(self, dtorch, monkeypatch):
        monkeypatch.setattr("dtorch_core._metadata.entry_points", lambda: ([], []))
        status, out, _ = dtorch("plugins")
        assert status == 0
        assert "No store backend is installed: pip install dtorch-memory-store" in out
        assert "No group backend is installed: pip install dtorch-samedevice-group" in out

    def test_works_in_strict_mode(self, dtorch, site):
        site.add("bad-dist", "raise ValueError('at import')", plugin="bad")
        site.env("DTORCH_STRICT_PLUGINS", "1")
        status, out, _ = dtorch("plugins")
        assert status == 0
        assert "ValueError: at import" in out

    def test_needs_no_torch_beside_broken_plugins(self, site):
        site.add("mine-dist", source("my_store"), plugin="mine")
        site.add("bad-dist", "import torch", plugin="bad")
        site.add("exits-dist", "raise SystemExit(3)", plugin="exits")
        done = fresh(site, "import sys; sys.modules['torch'] = None", "plugins", "--json")
        assert done.returncode == 0, done.stderr
        states = {plugin["name"]: plugin["state"] for plugin in json.loads(done.stdout)["plugins"]}
        assert (states["mine"], states["bad"], states["exits"]) == ("ok", "broken", "broken")

    def test_imports_no_torch(self, site):
        site.add("mine-dist", source("my_store"), plugin="mine")
        code = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))"
        done = fresh(site, code, "plugins")
        assert (done.returncode, done.stderr) == (0, "False\n")

    def test_names_a_plugin_that_imports_torch(self, site):
        site.add("heavy-dist", source("heavy", before="import torch"), plugin="heavy")
        done = fresh(site, "", "plugins")
        assert "problem: plugin 'heavy' of heavy-dist 1.0 imports torch to be listed" in done.stdout

    def test_what_a_plugin_prints_stays_out_of_the_answer(self, site):
        site.add("loud-dist", source("loud", before="print('hello from a plugin')"), plugin="loud")
        done = fresh(site, "", "plugins", "--json")
        assert "loud" in [plugin["name"] for plugin in json.loads(done.stdout)["plugins"]]
        assert "hello from a plugin" in done.stderr


class TestExplain:
    @pytest.fixture(autouse=True)
    def _stores(self, site):
        site.backend("best-dist", "best", "Support.yes(2000, 'best of all')", plugin="best")
        one = "Support.yes(1000, 'one process') if topology.same_process else Support.no('several processes')"
        site.backend("local-dist", "local", one, plugin="local")

    @pytest.mark.parametrize(
        ("arguments", "topology"),
        [
            ([], imagine(2)),
            (["--ranks", "4"], imagine(4)),
            (["--ranks", "4", "--ranks-as", "threads", "--device", "cuda:0"], imagine(4, devices=("cuda:0",))),
            (["--ranks-as", "processes", "--device", "cuda"], imagine(2, "processes", ("cuda:0",))),
            (["--devices", "cuda:0,cuda:1"], imagine(2, devices=("cuda:0", "cuda:1"))),
            (["--ranks", "4", "--hosts", "2"], imagine(4, hosts=2)),
            (
                ["--ranks", "4", "--ranks-as", "processes", "--threads-per-process", "2"],
                imagine(4, "processes", per_process=2),
            ),
        ],
    )
    def test_prints_the_selection(self, dtorch, arguments, topology):
        status, out, _ = dtorch("explain", "--kind", "store", *arguments)
        selection = explain("store", topology)
        assert (status, out) == (0, f"{selection}\n")
        assert json.loads(dtorch("explain", "--kind", "store", "--json", *arguments)[1]) == {
            **selection.to_dict(),
            "refusal": None,
        }

    def test_prints_all_kinds(self, dtorch):
        _, out, _ = dtorch("explain", "--ranks", "3")
        for kind in ("store", "group", "promise"):
            assert str(explain(kind, imagine(3))) in out

        assert set(json.loads(dtorch("explain", "--json")[1])) == {"store", "group", "promise"}

    @pytest.mark.parametrize("kind", ["store", "group", "promise"])
    def test_prints_what_opening_would_raise(self, dtorch, site, kind):
        site.env("DTORCH_LOAD_PLUGINS", "")
        status, out, _ = dtorch("explain", "--kind", kind, "--hosts", "2")
        with pytest.raises(dtorch_core.NoBackendError) as caught:
            select(kind, imagine(2, hosts=2))

        assert (status, out) == (1, f"{caught.value}\n")
        assert out.count("reserved for several hosts") <= 1
        facts = json.loads(dtorch("explain", "--kind", kind, "--hosts", "2", "--json")[1])
        assert facts["refusal"] == str(caught.value)

    @pytest.mark.parametrize(
        ("backend", "ranks_as", "status", "said"),
        [
            ("local", "threads", 0, "local (decided by argument)"),
            ("local", "processes", 1, "does not fit 2 ranks, processes of one host, sharing cpu: several processes"),
            ("lokal", "threads", 1, "Did you mean 'local'?"),
        ],
    )
    def test_backend_asked_for_by_name(self, dtorch, backend, ranks_as, status, said):
        arguments = ["explain", "--kind", "store", "--backend", backend, "--ranks-as", ranks_as]
        code, out, _ = dtorch(*arguments)
        assert code == status
        assert said in out
        assert json.loads(dtorch(*arguments, "--json")[1])["chosen"] == ("local" if status == 0 else None)

    def test_one_kind_without_a_backend_is_a_failure(self, dtorch, site):
        site.env("DTORCH_LOAD_PLUGINS", "best")
        status, out, _ = dtorch("explain")
        assert status == 1
        assert "best (decided by score)" in out

    @pytest.mark.parametrize(
        ("plugins", "said"),
        [
            ("grp,best,local", "best"),
            ("grp,local", "none (local: several processes). A group that opens one can't be opened here"),
        ],
    )
    def test_group_comes_with_the_store_that_its_ranks_would_get(self, dtorch, site, plugins, said):
        """Which groups open a store the core does not know: that is no refusal."""
        site.add("grp-dist", source("grp").replace("tensor_stores", "thread_groups"), plugin="grp")
        site.env("DTORCH_LOAD_PLUGINS", plugins)
        status, out, _ = dtorch("explain", "--kind", "group", "--ranks-as", "processes")
        assert status == 0
        assert "grp (decided by score)" in out
        assert out.splitlines()[-1] == f"a store for the same ranks: {said}"
        facts = json.loads(dtorch("explain", "--kind", "group", "--ranks-as", "processes", "--json")[1])
        assert facts["chosen"] == "grp"
        assert (facts["store"]["chosen"] or "none") == said.partition(" ")[0]

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--ranks", "0"], "must be a number of at least 1, not '0'"),
            (["--ranks", "two"], "must be a number of at least 1, not 'two'"),
            (["--hosts", "3"], "at least one rank for each host: 2 ranks, 3 hosts"),
            (["--device", "gpu"], "devices are cpu and cuda:N, not 'gpu'"),
            (["--devices", "cpu,cpu,cpu"], "give one device for all ranks, or 2 of them, not 3"),
            (["--devices", "cpu,tpu"], "devices are cpu and cuda:N, not 'tpu'"),
            (["--device", "cpu", "--devices", "cpu,cpu"], "not allowed with argument"),
            (["--kind", "shop"], "invalid choice: 'shop'"),
            (["--backend", "best"], "say which with --kind"),
            (["--threads-per-process", "2"], "is for --ranks-as processes"),
        ],
    )
    def test_bad_usage(self, dtorch, arguments, said):
        status, out, err = dtorch("explain", *arguments)
        assert (status, out) == (2, "")
        assert said in err

    def test_needs_no_torch(self, site):
        arguments = ["explain", "--kind", "store", "--device", "cuda:3"]
        done = fresh(site, "import sys; sys.modules['torch'] = None", *arguments)
        assert done.returncode == 0, done.stderr
        assert "sharing cuda:3: best" in done.stdout


class TestDoctor:
    @pytest.fixture(autouse=True)
    def _only_the_site(self, monkeypatch, site):
        # What else is installed where these tests run is none of their business.
        everything = _installations._installations

        def here():
            return {
                name: copies
                for name, copies in everything().items()
                if any(str(site.folder.parent) in _installations.folder(copy) for copy in copies)
            }

        monkeypatch.setattr(_installations, "_installations", here)
        site.env("OMP_NUM_THREADS", None)
        site.backend("mine-dist", "mine", plugin="mine")

    def problems(self, dtorch):
        status, out, _ = dtorch("doctor", "--json")
        problems = json.loads(out)["problems"]
        assert status == (1 if problems else 0)
        text = dtorch("doctor")[1]
        for problem in problems:
            assert f"PROBLEM: {problem}" in text

        return problems

    def test_healthy(self, dtorch):
        status, out, _ = dtorch("doctor")
        assert status == 0
        for part in PARTS:
            assert f"\n{part}\n" in f"\n{out}"

        for said in ("no DTORCH variable is set", "mine-dist 1.0", "OMP_NUM_THREADS", "store: mine", "no problem"):
            assert said in out

        import torch

        assert torch.__version__ in out

    def test_json(self, dtorch):
        facts = json.loads(dtorch("doctor", "--json")[1])
        assert set(facts) == PARTS | {"problems"}
        assert facts["system"]["OMP_NUM_THREADS"] is None
        assert facts["selection"]["2 ranks, threads of one process, sharing cpu"]["store"] == "mine"

    def test_plugins_report(self, dtorch, site):
        site.add("own-dist", DOCTOR.format(body="return (f'{n} sockets' for n in (1, 2))"), plugin="own")
        site.add("none-dist", DOCTOR.format(body="return []"), plugin="none")
        assert self.problems(dtorch) == []
        assert "\n  own-dist 1.0: 1 sockets\n  own-dist 1.0: 2 sockets\n" in dtorch("doctor")[1]
        facts = json.loads(dtorch("doctor", "--json")[1])["reports"]
        assert facts["own-dist 1.0"] == ["1 sockets", "2 sockets"]
        assert facts["none-dist 1.0"] == []

    @pytest.mark.parametrize(
        ("body", "said"),
        [
            ("raise OSError('the folder is somebody else\\'s')", "OSError: the folder is somebody else's"),
            ("return 'one line'", "must return lines of text in a list, not 'one line'"),
            ("return [1]", r"must return lines of text in a list, not [1]"),
            ("return None", r"must return lines of text in a list, not None"),
        ],
    )
    def test_report_that_fails_is_a_problem_and_stops_no_other(self, dtorch, site, body, said):
        site.add("bad-dist", DOCTOR.format(body=body), plugin="bad")
        site.add("own-dist", DOCTOR.format(body="return ['all is well']"), plugin="own")
        (problem,) = self.problems(dtorch)
        assert problem.startswith("dtorch_doctor of bad-dist 1.0: ") and said in problem
        assert "own-dist 1.0: all is well" in dtorch("doctor")[1]

    def test_broken_plugins(self, dtorch, site):
        site.add("bad-dist", "raise ValueError('at import')", plugin="bad")
        site.add("exits-dist", "raise SystemExit(3)", plugin="exits")
        site.add("one-dist", source("clash"), plugin="one")
        site.add("two-dist", source("clash"), plugin="two")
        problems = self.problems(dtorch)
        assert len(problems) == 4
        for name, why in {"bad": "ValueError", "exits": "SystemExit: 3", "one": "two-dist", "two": "one-dist"}.items():
            said = f"plugin {name!r} of {name}-dist 1.0 is broken: "
            assert any(said in problem and why in problem for problem in problems)

    def test_group_without_a_store_for_its_ranks(self, dtorch, site):
        site.add("grp-dist", source("grp").replace("tensor_stores", "thread_groups"), plugin="grp")
        one = "Support.yes(1000, 'one process') if topology.same_process else Support.no('several processes')"
        site.backend("local-dist", "local", one, plugin="local")
        site.env("DTORCH_LOAD_PLUGINS", "grp,local")
        _, out, _ = dtorch("doctor")
        threads, processes, *_ = [" ".join(line.split()) for line in out.splitlines() if " store: " in line]
        assert "store: local group: grp promise: none" in threads
        assert "store: none group: grp (if it needs no store) promise: none" in processes

    @pytest.mark.parametrize("installed", [False, True])
    def test_says_what_to_install(self, dtorch, site, monkeypatch, installed):
        """A kind without a backend is a hint; without any plugin, nothing can be opened."""
        everything = _metadata.entry_points

        def only_the_site():
            sources, problems = everything()
            return [each for each in sources if installed and each.name == "mine"], problems

        monkeypatch.setattr(_metadata, "entry_points", only_the_site)
        status, out, _ = dtorch("doctor")
        assert status == (0 if installed else 1)
        start = "  " if installed else "  PROBLEM: "
        assert f"\n{start}No group backend is installed: pip install dtorch-samedevice-group dtorch-nccl-group\n" in out
        assert ("No store backend is installed" in out) is not installed

    def test_strict_mode_still_starts(self, dtorch, site):
        site.add("bad-dist", "raise ValueError('at import')", plugin="bad")
        site.env("DTORCH_STRICT_PLUGINS", "1")
        assert len(self.problems(dtorch)) == 1
        assert "nothing is chosen: plugin 'bad' of bad-dist 1.0 is broken" in dtorch("doctor")[1]

    def test_variables(self, dtorch, site):
        site.env("DTORCH_DISABLE_PLUGINS", "mien")
        site.env("DTORCH_TENSOR_STROE", "x")
        site.env("DTORCH_TENSOR_STORE", "mein")
        problems = self.problems(dtorch)
        assert len(problems) == 2
        assert any("DTORCH_DISABLE_PLUGINS names 'mien'" in problem for problem in problems)
        assert any("there is no store backend 'mein' (asked for by environment" in problem for problem in problems)
        site.env("DTORCH_SESSION_DIR", str(site.folder / "none"))
        out = dtorch("doctor")[1]
        assert "read by no part of dtorch. Did you mean 'DTORCH_TENSOR_STORE'?" in out
        assert "where dtorch-file-store keeps the sessions of this user" in out

    def test_backend_asked_for_that_does_not_fit_all_ranks_is_no_problem(self, dtorch, site):
        site.backend("local-dist", "local", "Support.yes(1, 'x') if topology.same_process else Support.no('y')")
        site.env("DTORCH_TENSOR_STORE", "local")
        assert self.problems(dtorch) == []

    def test_probe_that_raises_is_shown(self, dtorch, site):
        site.backend("odd-dist", "odd", "1 / 0", plugin="odd")
        site.env("DTORCH_TENSOR_STORE", "odd")
        (problem,) = self.problems(dtorch)
        assert "is broken: its probe raised ZeroDivisionError" in problem

    def test_metadata_in_two_places(self, dtorch, site, tmp_path):
        folder = site.also_on_path(tmp_path / "newer")
        site.point("mine-dist", "x", plugin="mine", version="2.0", folder=folder)
        problems = [problem for problem in self.problems(dtorch) if "2 places" in problem]
        assert problems == [
            f"mine-dist has metadata in 2 places, of which the first counts: 2.0 in {folder}/mine_dist-2.0.dist-info, "
            f"1.0 in {site.folder}/mine_dist-1.0.dist-info. Remove the others"
        ]

    def test_folder_seen_through_two_names_is_one_place(self, dtorch, site, tmp_path):
        (tmp_path / "lib64").symlink_to(site.folder)
        site.also_on_path(tmp_path / "lib64")
        assert self.problems(dtorch) == []

    def test_damaged_metadata(self, dtorch, site):
        info = site.metadata("dtorch-left-over", {})
        assert self.problems(dtorch) == [
            f"dtorch_left_over: its metadata is damaged (no version); install it again, or remove {info}"
        ]

    def editable(self, site, tmp_path, project, distribution="dtorch-edited"):
        folder = tmp_path / "a project"
        folder.mkdir()
        if project is not None:
            (folder / "pyproject.toml").write_text(textwrap.dedent(project))

        module = site.module(source("edited"))
        info = site.point(distribution, module, plugin="edited")
        (info / "direct_url.json").write_text(json.dumps({"url": folder.as_uri(), "dir_info": {"editable": True}}))
        return folder, module

    def test_editable_that_is_up_to_date(self, dtorch, site, tmp_path):
        project = '[project]\nname = "x"\nversion = "1.0"\n[project.entry-points.dtorch]\nedited = "MODULE"\n'
        folder, module = self.editable(site, tmp_path, project)
        (folder / "pyproject.toml").write_text(project.replace("MODULE", module))
        assert self.problems(dtorch) == []

    def test_editable_whose_entry_point_has_changed(self, dtorch, site, tmp_path):
        project = '[project]\nname = "x"\nversion = "1.0"\n[project.entry-points.dtorch]\nrenamed = "elsewhere"\n'
        folder, module = self.editable(site, tmp_path, project)
        (problem,) = self.problems(dtorch)
        assert "'renamed': 'elsewhere'" in problem
        assert f"'edited': {module!r}" in problem
        assert f"pip install -e {folder}" in problem

    def test_editable_whose_version_has_changed(self, dtorch, site, tmp_path):
        project = '[project]\nname = "x"\nversion = "2.0"\n[project.entry-points.dtorch]\nedited = "MODULE"\n'
        folder, module = self.editable(site, tmp_path, project)
        (folder / "pyproject.toml").write_text(project.replace("MODULE", module))
        (problem,) = self.problems(dtorch)
        assert "'version': '2.0'" in problem

    @pytest.mark.parametrize("project", [None, "[project", "[tool.x]\ny = 1\n"])
    def test_editable_whose_source_is_gone(self, dtorch, site, tmp_path, project):
        folder, _ = self.editable(site, tmp_path, project)
        (problem,) = self.problems(dtorch)
        assert f"dtorch-edited is installed editable from {folder}, where no pyproject.toml can be read" in problem

    def test_core_that_is_half_upgraded(self, dtorch, site):
        site.metadata("dtorch-core", {"METADATA": "Metadata-Version: 2.1\nName: dtorch-core\nVersion: 0.0.1\n"})
        assert any("but its metadata says 0.0.1" in problem for problem in self.problems(dtorch))

    def test_old_torch(self, dtorch, monkeypatch):
        import torch

        monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
        assert self.problems(dtorch) == ["torch 2.10.1+cpu is older than 2.11"]

    def test_what_torch_lacks_is_said_and_is_no_problem(self, dtorch, monkeypatch):
        assert json.loads(dtorch("doctor", "--json")[1])["torch.distributed"] == []
        assert "\n  nothing that groups of dtorch need is missing\n" in dtorch("doctor")[1]

        monkeypatch.delattr(distributed_c10d, "split_group")
        monkeypatch.setattr(_torch_kernels, "_NAMESPACE", "dtorch_no_such")
        monkeypatch.setattr(torch.ops, "dtorch_no_such", SimpleNamespace(batch_p2p_ops=None), raising=False)
        monkeypatch.setattr(_torch_state, "missed", ["what was missed\nas a backend was registered"])
        assert self.problems(dtorch) == []
        split = "torch.distributed has no function split_group: it does not serve groups of dtorch"
        facts = json.loads(dtorch("doctor", "--json")[1])["torch.distributed"]
        assert facts[:2] == ["what was missed\nas a backend was registered", split]
        for fact, key in zip(facts[2:], ("CPU", "CUDA"), strict=True):
            assert fact.startswith(f"dtorch_no_such::batch_p2p_ops does not serve groups of dtorch on {key}: ")

        lines = dtorch("doctor")[1].split("\ntorch.distributed\n")[1].splitlines()
        assert lines[1] == f"  {split}" and [line.startswith("  ") for line in lines[:5]] == [True] * 4 + [False]

    def test_what_threads_share_is_what_the_docs_list(self, dtorch):
        page = (Path(__file__).parents[1] / "docs" / "run.md").read_text(encoding="utf-8")
        section = page.partition("\n## What threads share\n")[2].partition("\n## ")[0]
        named = [name[0].lower() + name[1:] for name in re.findall(r"^- \*\*(.+?)\*\*", section, re.MULTILINE)]
        shared = json.loads(dtorch("doctor", "--json")[1])["ranks as threads"]["shared"]
        assert list(shared) == named and len(named) > 8
        out = dtorch("doctor")[1]
        for what, which in shared.items():
            assert re.search(rf"^  shared: {re.escape(what)} +{re.escape(which)}$", out, re.MULTILINE)

    def test_torch_that_threads_can_not_divide_is_a_problem(self, dtorch, monkeypatch):
        monkeypatch.setattr(_thread_world, "MISSING", ["_World has no property pg_map"])
        said = "ranks that are threads can't have torch.distributed of their own: _World has no property pg_map"
        assert self.problems(dtorch) == [said]

    def test_part_that_fails_stops_no_other(self, dtorch, monkeypatch):
        def fail():
            raise OSError("no /proc here")

        monkeypatch.setitem(doctor.PARTS, "metadata", fail)
        status, out, _ = dtorch("doctor")
        assert status == 1
        assert "PROBLEM: this part of the report failed: OSError: no /proc here" in out
        assert "selection\n" in out

    def test_without_torch(self, site):
        done = fresh(site, "import sys; sys.modules['torch'] = None", "doctor")
        assert done.returncode == 1
        assert "PROBLEM: torch is not installed: pip install torch" in done.stdout
        assert "store: mine" in done.stdout
        assert done.stderr == ""

    def test_torch_that_can_not_be_imported(self, site):
        site.module("raise OSError('libcudart.so.13: cannot open shared object file')", name="torch")
        site.modules.discard("torch")
        done = fresh(site, "", "doctor")
        assert done.returncode == 1
        assert "OSError: libcudart.so.13" in done.stdout
        assert "store: mine" in done.stdout

    def test_plugin_that_ends_the_process_is_found_by_the_last_title(self, site):
        site.add("crash-dist", "import os; os._exit(9)", plugin="crash")
        done = fresh(site, "", "doctor")
        assert done.returncode == 9
        assert done.stdout.rstrip().endswith("plugins")


class TestCheck:
    @pytest.fixture
    def kit(self, monkeypatch):
        """The kit's outcomes as given, rather than a run of it."""
        from dtorch_core.testing import _run

        def give(*outcomes):
            def run_kit(kind, name, *, quiet=True):
                return [_run.Outcome(test, frozenset(words), state, why) for test, words, state, why in outcomes]

            monkeypatch.setattr(_run, "run_kit", run_kit)

        return give

    def test_held(self, dtorch, site, kit):
        site.add("mine-dist", source("mine", words={"cpu", "cuda"}), plugin="mine")
        kit(
            ("test_all[x]", (), "passed", ""),
            ("test_each[cpu-2]", (), "passed", ""),
            ("test_words", ("cpu", "cuda"), "skipped", "there is no CUDA device"),
            ("test_gpu", ("cuda",), "skipped", "there is no CUDA device"),
            ("test_other", ("zero_copy",), "skipped", "not declared"),
        )
        status, out, _ = dtorch("check", "mine")
        assert status == 0
        assert out.splitlines() == [
            "store backend 'mine'",
            "  contract  held        1 passed",
            "  cpu       held        1 passed, 1 skipped",
            "  cuda      not tested  there is no CUDA device",
        ]

    def test_failed(self, dtorch, site, kit):
        site.add("mine-dist", source("mine", words={"cpu", "cuda", "multi_host"}), plugin="mine")
        kit(
            ("test_all", (), "passed", ""),
            ("test_each[cpu]", (), "passed", ""),
            ("test_each[cuda:0]", (), "failed", "assert 1 == 2"),
        )
        status, out, _ = dtorch("check", "mine")
        assert status == 1
        assert out.splitlines() == [
            "store backend 'mine'",
            "  contract    held        1 passed",
            "  cpu         held        1 passed",
            "  cuda        failed      1 failed of 1 test",
            "  multi_host  not tested  the kit has no test of it",
            "  FAILED test_each[cuda:0]: assert 1 == 2",
        ]
        facts = json.loads(dtorch("check", "mine", "--json")[1])
        assert facts["backend"] == "mine"
        assert facts["store"]["cuda"] == {
            "state": "failed",
            "passed": 0,
            "failed": 1,
            "skipped": 0,
            "failures": {"test_each[cuda:0]": "assert 1 == 2"},
        }

    def test_contract_that_fails(self, dtorch, site, kit):
        site.add("mine-dist", source("mine", words={"cpu"}), plugin="mine")
        kit(("test_all", (), "failed", "hangs"), ("test_each[cpu]", (), "passed", ""))
        status, out, _ = dtorch("check", "mine")
        assert status == 1
        assert "  contract  failed  1 failed of 1 test\n" in out

    def test_nothing_declared(self, dtorch, site):
        site.add("mine-dist", source("mine"), plugin="mine")
        status, out, err = dtorch("check", "mine")
        assert (status, out) == (2, "")
        assert "the store backend 'mine' declares no capability" in err

    def test_unknown_name(self, dtorch, site):
        site.add("mine-dist", source("mine", words={"cpu"}), plugin="mine")
        status, out, err = dtorch("check", "mien")
        assert (status, out) == (2, "")
        assert "there is no backend 'mien'. Did you mean 'mine'? Installed: " in err

    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("samedevice", "not installed; pip install dtorch-samedevice-group"),
            ("file", "not installed; pip install dtorch-file-store"),
            ("network", "reserved for several hosts; no distribution offers it yet"),
            ("nccl", "not installed; pip install dtorch-nccl-group"),
        ],
    )
    def test_known_name_that_is_not_installed(self, dtorch, monkeypatch, name, said):
        monkeypatch.setattr(_metadata, "entry_points", lambda: ([], []))
        status, out, err = dtorch("check", name)
        assert (status, out) == (2, "")
        assert err == f"dtorch check: error: there is no backend {name!r}: {said}\n"

    def test_name_of_a_disabled_plugin(self, dtorch, site):
        site.add("mine-dist", source("mine", words={"cpu"}), plugin="mine")
        site.env("DTORCH_DISABLE_PLUGINS", "mine")
        status, _, err = dtorch("check", "mine")
        assert status == 2
        assert "there is no backend 'mine': " in err and "DTORCH_DISABLE_PLUGINS" in err

    def test_word_whose_tests_were_all_skipped_is_not_held(self, dtorch):
        pytest.importorskip("dtorch_memory_store")
        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device")

        facts = json.loads(dtorch("check", "memory", "--kind", "store", "--json")[1])["store"]
        assert facts["cpu"]["state"] == "held"
        assert facts["cuda"]["state"] == "not tested"

    def test_name_of_another_kind(self, dtorch, site):
        site.add("mine-dist", source("mine", words={"cpu"}), plugin="mine")
        status, _, err = dtorch("check", "mine", "--kind", "group")
        assert status == 2
        assert "there is no group backend 'mine'" in err

    def test_broken_and_in_conflict(self, dtorch, site):
        site.add("bad-dist", "raise ValueError('at import')", plugin="bad")
        site.add("one-dist", source("clash", words={"cpu"}), plugin="one")
        site.add("two-dist", source("clash", words={"cpu"}), plugin="two")
        assert dtorch("check", "bad")[0] == dtorch("check", "clash")[0] == 1
        assert "the plugin of 'bad' is broken: ValueError: at import" in dtorch("check", "bad")[2]
        assert "'clash' is offered by one-dist 1.0 and two-dist 1.0" in dtorch("check", "clash")[2]

    @pytest.mark.parametrize(("missing", "command"), [("pytest", '"dtorch-core[testing]"'), ("torch", "torch")])
    def test_without_what_the_kit_needs(self, site, missing, command):
        site.add("mine-dist", source("mine", words={"cpu"}), plugin="mine")
        done = fresh(site, f"import sys; sys.modules[{missing!r}] = None", "check", "mine")
        assert done.returncode == 1
        assert done.stderr == f"dtorch check: the conformance kit needs {missing}: pip install {command}\n"

    def test_memory_promise_holds_what_it_declares(self, dtorch):
        pytest.importorskip("dtorch_memory_store")
        status, out, _ = dtorch("check", "memory", "--kind", "promise", "--json")
        facts = json.loads(out)["promise"]
        assert status == 0, out
        assert facts["contract"]["state"] == facts["await"]["state"] == "held"
        assert {facts[device.partition(":")[0]]["state"] for device in DEVICES} == {"held"}

    def test_words_of_a_test(self):
        from dtorch_core.testing._run import Outcome

        def words(test, *capabilities):
            return check._words(Outcome(test, frozenset(capabilities), "passed", ""))

        assert words("test_x") == set()
        assert words("test_cpu") == set()
        assert words("test_x[cpu]") == {"cpu"}
        assert words("test_x[2-cuda:0-float32]", "await") == {"cuda", "await"}
        assert words("test_x[cpu to cuda]") == set()
