from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.pipeline.runtime.pool import Pool


@pytest.fixture(scope="session")
def four() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def eight() -> Iterator[Pool]:
    pool = Pool(8)
    yield pool
    pool.stop()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As in the pool's processes: how a sum is shared between threads changes its last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
