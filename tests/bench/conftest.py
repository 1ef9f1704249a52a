import pytest
import torch


@pytest.fixture(autouse=True)
def _threads_as_before():
    """The command line sets the number of threads of the whole process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
