"""The world of ``torch.distributed`` of one rank that is a thread."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

from torch.distributed import distributed_c10d

from dtorch_core import _scope

KEY = "torch.distributed"
"""Of a rank's world, in ``Scope.own``."""

MARK = re.compile(r"@rank\d+\.\d+$")
"""A rank's own, at the end of a group's name."""

_numbers = itertools.count(1)
KEPT = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "group_count", "tags_to_pg", "pg_to_tag")
"""What torch's world keeps in variables of its module, and a rank's world in itself."""


@functools.cache
def world_class() -> type:
    """torch's world, with everything in itself."""

    def kept(name: str) -> property:
        return property(lambda self: self.kept[name], lambda self, value: self.kept.__setitem__(name, value))

    def start(self: Any, rank: int) -> None:  # noqa: ANN401
        distributed_c10d._World.__init__(self)
        self.kept = {name: 0 if name == "group_count" else {} for name in KEPT}
        self.number = next(_numbers)  # of this world alone, in this process
        self.mark = f"@rank{rank}.{self.number}"
        self.marked = set()  # the names under which its groups are registered
        self.meshes = []  # weak references
        self.tracker = None  # of DTensor's random numbers
        self.handlers = None  # of DTensor's operators

    return type("RankWorld", (distributed_c10d._World,), {"__init__": start, **{name: kept(name) for name in KEPT}})


def mine() -> Any:  # noqa: ANN401 - a class made of torch's
    """This thread's rank's own world; None where there is none."""
    scope = _scope.current()
    return None if scope is None else scope.own.get(KEY)
