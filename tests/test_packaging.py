"""Each distribution as a user gets it: built to a wheel, installed in an environment where nothing else is.

The environments hold links to what torch and pytest need, taken from the environment that runs this, and the wheels,
installed by pip from the folder they were built in. pip never asks an index: a sibling that is not there is an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import importlib_metadata
import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[1]
PLUGINS = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))
FOLDERS = {"dtorch_core": ROOT, **{f"dtorch_{name}": ROOT / "plugins" / name for name in PLUGINS}}
"""Where each distribution lives, by its import name."""
EXAMPLES = sorted(path.parent for path in ROOT.glob("examples/*/pyproject.toml"))
WITHOUT_TORCH = ("pluggy", "importlib-metadata")
WITH_TORCH = (*WITHOUT_TORCH, "torch", "pytest")


def project(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def call(command: list[str], **kw: Any) -> subprocess.CompletedProcess[str]:
    """Run a command that sees neither this environment's settings nor the repository."""
    leaks = ("PYTHON", "PIP_", "DTORCH_", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(leaks)}
    environment |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INDEX": "1"}
    environment |= kw.pop("env", {})
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, env=environment, **kw
    )


def succeed(command: list[str], **kw: Any) -> str:
    done = call(command, **kw)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def links_for(names: tuple[str, ...]) -> dict[str, Path]:
    """The files and folders that the distributions ``names`` and all that they require put into site-packages."""
    links: dict[str, Path] = {}
    pending, seen = list(names), set()
    while pending:
        name = pending.pop().lower().replace("_", "-")
        if name in seen:
            continue

        seen.add(name)
        distribution = importlib_metadata.distribution(name)
        for file in distribution.files or pytest.skip(f"the installed {name} has no list of its files"):
            top = file.parts[0]
            if top != ".." and top != "__pycache__" and not top.endswith(".pth"):
                links[top] = Path(distribution.locate_file(top))

        requirements = map(Requirement, distribution.requires or ())
        pending += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]

    return links


class Environment:
    """A virtual environment of its own, without pip."""

    def __init__(self, folder: Path, wheels: Path, names: tuple[str, ...]) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.folder, self._wheels = folder, wheels
        self.python = folder / "bin" / "python"
        self.site = next(folder.glob("lib/python*/site-packages"))
        for name, target in links_for(names).items():
            (self.site / name).symlink_to(target)

    def install(self, *requirements: str, deps: bool = True) -> None:
        pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--no-index", "--no-compile"]
        succeed([*pip, *([] if deps else ["--no-deps"]), "--find-links", str(self._wheels), *requirements])

    def run(self, code: str) -> str:
        """The output of a program that succeeds. It sees this environment alone."""
        return succeed([str(self.python), "-I", "-c", code], cwd=self.folder)

    def dtorch(self, *arguments: str, **kw: Any) -> subprocess.CompletedProcess[str]:
        return call([str(self.folder / "bin" / "dtorch"), *arguments], cwd=self.folder, **kw)

    def pytest(self, tests: Path, chosen: str = "") -> str:
        """The output of a suite that passes; ``tests`` is copied, so that nothing beside it can be found.

        :param chosen: an expression for pytest's ``-k``, where the whole suite takes minutes.
        """
        own = shutil.copytree(tests, self.folder / "tests")
        options = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(self.folder), "-p", "no:cacheprovider"]
        options += ["-k", chosen] if chosen else []
        return succeed([str(self.python), "-I", "-m", "pytest", *options, str(own)], cwd=self.folder)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel of every distribution, the third-party examples' too."""
    folder = tmp_path_factory.mktemp("wheels")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    succeed([*build, "--wheel-dir", str(folder), *map(str, [*FOLDERS.values(), *EXAMPLES])], cwd=folder)
    return folder


@pytest.fixture
def environment(tmp_path: Path, wheels: Path) -> Environment:
    """One that has torch and pytest."""
    return Environment(tmp_path / "env", wheels, WITH_TORCH)


@pytest.fixture
def torchless(tmp_path: Path, wheels: Path) -> Environment:
    return Environment(tmp_path / "env", wheels, WITHOUT_TORCH)


