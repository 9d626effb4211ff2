"""A script in the style of torchrun, unmodified, as one rank of a small world."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import CodeType, ModuleType

from dtorch_core._scope import Scope
from dtorch_core._spawn import output
from dtorch_core._spawn.rank_context import RankContext
from dtorch_core._thread_ranks import environ, main
from dtorch_core._thread_ranks import signals as _rank_signals
from dtorch_core._thread_ranks.threads import inherited


@dataclass(frozen=True, slots=True)
class Script:
    """What every rank runs."""

    name: str
    """The path of a file, or the name of a module."""
    is_module: bool
    arguments: tuple[str, ...]
    backend: str
    """On which its process groups are."""
    world_size: int
    port: int
    """For a store that the script opens itself."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """A process in which ranks run the script. Entered by its main thread, if signals are to be heard."""
        with ExitStack() as stack:
            for part in (environ, main, _rank_signals, output):
                stack.enter_context(part.held())

            stack.enter_context(inherited.held())
            before = sys.argv, sys.path[:]
            stack.callback(_restore, *before)
            sys.argv = [self.name, *self.arguments]
            sys.path.insert(0, os.getcwd() if self.is_module else os.path.dirname(os.path.realpath(self.name)))
            yield

    @contextmanager
    def entered(self, scope: Scope, *, alone: bool) -> Iterator[None]:
        """This thread, and those it starts, are a rank to which the script's process is its own.

        :param alone: it is.
        """
        from dtorch_core._spawn import script_groups

        with ExitStack() as stack:
            stack.enter_context(output.entered(scope))
            stack.enter_context(environ.entered(scope, self._variables(scope), alone=alone))
            stack.enter_context(_rank_signals.entered(scope))
            stack.enter_context(script_groups.entered(scope, self.world_size, self.backend))
            yield

    def _variables(self, scope: Scope) -> dict[str, str]:
        """What torchrun sets. On a GPU, LOCAL_RANK is that GPU's number, which scripts make their current device."""
        _, _, index = scope.device.partition(":")
        return {
            "RANK": str(scope.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": index or str(scope.rank),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_RANK": str(scope.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "ROLE_NAME": "default",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }


def run(ctx: RankContext, script: Script) -> None:
    """Run it in a ``__main__`` of the rank's own.

    :raises SystemExit: if it ends with a status that is no success.
    """
    with main.entered(ctx._scope) as module:
        code = _prepared(script, module)
        try:
            exec(code, module.__dict__)
        except SystemExit as end:
            if end.code not in (None, 0):
                raise


def _prepared(script: Script, module: ModuleType) -> CodeType:
    """The script's code; the module has what Python gives a ``__main__``."""
    if script.is_module:
        spec = importlib.util.find_spec(script.name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{script.name}.__main__")

        code = getattr(spec and spec.loader, "get_code", lambda name: None)(spec.name if spec else "")
        if spec is None or code is None:
            raise ModuleNotFoundError(f"there is no module {script.name!r} that can be run")

        module.__spec__, module.__loader__, module.__package__ = spec, spec.loader, spec.parent
        module.__file__ = spec.origin
        sys.argv[0] = spec.origin or script.name
        return code  # type: ignore[no-any-return]

    module.__file__ = os.path.abspath(script.name)
    with open(module.__file__, "rb") as file:
        return compile(file.read(), module.__file__, "exec", dont_inherit=True)


def _restore(arguments: list[str], path: list[str]) -> None:
    sys.argv, sys.path[:] = arguments, path
