"""What the doctor says of ranks that share a GPU."""

import pytest
import torch
from dtorch_samedevice_group import sharing


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def test_threads_are_recommended(gpus, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    (line,) = sharing.report()
    assert "threads of one process are the fast way" in line
    assert "nvidia-cuda-mps-control -d" in line


def test_mps_is_seen(gpus, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    (tmp_path / "control").touch()
    (line,) = sharing.report()
    assert "NVIDIA MPS runs" in line


def test_nothing_is_said_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert sharing.report() == []
