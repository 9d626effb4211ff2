"""What torch.compile runs as it is."""

import importlib
import subprocess
import sys
import textwrap
import types

import pytest
import torch._dynamo  # noqa: F401 - the rules are changed at once
from dtorch_memory_store.store import MemoryTensorStore
from torch._dynamo import trace_rules

from dtorch_core._groups import uncompiled
from dtorch_core._groups.uncompiled import code_of, leave_uncompiled

LIMIT = 60.0


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(uncompiled, "_known", set())
    monkeypatch.setattr(trace_rules, "SKIP_DIRS", list(trace_rules.SKIP_DIRS))
    yield
    monkeypatch.undo()
    trace_rules._recompile_re()


def derived(module):
    return type("Derived", (MemoryTensorStore,), {"__module__": module})


def test_of_a_plugin_it_is_all_that_it_has():
    assert code_of(MemoryTensorStore) == ["dtorch_memory_store", "dtorch_core"]
    assert code_of(derived("dtorch_fast_store.inner.store")) == [
        "dtorch_fast_store", "dtorch_memory_store", "dtorch_core"
    ]  # fmt: skip


@pytest.mark.parametrize(("module", "own"), [("mine.store", ["mine.store"]), ("__main__", [])])
def test_what_is_beside_a_store_of_a_program_is_compiled(module, own):
    assert code_of(derived(module)) == [*own, "dtorch_memory_store", "dtorch_core"]


def test_torch_knows_a_module_by_its_file(tmp_path, monkeypatch):
    (tmp_path / "mine_uncompiled").mkdir()
    (tmp_path / "mine_uncompiled" / "store.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    store = importlib.import_module("mine_uncompiled.store")
    leave_uncompiled("mine_uncompiled.store")
    assert trace_rules.check_file(store.__file__).skipped
    assert not trace_rules.check_file(str(tmp_path / "mine_uncompiled" / "model.py")).skipped


def test_a_module_without_a_file_is_no_failure(monkeypatch):
    monkeypatch.setitem(sys.modules, "made_by_hand", types.ModuleType("made_by_hand"))
    before = list(trace_rules.SKIP_DIRS)
    leave_uncompiled("made_by_hand")
    assert before == trace_rules.SKIP_DIRS


def test_a_program_may_have_a_store_of_its_own(tmp_path):
    """In its __main__, which torch finds no file for; the compiler is imported after the group has been opened."""
    program = """
        import torch
        import dtorch_core
        from dtorch_core import BackendSpec, Support, hookimpl, spawn
        from dtorch_memory_store.store import MemoryTensorStore

        class Mine(MemoryTensorStore):
            pass

        class Plugin:
            @hookimpl
            def dtorch_register_tensor_stores(self):
                words = frozenset({"cpu", "zero_copy"})
                return [BackendSpec("mine", "__main__:Mine", lambda topology: Support.yes(200, "mine"), words)]

        graphs = []

        def count(module, examples):
            graphs.append(module)
            return module.forward

        class Model(torch.nn.Module):
            def forward(self, x):
                return x + 1

        def rank(ctx):
            with ctx.open_group(backend="samedevice", timeout=30) as group:
                return group.all_reduce(torch.ones(2)).tolist()

        dtorch_core.register(Plugin(), name="mine")
        print(spawn(rank, 2, ranks_as="threads", devices=["cpu"] * 2))
        torch.compile(Model(), backend=count)(torch.ones(2))
        print(len(graphs))
    """
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert (done.stdout.split("\n"), done.returncode) == (["[[2.0, 2.0], [2.0, 2.0]]", "1", ""], 0), done.stderr
