"""A tiny target and draft with lively weights, on one thread."""

import pytest
import torch
from dspark_pairs import make_pair


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pair():
    """fp32, dense."""
    return make_pair()


@pytest.fixture(scope="session")
def bf16_pair():
    """The package's ops."""
    return make_pair(dtype=torch.bfloat16)


@pytest.fixture
def fresh_pair():
    """fp32, dense, for tests that change weights."""
    return make_pair()
