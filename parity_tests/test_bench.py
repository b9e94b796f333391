"""The benchmark suite survives variants that fail, says why, keeps to its minutes, and goes on where it was stopped."""

import importlib
import importlib.util
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_bench import BENCH

from jax_grpo.bench import all as suite_all
from jax_grpo.bench import fits, fusions, harness, scaling, scan_layers
from jax_grpo.bench.knobs import KNOBS
from jax_grpo.bench.pictures import save_pictures
from jax_grpo.bench.update_problem import Problem
from jax_grpo.config import load_config
from jax_grpo.process_failure import TRACEBACK, failure
from jax_grpo.update import init_state, make_update

CONFIGS = Path(__file__).parents[1] / "configs"


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
            f"{TRACEBACK}\n  File\nKeyError: 1\n\nDuring it\n\n{TRACEBACK}\n  File\nValueError: 2\nmore",
            "ValueError: 2",
        ),
        ("", "no output"),
    ],
)
def test_the_reason_is_found_in_what_a_process_wrote(stderr, reason):
    assert failure(stderr, 1) == reason


def suite(folder, *arguments):
    """The suite of the tiny benchmark and of one that is not installed; the results' table."""
    entries = {"tiny": suite_all.Entry("tiny_bench", 1), "absent": suite_all.Entry("jax_grpo.bench.absent", 0.1)}
    suite_all.main(["--out", str(folder), "--minutes", "0.15", *arguments], entries)
    return (folder / "README.md").read_text(), json.loads((folder / "raw" / "tiny.json").read_text())


def test_a_suite_survives_what_fails_keeps_to_its_minutes_and_goes_on(tmp_path):
    began = time.monotonic()
    text, tiny = suite(tmp_path)
    assert time.monotonic() - began < 0.15 * 60 + suite_all.GRACE_S
    assert {name: "error" in record for name, record in tiny["variants"].items()} == {
        "done": False, "wrong-shape": True, "killed": True, "torch-slow": True
    }  # fmt: skip
    assert tiny["variants"]["torch-slow"]["error"].startswith("not done after")
    assert "No module named jax_grpo.bench.absent" in text
    (tmp_path / "raw" / "absent.json").write_text("{ half a file")
    _, again = suite(tmp_path, "--minutes", "0.05")
    assert again["variants"]["done"] == tiny["variants"]["done"], "kept, not measured again"


@pytest.mark.parametrize("name", list(suite_all.ENTRIES))
def test_every_entry_asks_for_what_its_benchmark_has(name):
    entry = suite_all.ENTRIES[name]
    if importlib.util.find_spec(entry.module) is None:
        pytest.skip(f"{entry.module} is not here")
    given = dict(zip(entry.arguments[::2], entry.arguments[1::2], strict=True))
    bench = getattr(importlib.import_module(entry.module), "BENCH", None)
    if bench is None:
        assert entry.module in (*suite_all.UNBUDGETED, scaling.__name__)
    else:
        assert given.get("--problem", next(iter(bench.problems))) in bench.problems
        assert set(given.get("--variants", next(iter(bench.variants))).split(",")) <= set(bench.variants)


def test_every_knob_is_a_config():
    for name, overrides in KNOBS.items():
        assert load_config(str(CONFIGS / "rookworld_4090.yaml"), overrides), name


def test_a_moments_time_is_shared_by_what_runs_and_a_gap_belongs_to_what_was_begun():
    spans = [("a", 1.0, 5.0), ("b", 3.0, 5.0), ("dot", 5.0, 5.1), ("c", 7.0, 8.0)]
    parts = dict(fusions.shared_out(spans))
    assert parts == pytest.approx({"a": 3.0, "b": 1.0, "dot": 2.0, "c": 1.0})
    assert sum(parts.values()) == pytest.approx(8.0 - 1.0)