class TestWheels:
    @pytest.fixture(params=FOLDERS)
    def wheel(self, request: pytest.FixtureRequest, wheels: Path) -> Iterator[tuple[str, zipfile.ZipFile]]:
        (path,) = wheels.glob(f"{request.param}-*.whl")
        with zipfile.ZipFile(path) as archive:
            yield request.param, archive

    def test_wheel_holds_its_package_alone(self, wheel: tuple[str, zipfile.ZipFile]) -> None:
        name, archive = wheel
        tops = {file.partition("/")[0] for file in archive.namelist()}
        assert {top for top in tops if not top.endswith(".dist-info")} == {name}

    def test_wheel_holds_every_module_of_its_package(self, wheel: tuple[str, zipfile.ZipFile]) -> None:
        name, archive = wheel
        source = FOLDERS[name] if name == "dtorch_core" else FOLDERS[name] / "src"
        modules = {str(path.relative_to(source)) for path in (source / name).rglob("*.py")}
        assert modules
        assert modules <= set(archive.namelist())

    def test_wheel_is_typed_and_licensed(self, wheel: tuple[str, zipfile.ZipFile]) -> None:
        name, archive = wheel
        assert f"{name}/py.typed" in archive.namelist()
        (text,) = [archive.read(file) for file in archive.namelist() if file.endswith("licenses/LICENSE")]
        assert text == (ROOT / "LICENSE").read_bytes()

    def test_wheel_of_a_plugin_names_its_entry_point(self, wheel: tuple[str, zipfile.ZipFile]) -> None:
        name, archive = wheel
        points = [archive.read(file).decode() for file in archive.namelist() if file.endswith("/entry_points.txt")]
        assert len(points) == 1
        assert ("[console_scripts]" if name == "dtorch_core" else "[dtorch]") in points[0]
        assert f"{name}.hooks" in points[0] or name == "dtorch_core"


class TestCompiled:
    """What waiting threads of dtorch-memory-store look with is C: a wheel has it where there is a compiler."""

    @pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
    def test_wheel_holds_what_was_compiled_for_this_platform(self, wheels: Path, environment: Environment) -> None:
        (path,) = wheels.glob("dtorch_memory_store-*.whl")
        assert "-py3-none-linux_" in path.name
        environment.install("dtorch-memory-store")
        said = environment.run("from dtorch_memory_store.looking import available; print(available() is not None)")
        assert said.strip() == "True"

    @pytest.mark.parametrize("compiler", ["false", "no-such-compiler --really"])
    def test_wheel_without_a_compiler_has_python_alone_and_works(
        self, compiler: str, tmp_path: Path, wheels: Path, environment: Environment
    ) -> None:
        folder = tmp_path / "wheels"
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
        done = call([*build, "-w", str(folder), str(FOLDERS["dtorch_memory_store"])], env={"CC": compiler})
        assert done.returncode == 0, done.stderr
        (path,) = folder.glob("*.whl")
        assert path.name.endswith("-py3-none-any.whl")
        environment.install("dtorch-core")
        environment.install(str(path), deps=False)
        said = environment.run(
            "import torch, dtorch_memory_store.looking as looking\n"
            "from dtorch_core import spawn\n"
            "def program(ctx):\n"
            "    with ctx.open_store('s') as store:\n"
            "        if ctx.rank == 0:\n"
            "            return store.src_set('k', torch.arange(3), 1) or store.src_wait_until_get_finished('k')\n"
            "        with store.borrow('k') as tensor:\n"
            "            return tensor.tolist()\n"
            "print(looking.available(), spawn(program, 2))"
        )
        assert said.strip() == "None [None, [0, 1, 2]]"


class TestMetadata:
    def test_versions_are_equal(self) -> None:
        assert len({project(folder)["version"] for folder in FOLDERS.values()}) == 1

    def test_version_is_what_the_module_says(self) -> None:
        text = (ROOT / "dtorch_core" / "__init__.py").read_text(encoding="utf-8")
        assert f'__version__ = "{project(ROOT)["version"]}"' in text

    def test_sibling_ranges_contain_the_version(self) -> None:
        version = project(ROOT)["version"]
        siblings = []
        for folder in FOLDERS.values():
            fields = project(folder)
            groups = [fields["dependencies"], *fields.get("optional-dependencies", {}).values()]
            siblings += [r for group in groups for r in map(Requirement, group) if r.name.startswith("dtorch-")]

        assert {str(requirement.specifier) for requirement in siblings} == {"<0.2,>=0.1"}
        assert all(requirement.specifier.contains(version) for requirement in siblings)

    def test_extra_all_brings_every_plugin(self) -> None:
        every = {Requirement(text).name for text in project(ROOT)["optional-dependencies"]["all"]}
        assert every == {project(FOLDERS[f"dtorch_{name}"])["name"] for name in PLUGINS}

    def test_extra_samedevice_brings_a_store(self) -> None:
        names = {Requirement(text).name for text in project(ROOT)["optional-dependencies"]["samedevice"]}
        assert names == {"dtorch-samedevice-group", "dtorch-memory-store"}

    def test_plugins_require_the_core_and_no_other_plugin(self) -> None:
        for name in PLUGINS:
            names = {Requirement(text).name for text in project(FOLDERS[f"dtorch_{name}"])["dependencies"]}
            assert {name for name in names if name.startswith("dtorch-")} == {"dtorch-core"}

    def test_changelog_has_the_version(self) -> None:
        assert f"## {project(ROOT)['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


