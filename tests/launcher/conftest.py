"""Launchers that run inside a test set up the log of the whole process: put it back after each test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("tgi")
    handlers, root_level, level = list(root.handlers), root.level, ours.level
    yield
    root.handlers[:] = handlers
    root.setLevel(root_level)
    ours.setLevel(level)
