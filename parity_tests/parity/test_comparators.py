"""What compares two sides refuses one that is not finite, wherever the NaN stands: `max` over errors passes by most of them."""

import copy
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from both import show
from conftest import relative_error

from torch_ref.compare import (
    TOLERANCES,
    NotFinite,
    difference,
    floor_of,
    largest,
    logp_error,
    relative_l2,
    scalar_errors,
    tensor_errors,
)
from torch_ref.parity_report import rows_of

ROOT = Path(__file__).resolve().parents[2]
SIDES = {"found": "side under test", "reference": "reference"}
BAD = [np.nan, np.inf, -np.inf]
STEP = {
    "grad/wte": np.arange(1.0, 7.0),
    "grad/wpe": np.arange(2.0, 8.0),
    "grad/ln_f": np.arange(3.0, 9.0),
    "loss": np.array(0.5),
    "policy_loss": np.array(0.4),
    "grad_norm": np.array(1.5),
    "entropy": np.array(0.7),
    "ratio/mean": np.array(1.0),
    "kl/mean": np.array(0.1),
    "clip_fraction/low": np.array(0.2),
    "advantages": np.array([0.9, -0.3, -0.6, 0.0]),
    "logp": np.full((2, 3), -1.0),
}
MASK = np.array([[0, 1, 1], [0, 1, 0]])


def _with(name: str, bad: float, at: tuple[int, ...] = (-1,)) -> dict[str, np.ndarray]:
    """The step with one bad number; a scalar is that number."""
    step = copy.deepcopy(STEP)
    step[name][at if step[name].ndim else ()] = bad
    return step


def _sides(side: str, broken) -> tuple:
    return (broken, STEP) if side == "found" else (STEP, broken)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["kl/mean", "entropy", "clip_fraction/low", "loss", "ratio/mean"])
def test_a_metric_that_is_not_finite_is_named_with_its_side(name, side, bad):
    with pytest.raises(NotFinite, match=f"^{name}: 1 of 1 values of the {SIDES[side]} are not finite, such as {bad}"):
        scalar_errors(*_sides(side, _with(name, bad)), "float32")


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["grad/wte", "grad/wpe", "grad/ln_f"])
def test_a_gradient_that_is_not_finite_is_named_with_its_side(name, side, bad):
    with pytest.raises(NotFinite, match=f"^{name}: 1 of 6 values of the {SIDES[side]} are not finite"):
        tensor_errors(*_sides(side, _with(name, bad)))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", [name for name, x in STEP.items() if x.ndim == 0])
def test_a_small_number_of_the_wrong_sign_is_within_no_tolerance(name, dtype):
    """Not in bfloat16 either, where the floor of every metric once was 1."""
    actual, reference = (STEP | {name: np.array(x)} for x in (0.01, -0.01))
    assert scalar_errors(actual, reference, dtype)[name] > TOLERANCES[dtype].scalars


def test_the_losses_floor_is_the_size_of_the_terms_that_cancel():
    scaled = STEP | {"advantages": 100 * STEP["advantages"]}  # rewards in another unit
    assert floor_of("loss", STEP, "bfloat16") == pytest.approx(0.45)
    assert floor_of("policy_loss", scaled, "bfloat16") == pytest.approx(45)
    assert floor_of("kl/mean", scaled, "bfloat16") == floor_of("loss", scaled, "float32") == 0.1


@pytest.mark.parametrize("side", SIDES)
def test_a_log_probability_counts_where_the_mask_has_it_and_only_there(side):
    actual, reference = (step["logp"] for step in _sides(side, _with("logp", np.nan, (0, 2))))
    with pytest.raises(NotFinite, match=f"^logp: 1 of 3 values of the {SIDES[side]}"):
        logp_error(actual, reference, MASK)
    actual, reference = (step["logp"] for step in _sides(side, _with("logp", np.nan, (1, 2))))
    assert logp_error(actual, reference, MASK) == 0


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("leaf", [0, 1, 2])
def test_trees_are_compared_leaf_by_leaf(leaf, side):
    tree = [jnp.ones(3), jnp.ones(4), jnp.ones(5)]
    broken = [x.at[1].set(jnp.nan) if i == leaf else x for i, x in enumerate(tree)]
    with pytest.raises(NotFinite, match=SIDES[side]):
        relative_error(*((broken, tree) if side == "found" else (tree, broken)))


def test_a_leaf_that_only_the_reference_has_as_zero_is_infinitely_wrong():
    zero, one = np.zeros(3), np.ones(3)
    assert relative_error([zero, one], [zero, one]) == 0
    assert relative_error([one, one], [zero, one]) == np.inf
    assert relative_l2("x", zero, one) == 1 and difference("x", zero, one) == 1


@pytest.mark.parametrize("name", ["first", "middle", "last"])
def test_an_error_that_is_nan_is_never_passed_by(name):
    errors = {"first": 0.1, "middle": 0.3, "last": 0.2}
    assert largest(errors) == ("middle", 0.3)
    with pytest.raises(NotFinite, match=f"^{name}: the error is NaN"):
        show("errors", errors | {name: np.nan}, 1.0)


@pytest.mark.parametrize("bad", BAD)
def test_numpys_own_comparison_refuses_what_both_sides_have_wrong(bad):
    with pytest.raises(NotFinite):
        np.testing.assert_allclose([1.0, bad], [1.0, bad])


@pytest.mark.parametrize(
    ("kind", "name"), [("scalars", "kl/mean"), ("scalars", "entropy"), ("gradients", "grad/transformer.wpe.weight")]
)
@pytest.mark.parametrize("batch", ["on policy", "off policy"])
def test_the_parity_report_makes_no_table_of_nan(kind, name, batch):
    results = json.loads((ROOT / "docs/results/parity/legality/results.json").read_text())
    for steps in results["one_step"].values():
        for errors in steps.values():
            errors["floors"] = {"loss": 0.7, "policy_loss": 0.7}
    assert {row.floor for row in rows_of(results)} == {"", "0.0001; the two losses 0.7", "0.1; the two losses 0.7"}
    results["one_step"]["float32"][batch][kind][name] = float("nan")
    with pytest.raises(NotFinite, match=name.removeprefix("grad/transformer.")):
        rows_of(results)
