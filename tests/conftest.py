"""Tests on a GPU take turns: one may need most of its memory, and several processes run tests."""

import fcntl
import os

import pytest
import torch


@pytest.fixture(autouse=True)
def turn_on_the_gpu(request, tmp_path_factory):
    """Held by one process at a time, which then gives back the memory that torch keeps."""
    if request.node.get_closest_marker("gpu") is None or not torch.cuda.is_available():
        yield
        return
    folder = tmp_path_factory.getbasetemp()
    with open((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "gpu.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
        yield
        torch.cuda.empty_cache()
