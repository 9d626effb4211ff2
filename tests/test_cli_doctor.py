"""dtorch doctor: it finds what is wrong with an installation, and starts whatever plugins do."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import distributed_c10d

from dtorch_core._groups import torch_kernels
from dtorch_core._groups import torch_state as _torch_state
from dtorch_core._selection import metadata as _metadata
from dtorch_core._thread_ranks import worlds
from dtorch_core.cli import _installations, doctor

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import command_runs
    from command_runs import fresh, source

dtorch = command_runs.dtorch

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

    @pytest.mark.parametrize(
        ("name", "value", "said"),
        [
            ("DTORCH_LOOK", "0", "off: waiting threads of dtorch-memory-store sleep at once"),
            ("DTORCH_LOOK", "1", "on: waiting threads of dtorch-memory-store look for a moment before they sleep"),
            ("DTORCH_LOOK", "off", "WARNING: 'off' counts as 1, and 0 alone is off. On: waiting threads of "),
            ("DTORCH_FUSED", "", "on, as if it were not set: collectives of dtorch-samedevice-group on CUDA use fused"),
            ("DTORCH_FUSED", "no", "WARNING: 'no' counts as 1, and 0 alone is off. On: collectives of "),
            ("DTORCH_FILE_IPC", "1", "on: CUDA tensors stay on the GPU"),
            ("DTORCH_STRICT_PLUGINS", "1", "on: a broken plugin is an error"),
            ("DTORCH_STRICT_PLUGINS", "0", "off: a broken plugin is left out"),
            ("DTORCH_STRICT_PLUGINS", "", "off, as if it were not set: a broken plugin is left out"),
            ("DTORCH_STRICT_PLUGINS", "false", "WARNING: 'false' counts as 1, and 0 alone is off. On: a broken plugin"),
        ],
    )
    def test_switch_is_told_as_it_stands(self, dtorch, site, name, value, said):
        site.env(name, value)
        assert f"\n  {name}={value}  {said}" in dtorch("doctor")[1]

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
        monkeypatch.setattr(torch_kernels, "_NAMESPACE", "dtorch_no_such")
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
        monkeypatch.setattr(worlds, "MISSING", ["_World has no property pg_map"])
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
