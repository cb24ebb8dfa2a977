"""Fixtures and settings of all tests."""

import pytest
import torch

# Two test workers on two cores: more threads would only wait for each other, and bits depend on the thread count.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fresh_seed() -> None:
    torch.manual_seed(0)
