"""Fixtures and settings of all tests."""

import os

# Kernels run in Triton's interpreter; it must be chosen before anything imports triton. `make test-gpu` compiles them.
os.environ.setdefault("TRITON_INTERPRET", "1")
# As the command does: two test workers share two cores with the processes they start, and threads that wait by spinning
# would slow all of them down.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Tests prepare what they read; those of the cache have one of their own.
os.environ["WEFT_CACHE"] = "off"

import pytest
import torch
from hypothesis import HealthCheck, settings

# Two test workers on two cores: more threads would only wait for each other, and bits depend on the thread count.
torch.set_num_threads(1)

# How long an example takes says more about the machine's other work than about the code.
settings.register_profile("weft", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("weft")


@pytest.fixture(autouse=True)
def _fresh_seed() -> None:
    torch.manual_seed(0)
