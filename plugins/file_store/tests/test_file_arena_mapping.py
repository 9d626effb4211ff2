"""A peer's side of shared memory: what it sees, and what it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dtorch_file_store.arena import Mapping

from dtorch_core import DtorchError

with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(Path(__file__).parent))
    pytest.register_assert_rewrite("file_arena_parts")
    import file_arena_parts as parts
    from file_arena_parts import MIB, peer_of

arena, made = parts.arena, parts.made  # fixtures


class TestMapping:
    def test_another_process_sees_what_is_written_and_writes_itself(self, arena, made):
        tensor = arena.empty((1000,), torch.int64).copy_(torch.arange(1000))
        block, offset = arena.locate(tensor)
        code = (
            "import sys, torch\n"
            "from dtorch_file_store.arena import Mapping\n"
            "fd, size, offset = map(int, sys.argv[1:])\n"
            "memory = Mapping(fd, size).bytes(offset, 8000).view(torch.int64)\n"
            "assert memory.tolist() == list(range(1000))\n"
            "memory.mul_(3)\n"
        )
        arguments = [str(made[0].fd), str(made[0].size), str(block.offset + offset)]
        command = [sys.executable, "-W", "ignore", "-c", code, *arguments]
        done = subprocess.run(command, pass_fds=[made[0].fd], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert tensor.tolist() == list(range(0, 3000, 3))

    def test_segment_can_be_neither_shortened_nor_lengthened(self, arena, made):
        arena.allocate(10)
        fd = os.dup(made[0].fd)
        for size in (0, made[0].size + 4096):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)

        os.close(fd)

    def test_bytes_outside_are_refused(self, arena, made):
        arena.allocate(10)
        peer = peer_of(made[0])
        for offset, nbytes in ((0, peer.size + 1), (peer.size, 1), (-1, 10), (10, -1)):
            with pytest.raises(DtorchError, match="are outside of a peer's 4 MiB of shared memory"):
                peer.bytes(offset, nbytes)

        assert peer.bytes(peer.size, 0).shape == (0,)

    def test_closed_mapping_gives_nothing(self, arena, made):
        arena.allocate(10)
        peer = peer_of(made[0])
        peer.close()
        with pytest.raises(DtorchError, match="outside"):
            peer.bytes(0, 10)

    def test_what_is_no_sealed_segment_is_refused_and_closed(self, tmp_path):
        def unsealed():
            fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, MIB)
            return fd

        def file():
            fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
            os.ftruncate(fd, MIB)
            return fd

        for make in (unsealed, file):
            fd = make()
            with pytest.raises(DtorchError, match="a peer's shared memory of 1 MiB"):
                Mapping(fd, MIB)

            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)

    def test_segment_of_another_size_is_refused(self, arena, made):
        arena.allocate(10)
        with pytest.raises(DtorchError, match="a peer's shared memory of 8 MiB"):
            Mapping(os.dup(made[0].fd), 8 * MIB)
