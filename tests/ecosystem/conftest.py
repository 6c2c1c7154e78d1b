"""Fixtures of tests inside other frameworks: each file gives the environment back, and none reaches for the network."""

import os
import socket

import pytest


@pytest.fixture(autouse=True, scope="module")
def _environment():
    """Give the environment back: a rank that runs in this process has changed it, as a launcher does."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return a table of characters and their names, where a file has no data of its own."""
    from glyph_files import write_pairs  # which needs matplotlib

    return str(write_pairs(tmp_path_factory.mktemp("pairs"), "pairs.csv"))


@pytest.fixture
def no_network(monkeypatch):
    """Let each use of the network fail."""

    def refused(*_):
        raise AssertionError("the program reached for the network")

    monkeypatch.setattr(socket, "getaddrinfo", refused)
