"""One kernel thread, and a cost log of each test's own."""

import pytest
import torch

from placement.measuring.protocol import Protocol


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def log_path(tmp_path, monkeypatch):
    path = tmp_path / "costs.sqlite"
    monkeypatch.setenv("PLACEMENT_LOG", str(path))
    return path


@pytest.fixture
def quick() -> Protocol:
    """Few samples: these tests are about results, not about times."""
    return Protocol(rounds=2, samples=2, seconds=0.0, limit_s=0.05, warmup=1)
