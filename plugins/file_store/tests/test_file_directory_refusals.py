"""Places where no session can be: other people's, or what can't be written, each said with the way out."""

import errno
import os
import socket
from pathlib import Path

import pytest
from dtorch_file_store.directory import SessionDirectory, report, sessions
from dtorch_file_store.places import VARIABLE

from dtorch_core import DtorchError

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    pytest.register_assert_rewrite("file_directory_others")
    import file_directory_others as others
    from file_directory_others import about, joined

base, other = others.base, others.other  # fixtures


class TestRefusals:
    def test_folder_of_another_user(self, base, monkeypatch):
        os.mkdir(base, 0o700)
        owner, other = os.stat(base).st_uid, os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
        with pytest.raises(DtorchError, match=f"belongs to the user with id {owner}, .* is of {other}: set {VARIABLE}"):
            SessionDirectory("abc", 0, about())

        assert os.listdir(base) == [] and sessions() == []
        with pytest.raises(DtorchError, match="belongs to the user"):
            report()

    def test_symbolic_link(self, base, tmp_path):
        tmp_path.chmod(0o700)
        os.symlink(tmp_path, base)
        with pytest.raises(DtorchError, match=f"{base}, is a symbolic link: remove it, or set {VARIABLE}"):
            SessionDirectory("abc", 0, about())

        assert os.listdir(tmp_path) == []

    def test_folder_that_others_may_write_to(self, base):
        os.mkdir(base)
        os.chmod(base, 0o770)
        with pytest.raises(DtorchError, match=r"others may write to .*\(mode 770\): chmod 700 it, or set "):
            SessionDirectory("abc", 0, about())

    def test_path_too_long_for_a_socket(self, base, monkeypatch):
        deep = os.path.join(os.path.dirname(base), "d" * 100)
        monkeypatch.setenv(VARIABLE, deep)
        with pytest.raises(DtorchError, match=f"has at most 107: set {VARIABLE} to a folder with a shorter name"):
            SessionDirectory("abc", 0, about())

        assert not os.path.exists(deep)

    def test_longest_path_that_is_allowed_can_be_bound(self, base, monkeypatch):
        folder = os.path.dirname(base)
        deep = os.path.join(folder, "d" * (107 - len(folder) - len("//abc/0.sock")))
        monkeypatch.setenv(VARIABLE, deep)
        with joined("abc") as session, socket.socket(socket.AF_UNIX) as listener:
            assert len(session.socket_path(0)) == 107
            listener.bind(session.socket_path(0))
            with pytest.raises(DtorchError, match="has 108 bytes"):
                session.socket_path(10)

    def test_place_that_can_not_be_made(self, base, monkeypatch):
        with open(base, "w") as file:
            file.write("a file")

        with pytest.raises(DtorchError, match=f"can't be made or written: .*; set {VARIABLE} to a folder on a disk"):
            SessionDirectory("abc", 0, about())

        monkeypatch.setenv(VARIABLE, "/proc/dtorch")  # nobody may write there, not even root
        with pytest.raises(DtorchError, match=f"/proc/dtorch, can't be made or written: .*; set {VARIABLE}"):
            SessionDirectory("abc", 0, about())

    @pytest.mark.parametrize("call", ["open", "write", "rename"])
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
    def test_full_or_read_only_disk(self, base, monkeypatch, call, number):
        def refuse(*args):
            raise OSError(number, os.strerror(number))

        before = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(os, call, refuse)
        with pytest.raises(DtorchError, match=f"can't be made or written: {os.strerror(number)}; set {VARIABLE}"):
            SessionDirectory("abc", 0, about())

        monkeypatch.undo()
        assert len(os.listdir("/proc/self/fd")) == before
        assert [name for name in os.listdir(base) if name.startswith(".")] == []
