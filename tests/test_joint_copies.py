"""Every rank raises a copy of what the work raised: of its type, with its text, whatever its __init__ takes."""

import json
import pickle

import pytest
import torch

from dtorch_core import CollectiveMismatchError
from dtorch_core.joint import copy_of, let_go


class Made(ValueError):
    """Its text is not what it is made from."""

    def __init__(self, number):
        super().__init__(f"bad number {number}")
        self.number = number


class Named(RuntimeError):
    """It can't be made from its args."""

    def __init__(self, *, name):
        super().__init__("no name")
        self.name = name


class Told(Exception):
    def __str__(self):
        return f"told {self.what}"


def told():
    error = Told()
    error.what = "all"
    raise error


def raises(error):
    raise error


WAYS = {
    "ours": lambda: raises(CollectiveMismatchError("these do not fit")),
    "text of its own": lambda: raises(Made(3)),
    "by keyword": lambda: raises(Named(name="x")),
    "with attributes": told,
    "of a file": lambda: open("/no/such/file"),
    "json": lambda: json.loads("{"),
    "unicode": lambda: b"\xff".decode(),
    "pickle": lambda: pickle.loads(b"x"),
    "key": lambda: {}["x"],
    "syntax": lambda: compile("1+", "file", "eval"),
    "torch": lambda: torch.ones(2) @ torch.ones(3),
}


@pytest.mark.parametrize("way", WAYS)
def test_copy_is_what_was_raised_without_its_frames(way):
    try:
        WAYS[way]()
    except Exception as raised:
        error, attributes = raised, dict(vars(raised))

    let_go(error)
    first = copy_of(error)
    with pytest.raises(type(error)):
        raise first

    second = copy_of(error)  # for another rank, later
    assert second is not first
    for copy in (first, second):
        assert type(copy) is type(error)
        assert str(copy) == str(error)
        assert vars(copy) == attributes
        assert copy.__cause__ is error  # and that one says where it was raised

    assert error.__traceback__ is None
    assert second.__traceback__ is None
    notes = getattr(error, "__notes__", [])
    assert len([note for note in notes if note.startswith("Raised here:")]) == (way != "ours")
