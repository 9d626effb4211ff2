"""Compiles look.c into the wheel, where there is a C compiler. Without one the wheel works too: see looking.py."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "dtorch_memory_store"


class CompileLook(BuildHookInterface[Any]):
    """Called by hatchling for each wheel; an editable one uses what lies beside the source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        source = Path(self.root, "src", PACKAGE, "look.c")
        editable = version == "editable"
        folder = source.parent if editable else Path(tempfile.mkdtemp())
        library = folder / "look.so"
        if not compiled(source, library) or editable:
            return

        build_data["force_include"][str(library)] = f"{PACKAGE}/look.so"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def compiled(source: Path, library: Path) -> bool:
    """Whether it could be; if not, that is said, and no error."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    unfinished = library.with_suffix(".tmp")
    command = [*compiler, "-O2", "-shared", "-fPIC", "-o", str(unfinished), str(source)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        unfinished.replace(library)  # another process may have the old one loaded
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        print(f"{PACKAGE}: built without look.c, which could not be compiled: {said}", file=sys.stderr)
        return False

    return True
