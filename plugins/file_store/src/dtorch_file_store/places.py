"""Where the sessions of this user are kept, and whether that is a place where nobody else can write."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence

from dtorch_core._text import rank_list
from dtorch_core.errors import DtorchError

VARIABLE = "DTORCH_SESSION_DIR"
"""Where the sessions of this user are kept."""


def candidates() -> list[str]:
    """Where sessions may be, the place for new ones first."""
    own = os.environ.get(VARIABLE, "").strip()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "").strip()
    shared = os.path.join(tempfile.gettempdir(), f"dtorch-{os.geteuid()}")
    places = [os.path.abspath(own)] if own else []
    # It may name the folder of somebody else, after su, or none at all, in a container.
    if runtime and os.path.isabs(runtime) and os.path.isdir(runtime) and os.stat(runtime).st_uid == os.geteuid():
        places.append(os.path.join(runtime, "dtorch"))

    return [*places, shared]


def place_for_new() -> str:
    """The first of the candidates."""
    return candidates()[0]


def own_places() -> Iterator[str]:
    """Those of the candidates that are there, and ours."""
    for base in candidates():
        with contextlib.suppress(OSError, DtorchError):
            check_own(base)
            yield base


def check_own(path: str) -> None:
    """:raises DtorchError: if it is no folder of this user's, or others may write to it."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no folder"
        raise DtorchError(f"the folder for sessions, {path}, is {what}: remove it, or set {VARIABLE} to another place")

    if found.st_uid != os.geteuid():
        raise DtorchError(
            f"the folder for sessions, {path}, belongs to the user with id {found.st_uid}, and this process is of "
            f"{os.geteuid()}: set {VARIABLE} to a folder of your own"
        )

    if found.st_mode & 0o022:
        raise DtorchError(
            f"others may write to the folder for sessions, {path} (mode {stat.S_IMODE(found.st_mode):o}): "
            f"chmod 700 it, or set {VARIABLE} to another place"
        )


def described(path: str) -> dict[str, str]:
    """Tells a folder from every other one of this machine: one name is not always one folder, nor the other way."""
    found = os.stat(path)
    return {"folder": path, "place": f"{found.st_dev}:{found.st_ino}"}


def check_same(who: str, described: Sequence[Mapping[str, str]]) -> None:
    """:raises DtorchError: if the folders that the ranks have described, in rank order, are not the same one."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, said in enumerate(described):
        ranks.setdefault((said["place"], said["folder"]), []).append(rank)

    if len({place for place, _ in ranks}) == 1:
        return

    where = " and ".join(f"{folder} ({rank_list(here)})" for (_, folder), here in ranks.items())
    alike = ", which are not one folder, though their names are alike" if len({name for _, name in ranks}) == 1 else ""
    raise DtorchError(
        f"{who}: the ranks can't meet, since their folders for sessions are {where}{alike}: set {VARIABLE} to one "
        f"folder for all ranks"
    )


@contextlib.contextmanager
def made_or_said(path: str) -> Iterator[None]:
    """:raises DtorchError: instead of an ``OSError``, with the way out."""
    try:
        yield
    except OSError as error:
        raise DtorchError(
            f"the folder for sessions, {path}, can't be made or written: {error.strerror}; set {VARIABLE} to a folder "
            f"on a disk that has room and can be written"
        ) from None