class TestPluginAlone:
    def test_memory_store_passes_its_suite_beside_the_core(self, environment: Environment) -> None:
        environment.install("dtorch-core[memory]")
        assert_clean(environment, {"dtorch-core", "dtorch-memory-store"})
        assert re.search(r"\d+ passed", environment.pytest(FOLDERS["dtorch_memory_store"] / "tests"))

    def test_file_store_passes_its_suite_beside_the_core(self, environment: Environment) -> None:
        environment.install("dtorch-core[file]")
        assert_clean(environment, {"dtorch-core", "dtorch-file-store"})
        # What differs otherwise runs beside the other plugins only.
        chosen = "(NodeEach and (handshake or dtype or death)) or TestShares or TestKeys or TestChoice or arena"
        assert re.search(r"\d+ passed", environment.pytest(FOLDERS["dtorch_file_store"] / "tests", chosen))

    def test_samedevice_group_passes_its_suite_beside_the_core_and_a_store(self, environment: Environment) -> None:
        environment.install("dtorch-core[samedevice]")
        assert_clean(environment, {"dtorch-core", "dtorch-memory-store", "dtorch-samedevice-group"})
        chosen = "repeats or test_reduction or test_mismatch or test_message or test_collective_of_any_layout"
        assert re.search(r"\d+ passed", environment.pytest(FOLDERS["dtorch_samedevice_group"] / "tests", chosen))
        measured = environment.dtorch(
            *("bench", "--only", "collectives", "--operations", "all_reduce", "--ranks", "2", "--sizes", "1KiB"),
            *("--rounds", "1", "--no-gloo"),
        )
        assert measured.returncode == 0, measured.stderr
        assert "\nall_reduce  1 KiB " in measured.stdout
        assert "\nskipped: group, ranks as processes: " in measured.stdout, "there is no store for them"

    def test_nccl_group_passes_its_suite_beside_the_core_and_its_stores(self, environment: Environment) -> None:
        environment.install("dtorch-core[nccl]")
        assert_clean(environment, {"dtorch-core", "dtorch-memory-store", "dtorch-file-store", "dtorch-nccl-group"})
        chosen = "hooks or TestFailure or TestOrder or TestWithoutAStore"
        assert re.search(r"\d+ passed", environment.pytest(FOLDERS["dtorch_nccl_group"] / "tests", chosen))

    def test_samedevice_group_without_a_store_names_the_pip_command(self, environment: Environment) -> None:
        environment.install("dtorch-samedevice-group")
        assert_clean(environment, {"dtorch-core", "dtorch-samedevice-group"})
        error = environment.run(OPEN_ON_TWO_RANKS.format(what="open_group('g')"))
        assert "NoBackendError" in error
        assert "pip install dtorch-memory-store" in error


class TestCoreAlone:
    def test_opening_anything_names_the_pip_command(self, environment: Environment) -> None:
        environment.install("dtorch-core")
        assert_clean(environment, {"dtorch-core"})
        for what, distribution in (
            ("open_store('s')", "dtorch-memory-store"),
            ("open_group('g')", "dtorch-samedevice-group"),
        ):
            error = environment.run(OPEN_ON_TWO_RANKS.format(what=what))
            assert "NoBackendError" in error
            assert f"pip install {distribution}" in error

        error = environment.run(
            "import dtorch_core\ntry: dtorch_core.make_promise()\nexcept dtorch_core.NoBackendError as e: print(e)"
        )
        assert "pip install dtorch-memory-store" in error

    def test_commands_answer(self, environment: Environment) -> None:
        environment.install("dtorch-core")
        listed = environment.dtorch("plugins")
        assert listed.returncode == 0, listed.stderr
        assert "pip install dtorch-memory-store" in listed.stdout
        explained = environment.dtorch("explain", "--kind", "store", "--ranks", "2")
        assert "pip install dtorch-memory-store" in explained.stdout
        assert "Traceback" not in explained.stderr
        measured = environment.dtorch("bench")
        assert (measured.returncode, measured.stdout) == (1, "")
        assert "pip install dtorch-samedevice-group" in measured.stderr


