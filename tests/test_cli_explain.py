"""dtorch explain: what would be chosen for ranks that are imagined, and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dtorch_core
from dtorch_core import explain, select
from dtorch_core._selection.topology import imagine

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    import command_runs
    from command_runs import fresh, source

dtorch = command_runs.dtorch


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

    @pytest.mark.parametrize(
        "arguments", [[], ["--hosts", "5000", "--ranks-as", "processes", "--device", "cuda"]], ids=["one", "many"]
    )
    def test_many_ranks_are_told_in_few_words(self, dtorch, site, arguments):
        why = "Support.no(rank_list(member.rank for member in topology))"
        site.add("all-dist", source("all", "from dtorch_core._text import rank_list").replace(
            "Support.yes(1000, \"fits\")", why
        ), plugin="all")  # fmt: skip
        _, out, _ = dtorch("explain", "--kind", "store", "--ranks", "10000", *arguments)
        assert len(out) < 3000
        assert "rank 12, rank 13, 9985 more, rank 9999\n" in out
        assert ("cuda:0 = rank 0, rank 1; " in out and "; and 4984 more: " in out) is bool(arguments)

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

    @pytest.mark.parametrize("able", [True, False])
    def test_group_says_that_it_needs_another_store(self, dtorch, site, able):
        group = source("grp", words={"cpu"}).replace("tensor_stores", "thread_groups")
        site.add("grp-dist", group.replace("capabilities=", "store_needs={'zero_copy'}, capabilities="), plugin="grp")
        site.add("sock-dist", source("sock", words={"cpu", "zero_copy"} if able else {"cpu"}), plugin="sock")
        site.env("DTORCH_LOAD_PLUGINS", "grp,sock")
        status, out, _ = dtorch("explain", "--kind", "group")
        lacks = "" if able else "grp needs a store that declares 'zero_copy', and sock does not"
        said = "sock" if able else f"sock, but {lacks}. Use another one"
        assert (status, out.splitlines()[-1]) == (0 if able else 1, f"a store for the same ranks: {said}")
        facts = json.loads(dtorch("explain", "--kind", "group", "--json")[1])
        assert facts["store"]["lacks"] == lacks

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
