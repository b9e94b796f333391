"""Which cases a default run has; and a time budget for the long suites of a slow machine: what has not begun is skipped.

The budget is set by `.ci/run`, and by nothing else: $JAX_GRPO_TEST_SECONDS, and $JAX_GRPO_TEST_ORDER, a text such as the commit.
Files come in an order that follows from it, so that over several commits each gets its turn. No test's outcome depends on it.
"""

import hashlib
import os
import time
from collections.abc import Iterable

import pytest

SECONDS, ORDER = "JAX_GRPO_TEST_SECONDS", "JAX_GRPO_TEST_ORDER"
BEGAN = time.monotonic()


@pytest.hookimpl(tryfirst=True)  # before pytest's own, which reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    divide_cases(items, whole=not any("::" in argument for argument in config.args))
    if order := os.environ.get(ORDER):
        items.sort(key=lambda item: hashlib.sha256(f"{order}/{item.path.name}".encode()).digest())


def pytest_runtest_setup(item: pytest.Item) -> None:
    budget = os.environ.get(SECONDS)
    if budget is not None and time.monotonic() - BEGAN > float(budget):
        pytest.skip(f"not begun within the {budget} s of ${SECONDS}")


def divide_cases(items: Iterable[pytest.Item], whole: bool) -> None:
    """Makes cases slow: all but those that a mark `default_cases` names, or those that `slow_cases` names.

    Raises:
        pytest.UsageError: a name that no case has, where `whole` files are collected.
    """
    unknown: dict[str, set[str]] = {}
    for item in items:
        for mark in (*item.iter_markers("default_cases"), *item.iter_markers("slow_cases")):
            case = item.callspec.id if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ""
            unknown.setdefault(item.nodeid.partition("[")[0], set(mark.args)).discard(case)
            if (case in mark.args) == (mark.name == "slow_cases"):
                item.add_marker("slow")
    if whole and any(unknown.values()):
        raise pytest.UsageError(
            f"marks that name no case: {[(test, *names) for test, names in unknown.items() if names]}"
        )