class TestWithoutTorch:
    def test_import_and_listing_work(self, torchless: Environment) -> None:
        torchless.install(
            "dtorch-core",
            "dtorch-memory-store",
            "dtorch-file-store",
            "dtorch-samedevice-group",
            "dtorch-nccl-group",
            deps=False,
        )
        torchless.run("import dtorch_core; dtorch_core.BackendSpec; dtorch_core.Support; dtorch_core.hookimpl")
        listed = torchless.dtorch("plugins", "--json")
        assert listed.returncode == 0, listed.stderr
        assert states(listed.stdout) == {"memory": "ok", "file": "ok", "samedevice": "ok", "nccl": "ok"}

    def test_broken_plugins_are_listed_and_stop_nobody(self, torchless: Environment) -> None:
        torchless.install("dtorch-core", "dtorch-memory-store", deps=False)
        for name, source in {
            "raises": "raise OSError('no such library')",
            "exits": "raise SystemExit(3)",
            "garbled": "def (",
            "misspelt": "from dtorch_core import hookimpl\n@hookimpl\ndef dtorch_register_tensor_store(): return []",
        }.items():
            install_by_hand(torchless, name, source)

        listed = torchless.dtorch("plugins", "--json")
        assert listed.returncode == 0, listed.stderr
        assert states(listed.stdout) == {
            "memory": "ok", "raises": "broken", "exits": "broken", "garbled": "broken", "misspelt": "broken"
        }
        for cause in ("no such library", "SystemExit: 3", "SyntaxError", "dtorch_register_tensor_store"):
            assert cause in listed.stdout


class TestThirdParty:
    def test_example_store_is_chosen_when_named_and_passes_the_check(self, environment: Environment) -> None:
        environment.install("dtorch-example-store")
        assert_clean(environment, {"dtorch-core", "dtorch-example-store"})
        asked = {"DTORCH_TENSOR_STORE": "example"}
        named = environment.dtorch("explain", "--kind", "store", "--ranks", "2", "--json", env=asked)
        assert named.returncode == 0, named.stderr
        assert json.loads(named.stdout)["chosen"] == "example"
        opened = environment.run(OPEN_ON_TWO_RANKS.format(what="open_store('s', backend='example')"))
        assert "opened example" in opened
        checked = environment.dtorch("check", "example")
        assert checked.returncode == 0, f"{checked.stdout}\n{checked.stderr}"

    def test_example_group_works_without_a_store_and_passes_the_check(self, environment: Environment) -> None:
        environment.install("dtorch-example-group")
        assert_clean(environment, {"dtorch-core", "dtorch-example-group"})
        opened = environment.run(OPEN_ON_TWO_RANKS.format(what="open_group('g')"))
        assert "opened example" in opened
        checked = environment.dtorch("check", "example", "--kind", "group")
        assert checked.returncode == 0, f"{checked.stdout}\n{checked.stderr}"


OPEN_ON_TWO_RANKS = """
import dtorch_core
def rank(ctx):
    with ctx.{what} as handle:
        return handle.selection.chosen
try:
    print("opened", *set(dtorch_core.spawn(rank, 2, timeout=60)))
except dtorch_core.RankFailedError as failure:
    print(type(failure.__cause__).__name__, failure.__cause__)
"""


def assert_clean(environment: Environment, expected: set[str]) -> None:
    """Only ``expected`` of ours is there, from the wheels, and nothing that it requires is missing."""
    found = environment.run(
        "import importlib_metadata as m\n"
        "for d in m.distributions():\n"
        "    if d.name.startswith('dtorch'): print(d.name.replace('_', '-'), d.locate_file(''))"
    )
    ours = dict(line.split(maxsplit=1) for line in found.splitlines())
    assert set(ours) == expected
    assert {Path(place).resolve() for place in ours.values()} == {environment.site.resolve()}
    succeed([sys.executable, "-m", "pip", "--python", str(environment.python), "check"])


def install_by_hand(environment: Environment, name: str, source: str) -> None:
    """What pip leaves of a plugin, written directly: a module and the metadata with its entry point."""
    (environment.site / f"broken_{name}.py").write_text(source, encoding="utf-8")
    metadata = environment.site / f"broken_{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: broken-{name}\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(f"[dtorch]\n{name} = broken_{name}\n", encoding="utf-8")


def states(listing: str) -> dict[str, str]:
    return {plugin["name"]: plugin["state"] for plugin in json.loads(listing)["plugins"]}
