"""A fixture for all tests inside other frameworks: each file gives the environment back."""

import os

import pytest


@pytest.fixture(autouse=True, scope="module")
def _environment():
    """Give the environment back: a rank that runs in this process has changed it, as a launcher does."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
