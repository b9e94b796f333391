"""A time budget for the long suites of a machine that may be slow: what has not begun by then is skipped, and says so.

Set by `.ci/run`, and by nothing else: $JAX_GRPO_TEST_SECONDS, and $JAX_GRPO_TEST_ORDER, a text such as the commit. Files come in an
order that follows from it, so that over several commits each gets its turn. No test's outcome depends on it.
"""

import hashlib
import os
import time
from collections.abc import Collection, Iterable
from typing import Any

import pytest

SECONDS, ORDER = "JAX_GRPO_TEST_SECONDS", "JAX_GRPO_TEST_ORDER"
BEGAN = time.monotonic()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if order := os.environ.get(ORDER):
        items.sort(key=lambda item: hashlib.sha256(f"{order}/{item.path.name}".encode()).digest())


def pytest_runtest_setup(item: pytest.Item) -> None:
    budget = os.environ.get(SECONDS)
    if budget is not None and time.monotonic() - BEGAN > float(budget):
        pytest.skip(f"not begun within the {budget} s of ${SECONDS}")


def slow_but(by_default: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """The cases for `parametrize`, of which a default run takes these: the others ask the same in other words."""
    return [pytest.param(case, marks=[] if case in by_default else [pytest.mark.slow]) for case in cases]
