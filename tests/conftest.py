"What several files of tests use."
import pytest, torch


@pytest.fixture
def one_thread():
    "One thread for torch: tiny models gain nothing from more, and lose much."
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
