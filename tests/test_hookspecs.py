"""The hook specs are the map of the product: each is documented as it is, and there are no others."""

from __future__ import annotations

import inspect
import re
import typing
from pathlib import Path

import pytest

import dtorch_core
from dtorch_core import hookspecs
from dtorch_core._selection.discovery import REGISTRATION_HOOKS
from dtorch_core._selection.reasons import KINDS, Kind

HOOKS = {name: spec for name, spec in vars(hookspecs).items() if hasattr(spec, "dtorch_spec")}
PAGE = Path(__file__).parents[1] / "docs" / "hooks.md"
TESTS = Path(__file__).parent


def plain(text: str) -> str:
    """A docstring, or a page, without markup and line breaks."""
    text = re.sub(r":\w+:`(?:~?[\w.]*\.)?(\w+)`", r"\1", text)
    return " ".join(text.replace("`", "").split())


def sections() -> dict[str, str]:
    """The page's sections about hooks, by heading."""
    parts = re.split(r"^### ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0].strip("` "): part.partition("\n")[2] for part in parts}


class TestHooks:
    def test_are_these_seven(self):
        assert {name: list(inspect.signature(hook).parameters) for name, hook in HOOKS.items()} == {
            "dtorch_register_tensor_stores": [],
            "dtorch_register_thread_groups": [],
            "dtorch_register_promises": [],
            "dtorch_describe_member": ["member"],
            "dtorch_rank_backends": ["kind", "topology", "verdicts"],
            "dtorch_backend_selected": ["selection"],
            "dtorch_doctor": [],
        }

    def test_each_kind_has_its_registration_hook(self):
        assert set(REGISTRATION_HOOKS) == set(KINDS)
        assert set(REGISTRATION_HOOKS.values()) == {name for name in HOOKS if "register" in name}

    def test_only_the_policy_stops_at_the_first_result(self):
        firsts = [name for name, hook in HOOKS.items() if hook.dtorch_spec["firstresult"]]
        assert firsts == ["dtorch_rank_backends"]

    @pytest.mark.parametrize("name", HOOKS)
    def test_annotations_can_be_resolved(self, name):
        names = {**vars(dtorch_core), **{n: getattr(dtorch_core, n) for n in dtorch_core.__all__}, "Kind": Kind}
        hints = typing.get_type_hints(HOOKS[name], {**vars(hookspecs), **names})
        assert set(hints) == {*inspect.signature(HOOKS[name]).parameters, "return"}

    @pytest.mark.parametrize("name", HOOKS)
    def test_is_used_by_a_test(self, name):
        users = [path for path in TESTS.glob("test_*.py") if path != Path(__file__) and name in path.read_text()]
        assert users or any(name in path.read_text() for path in TESTS.parent.glob("plugins/*/src/*/hooks.py"))


class TestPage:
    def test_has_each_hook_and_no_other_in_order(self):
        signatures = [f"{name}{inspect.signature(hook)}".replace("'", "") for name, hook in HOOKS.items()]
        assert list(sections()) == signatures

    @pytest.mark.parametrize("name", HOOKS)
    def test_says_what_the_docstring_says(self, name):
        (section,) = [text for heading, text in sections().items() if heading.startswith(f"{name}(")]
        assert plain(inspect.getdoc(HOOKS[name]) or "-") in plain(section)

    def test_says_what_the_module_says(self):
        page = plain(PAGE.read_text())
        assert f"pluggy project name is {hookspecs.PROJECT}" in page
        assert f"API version is {hookspecs.API_VERSION}" in page