def test_operations_and_their_times_are_those_of_the_program():
    """The matmuls of a layer and of its gradient, run five times by a loop, each with its FLOPs and its direction."""
    tokens, width, turns = 512, 256, 5

    def loss(w_HH, x_TH):
        return jnp.sum(jnp.tanh(x_TH @ w_HH))

    def trained(w_HH, x_TH):
        return jax.lax.fori_loop(0, turns, lambda _, w_HH: w_HH - jax.grad(loss)(w_HH, x_TH), w_HH)

    arguments = (jnp.ones((width, width)) / width, jnp.ones((tokens, width)))
    compiled = jax.jit(trained).lower(*arguments).compile()
    known = fusions.operations(compiled.as_text())
    events = fusions.traced(lambda: jax.block_until_ready(compiled(*arguments)))
    groups = fusions.grouped(events, known, peak=1e12, bandwidth=1e11)
    matmul = 2 * tokens * width * width
    flops = {way: sum(group.flops for key, group in groups.items() if key[0] == way) for way in ("forward", "backward")}
    assert flops == {"forward": turns * matmul, "backward": turns * matmul}
    assert all(group.seconds > 0 and group.floor_s >= group.flops / 1e12 for group in groups.values())
    lines = fusions.table(groups, whole_s=1.0)
    assert any(line.startswith(f"| forward |  | dot_general | {turns} |") for line in lines)


@pytest.mark.slow  # compiles four updates
@pytest.mark.parametrize("remat", [False, True])
def test_scanned_blocks_are_the_same_update(remat):
    problem = Problem(3, 2, 32, 164, 2, 2, 8, 4)
    results = []
    for scanned in (False, True):
        graphdef, params, batch, config = scan_layers.parts(problem, scanned, remat)
        state, metrics = make_update(graphdef, config, 10)(init_state(params, config), batch)
        results.append(
            (metrics["loss"], metrics["grad_norm"], state.params if scanned else scan_layers.stacked(state.params))
        )
    for ours, theirs in zip(*map(jax.tree.leaves, results), strict=True):
        # float32 rounding; a parameter has moved by AdamW's whole rate, 1e-6, whose sign a gradient near 0 may lose
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2.1e-6)


def test_peers_are_compared_with_the_first_variant():
    timed = {
        "ours": {"median_ms": 2.0},
        "torch": {"median_ms": 3.0},
        "TRL": {"error": "none"},
        "torch-b": {"median_ms": 5.0},
    }
    assert suite_all.peers({"x": {"variants": timed}})[-2] == "| x | ours 2.0 ms | torch 3.0 ms | 1.50 |"


def test_exponents_are_those_of_the_powers():
    points = [
        {
            "program": "update",
            "over": "width",
            "size": n,
            "min_ms": 3 * n**2,
            "flops": 5 * n**2,
            "bytes": n,
            "expected_bytes": n**0.5,
        }
        for n in (1, 2, 4)
    ]
    time_fit, memory_fit = fits.exponents(points)
    assert (time_fit["found"], time_fit["expected"]) == pytest.approx((2, 2))
    assert (memory_fit["found"], memory_fit["expected"]) == pytest.approx((1, 0.5))


@pytest.mark.slow
def test_scaling_gives_exponents_and_pictures_and_goes_on(tmp_path, capsys):
    file = tmp_path / "scaling.json"
    with pytest.raises(SystemExit, match="0 s were too few for length 8, length 32, length 128"):
        scaling.main(["--over", "length", "--json", str(file), "--seconds", "0"])
    scaling.main(["--over", "length", "--json", str(file)])
    record, shown = json.loads(file.read_text()), capsys.readouterr().out
    memory = next(fit for fit in record["exponents"] if fit["what"] == "memory" and fit["program"] == "update")
    print(shown)
    assert memory["found"] == pytest.approx(memory["expected"], abs=0.25)
    scaling.main(["--over", "length", "--json", str(file), "--resume", "--seconds", "0"])
    assert json.loads(file.read_text())["points"] == record["points"]
    pictures = save_pictures({"scaling": record}, tmp_path)
    assert [path.name for path in pictures] == ["scaling.png", "throughput.png", "roofline.png"]
