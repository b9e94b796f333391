"""The benchmark suite survives variants that fail, says why, keeps to its minutes, and goes on where it was stopped."""

from pathlib import Path

import pytest
from tiny_bench import BENCH

from jax_grpo.bench import harness


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Children find `tiny_bench` beside this file, and the package as it is here."""
    here = Path(__file__).parent
    monkeypatch.setenv("PYTHONPATH", f"{here}:{here.parent}")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def test_a_failing_variants_reason_is_the_exceptions_own_line():
    assert harness.run_child(BENCH, "wrong-shape", "only", 1, 60)["error"] == (
        "TypeError: dot_general requires contracting dimensions to have the same shape, got (8,) and (7,)."
    )


def test_a_variant_that_is_killed_names_the_signal():
    assert harness.run_child(BENCH, "killed", "only", 1, 60)["error"].startswith("ended by SIGKILL")


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("usage: x\nx: error: no such problem", "x: error: no such problem"),
        (
            f"{harness.TRACEBACK}\n  File\nKeyError: 1\n\nDuring it\n\n{harness.TRACEBACK}\n  File\nValueError: 2\nmore",
            "ValueError: 2",
        ),
        ("", "no output"),
    ],
)
def test_the_reason_is_found_in_what_a_process_wrote(stderr, reason):
    assert harness.failure(stderr, 1) == reason
