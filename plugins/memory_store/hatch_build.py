"""Compiles look.c into the wheel, where there is a C compiler. Without one the wheel works too: see looking.py."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "dtorch_memory_store"


class CompileLook(BuildHookInterface[Any]):
    """Called by hatchling for each wheel; an editable one uses what lies beside the source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        source = Path(self.root, "src", PACKAGE, "look.c")
        if version == "editable":
            library = source.with_name("look.so")
            library.unlink(missing_ok=True)  # of an older source, maybe
            compiled(source, library)
            return

        library = Path(self.directory, "look.so")
        if compiled(source, library):
            build_data["force_include"][str(library)] = f"{PACKAGE}/look.so"
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        Path(self.directory, "look.so").unlink(missing_ok=True)


def compiled(source: Path, library: Path) -> bool:
    """Whether it could be; if not, that is said, and no error."""
    unfinished = library.with_suffix(".tmp")
    try:
        compiler = shlex.split(os.environ.get("CC") or "cc")
        library.parent.mkdir(parents=True, exist_ok=True)
        command = [*compiler, "-O2", "-shared", "-fPIC", "-o", str(unfinished), str(source)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        unfinished.replace(library)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        print(f"{PACKAGE}: built without look.c, which could not be compiled: {said}", file=sys.stderr)
        return False

    return True
