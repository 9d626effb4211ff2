"""What the ranks of a run have of their own, beside their handles: a default process group, random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtorch_core._scope import Scope

if TYPE_CHECKING:
    from dtorch_core._spawn.script import Script


@dataclass(frozen=True, slots=True)
class Settings:
    """What :func:`dtorch_core.spawn` was asked for; in every process of the run the same."""

    world_size: int
    torch_distributed: bool = False
    per_rank_random: bool = False
    shares_process: bool = False
    """Ranks may be in one process: what is the process's has to be divided among them."""
    script: Script | None = None
    """What they run, where it opens its default process group itself."""

    @contextmanager
    def held(self, devices: Iterable[str]) -> Iterator[None]:
        """Torch is ready for the ranks on these devices, in a process that has some of them.

        :raises UnsupportedOperationError: if torch has changed too much for ranks that are threads.
        """
        with ExitStack() as stack:
            if self.shares_process and self.torch_distributed:
                from dtorch_core._thread_ranks.worlds import held

                stack.enter_context(held())

            if self.shares_process and self.per_rank_random:
                from dtorch_core._thread_ranks.random import held as random_held

                stack.enter_context(random_held(set(devices)))

            if self.script is not None:
                stack.enter_context(self.script.held())

            yield

    @contextmanager
    def entered(self, scope: Scope) -> Iterator[None]:
        """In here this thread is a rank that has what was asked for. Collective."""
        with ExitStack() as stack:
            if self.shares_process and self.per_rank_random:
                from dtorch_core._thread_ranks.random import entered

                stack.enter_context(entered(scope))

            if self.torch_distributed:
                from dtorch_core._spawn.default_group import default_group

                alone, opens = not self.shares_process, self.script is None
                stack.enter_context(default_group(scope, self.world_size, alone=alone, opens=opens))

            if self.script is not None:
                stack.enter_context(self.script.entered(scope, alone=not self.shares_process))

            yield
