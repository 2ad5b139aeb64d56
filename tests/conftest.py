"""What pytest calls, and the fixtures and models of `shared`, for which torch is imported."""

from __future__ import annotations

import gc
import os
import sys

import pytest

if "PYTEST_XDIST_WORKER" in os.environ or "-n" not in sys.argv:  # what hands out the tests to workers needs no torch
    from shared import *  # noqa: F403

# The files that take longest, which begin first, so that no worker ends long after the others.
LONGEST = (
    "test_pipeline",
    "test_resume",
    "test_ranks",
    "test_kernels",
    "test_plan_memory",
    "test_zoo_models",
    "test_examples",
    "test_classes",
    "test_compare_command",
    "test_compare_suite",
    "test_campaigns",
    "test_extending",
    "test_reproduce_command",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is neither slow nor for a GPU as fast; the lines that others reach are not counted."""
    for item in items:
        slow = any(item.get_closest_marker(name) for name in ("slow", "gpu"))
        item.add_marker("no_cover" if slow else "fast")
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish() -> None:
    """Take what was imported out of garbage collection, which every build and release of a model asks for."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()
