"""The benchmark suite survives variants that fail, says why, keeps to its minutes, and goes on where it was stopped."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from tiny_bench import BENCH
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from jax_grpo.bench import all as suite_all
from jax_grpo.bench import rollout, runner, update
from jax_grpo.bench.problems import Problem, config_of, model_of, sizes_of
from jax_grpo.bench.trl_settings import NotTheSame
from jax_grpo.config import ConfigError, load_config
from jax_grpo.memory.programs import run_of
from jax_grpo.system.devices import processor
from jax_grpo.system.process import TRACEBACK, failure
from torch_ref.judge import CASES, judge

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    """Children find `tiny_bench` beside this file, and the package as it is here."""
    here = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{here}:{here.parent}")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def run_child(variant: str, limit_s: float) -> dict:
    job = {"variant": variant, "problem": "only", "steps": 3, "allocator": runner.SYSTEM, "expected": None}
    return runner.run_child(BENCH, job, limit_s)


def test_a_failing_variants_reason_is_the_exceptions_own_line():
    assert run_child("wrong-shape", 60)["error"] == (
        "TypeError: dot_general requires contracting dimensions to have the same shape, got (8,) and (7,)."
    )


def test_a_variant_that_is_killed_names_the_signal():
    assert run_child("killed", 60)["error"].startswith("ended by SIGKILL")


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


def suite(folder, variants, minutes, *options):
    """The suite of the tiny benchmark and of one that is not installed; the results' table."""
    tiny = suite_all.Entry(f"tiny_bench --variants {variants}", 1)
    entries = {"tiny": tiny, "absent": suite_all.Entry("jax_grpo.bench.absent", 0.1)}
    suite_all.main(["--out", str(folder), "--minutes", str(minutes), *options], entries)
    return (folder / "README.md").read_text(), json.loads((folder / "raw" / "tiny.json").read_text())


@pytest.mark.slow
def test_a_variant_that_is_never_done_is_ended_at_its_limit():
    assert run_child("torch-slow", 2) == {"error": "not done after 2 s"}


@pytest.mark.slow  # processes that import JAX, one after another
def test_a_suite_survives_what_fails_and_goes_on(tmp_path):
    text, tiny = suite(tmp_path, "done,wrong-shape,killed", 60)
    assert {name: "error" in record for name, record in tiny["variants"].items()} == {
        "done": False, "wrong-shape": True, "killed": True
    }  # fmt: skip
    assert "No module named 'jax_grpo.bench.absent'" in text
    assert processor() in text.splitlines()[0] and "cores" in text.splitlines()[0] and "GB/s" in text.splitlines()[0]
    (tmp_path / "raw" / "absent.json").write_text("{ half a file")
    _, again = suite(tmp_path, "done,wrong-shape", 60)
    assert again["variants"]["done"] == tiny["variants"]["done"], "kept, not measured again"
    text, _ = suite(tmp_path, "done", 60, "--only", "absent")
    assert "## tiny" in text, "the table is of all that the folder has"


@pytest.mark.slow
def test_an_interrupted_benchmark_is_gone_on_with_and_what_it_had_is_kept(tmp_path):
    """As a machine that is taken away leaves it: the first variant's figure, and no error."""
    (tmp_path / "raw").mkdir()
    runner.main(BENCH, ["--variants", "done", "--json", str(tmp_path / "raw" / "tiny.json")])
    before = json.loads((tmp_path / "raw" / "tiny.json").read_text())["variants"]["done"]
    _, tiny = suite(tmp_path, "done,not-here", 60, "--only", "tiny")
    assert tiny["variants"] == {"done": before, "not-here": {"skipped": "only needs a quantum computer"}}
    assert suite_all.complete(tiny)


@pytest.mark.slow
def test_a_peer_that_is_not_installed_is_skipped_with_its_reason_and_asked_for_again(tmp_path):
    text, tiny = suite(tmp_path, "done,not-installed", 60, "--only", "tiny")
    reason = "the package a_package_that_nobody_installs is not installed"
    assert tiny["variants"]["not-installed"] == {"skipped": reason} and f"| not-installed | skipped: {reason} |" in text
    assert suite_all.complete(tiny), "nothing is left to do here"
    record = tiny | {"variants": {"done": {"median_ms": 1.0}, "x": {"skipped": reason}, "y": {"error": "none"}}}
    assert list(runner.with_figures(record)) == ["done"]


@pytest.mark.slow  # processes that import JAX, one after another
def test_a_suite_keeps_to_its_minutes(tmp_path, monkeypatch):
    """A benchmark that is never done is ended, by itself or from outside, and gets no more than its share of the minutes."""
    real, shares = suite_all.run, []
    monkeypatch.setattr(
        suite_all, "run", lambda entry, file, seconds: shares.append(seconds) or real(entry, file, seconds)
    )
    text, tiny = suite(tmp_path, "torch-slow", 0.15)
    assert shares[0] <= 0.15 * 60 / 1.1 and len(shares) == 2
    slow = tiny.get("variants", {}).get("torch-slow", tiny)["error"]
    assert slow.startswith(("not done after", "left out", "stopped after its share")), slow
    assert slow in text


def parsed(name: str) -> tuple[runner.Bench, dict[str, str]]:
    """The benchmark of an entry of the suite, and the entry's options."""
    module, *words = suite_all.ENTRIES[name].command.split()
    return importlib.import_module(module).BENCH, dict(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize("name", list(suite_all.ENTRIES))
def test_every_entry_asks_for_what_its_benchmark_has(name):
    bench, given = parsed(name)
    assert given.get("--problem", next(iter(bench.problems))) in bench.problems
    assert set(given.get("--variants", next(iter(bench.variants))).split(",")) <= set(bench.variants)
    assert "tiny" in bench.problems, "what a dry run asks for"


NAMED = [
    (module, name)
    for module in ("update", "iteration", "rollout", "optimiser")
    for name in importlib.import_module(f"jax_grpo.bench.{module}").BENCH.problems
    if any(name.replace("-", "_").startswith(file.stem) for file in CONFIGS.glob("*.yaml"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("module", "name"), NAMED)
def test_a_problem_that_carries_a_configs_name_has_that_configs_sizes(module, name):
    """Against the programs that a run of the config compiles. A name such as `legality-small` has no such file: it is refused."""
    file = CONFIGS / f"{name.replace('-', '_')}.yaml"
    config = load_config(str(file), [])
    run, bench = run_of(config), importlib.import_module(f"jax_grpo.bench.{module}").BENCH
    problem = bench.problem(name)
    prompts, width = run.programs[0].arguments[1].shape
    sizes = run.architecture
    assert problem[:10] == (
        sizes.num_layers, sizes.num_heads, sizes.hidden_size, sizes.vocab_size, prompts, config.rollout.group_size, width,
        config.rollout.max_new_tokens, config.model.compute_dtype, sizes.max_position_embeddings,
    )  # fmt: skip
    assert {share for share, _ in problem.parts} == {part.share for part in (config.task.mixture or {}).values()}
    assert rollout.caps(problem).max() == config.rollout.max_new_tokens
    own, benched = (c.model_dump(exclude={"model", "run_dir"}) for c in (config, config_of(problem)))
    assert benched == own, "its LM head, objective and update settings too"


def test_the_legality_run_is_among_the_problems_with_a_configs_name():
    assert {("update", "legality"), ("rollout", "legality"), ("rollout", "quickstart-mixed")} <= set(NAMED)


def test_the_benchs_update_of_the_legality_run_has_the_runs_own_batch_and_head():
    problem = update.BENCH.problem("legality")
    run = run_of(load_config(str(CONFIGS / "legality.yaml"), []))
    piece = next(program for program in run.programs if program.name == "update").arguments[1]
    _, params, batch, _ = update.jax_parts(problem)
    assert jax.tree.map(jnp.shape, batch.tokens) == jax.tree.map(jnp.shape, piece.tokens)
    assert sum(x.nbytes for x in jax.tree.leaves(params)) == run.resident["parameters"]
    with pytest.raises(ValueError, match=r"update\.minibatches 4; this benchmark is one step"):
        update.jax_parts(problem, update={"minibatches": 4})


@pytest.mark.parametrize("name", ["quickstart-mixed", "rook-small-8x8x64-mixed"])
def test_every_second_prompt_of_a_mixture_of_equal_shares_has_the_other_cap(name):
    problem = rollout.BENCH.problem(name)
    (_, first), (_, second) = problem.parts
    assert rollout.caps(problem).tolist() == [first, second] * (problem.prompts // 2)


def test_a_gpu_without_a_target_file_has_no_floor_and_the_table_says_why(monkeypatch):
    problem = rollout.BENCH.problem("tiny")
    _, params = model_of(problem, config_of(problem))

    def floors(device_kind: str) -> dict:
        gpu = SimpleNamespace(platform="gpu", device_kind=device_kind)
        monkeypatch.setattr(jax, "devices", lambda: [gpu])
        return rollout.floors(problem, params)

    known = floors("NVIDIA H200")
    assert known["floor_ms"] == problem.completion * known["decode_floor_ms"] > 0
    unknown = floors("NVIDIA H100 80GB HBM3")
    assert unknown == {"notes": ["no floor: assets/targets has no NVIDIA H100 80GB HBM3"]}
    timed = {"median_ms": 2.0, "min_ms": 1.0, "max_ms": 3.0, "steps": 3}
    assert runner.row("jax_grpo", timed | unknown, timed)[-1] == unknown["notes"][0]


@pytest.mark.parametrize(
    ("found", "expected", "words"),
    [
        ({"loss": float("nan")}, {"loss": 0.5}, "loss nan here"),
        ({"loss": float("nan")}, {"loss": float("nan")}, "loss nan here"),
        ({"loss": float("inf")}, {"loss": float("inf")}, "loss inf here"),
        ({"loss": 0.5}, {"loss": float("nan")}, "nan in the first"),
        ({"loss": 0.5}, {}, "nan in the first"),
        ({"loss": 0.5}, {"loss": 0.50001}, "expected finite, and 1e-05 apart"),
        ({"loss": 0.01}, {"loss": -0.01}, "loss 0.01 here"),
        ({"loss": 0.5, "grad_norm": 1.0}, {"loss": 0.5, "grad_norm": 1.0002}, "grad_norm 1.0 here"),
        ({"loss": 0.5, "dtype": "bfloat16"}, {"loss": 0.55}, "expected finite, and 0.02 apart"),
    ],
)
def test_a_peer_that_computes_something_else_is_not_timed(found, expected, words):
    with pytest.raises(runner.Disagreement, match=words):
        runner.agree(found, expected)
    prepared = runner.Prepared(lambda: None, {}, check=lambda _: found)
    with pytest.raises(runner.Disagreement, match=words):
        runner.measure(prepared, 3, expected=expected)


def test_those_that_agree_are_timed_and_a_matmul_beside_them_too():
    runner.agree({"loss": 0.5, "grad_norm": 1.00005}, {"loss": 0.500002, "grad_norm": 1.0})
    runner.agree({"loss": 0.5, "dtype": "bfloat16"}, {"loss": 0.505, "dtype": "float32"})
    runner.agree({"flops": 1.0}, {"loss": 0.5})


def test_every_variant_has_one_step_before_its_check_and_three_timed_ones_after_it():
    done: list[str] = []

    def checked(result: int) -> dict[str, int]:
        done.append("check")
        return {"result": result}

    def after() -> dict[str, int]:
        return {"steps_before": len(done)}

    prepared = runner.Prepared(lambda: done.append("step") or len(done), {}, checked, after)
    record = runner.measure(prepared, 3, until=0.0)  # long over: still as many as a median wants
    assert done == ["step", "check", "step", "step", "step"]
    assert (record["steps"], record["result"], record["steps_before"]) == (3, 1, 5)


def test_what_the_first_step_held_is_not_the_peak_of_the_steps():
    held = 200_000_000

    def step() -> None:
        if "done" not in retained:
            np.ones(held, np.uint8)  # as compiling does
        retained["done"] = True

    retained: dict[str, bool] = {}
    record = runner.measure(runner.Prepared(step, {}), 3)
    assert record["first_step_peak_bytes"] > record["process_peak_bytes"] + held / 2


def test_fewer_steps_than_a_median_wants_are_refused(capsys):
    with pytest.raises(SystemExit):
        runner.main(BENCH, ["--steps", "2"])
    assert "--steps 2: expected at least 3" in capsys.readouterr().err


@pytest.fixture(scope="module")
def tiny_update() -> tuple[Problem, dict]:
    """The tiny problem, and what our update makes of it."""
    problem = update.BENCH.problem("tiny")
    return problem, runner.measure(update.VARIANTS["jax_grpo"](problem), 3)


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=pytest.mark.slow if name.startswith(("jax_grpo-", "remat")) else [])
        for name in update.VARIANTS
        # Those of `PRECISIONS` set JAX's precision for their whole process.
        if name not in ("jax_grpo", "torch_ref-compiled", "torch_ref-flash") and name not in update.PRECISIONS
    ],
)
def test_every_variant_of_the_update_computes_the_same_loss_and_gradient(variant, tiny_update):
    if variant.startswith("TRL"):
        pytest.importorskip("trl")
    if variant == "TRL-liger":
        pytest.importorskip("liger_kernel", exc_type=ImportError)
    problem, ours = tiny_update
    record = runner.measure(update.VARIANTS[variant](problem), 3, expected=ours)
    assert {"loss", "grad_norm"} <= record.keys()


def test_flash_attention_without_a_mask_is_the_same_step(tiny_update):
    """`torch_ref-flash` before it is compiled: no sequence of a benchmark is padded."""
    problem, ours = tiny_update
    record = runner.measure(update._torch_ref(problem, compiled=False, flash=True), 3, expected=ours)
    assert record["sdpa"] == "flash"


def test_trl_as_it_comes_computes_another_loss_and_is_not_timed(tiny_update, monkeypatch):
    pytest.importorskip("trl")
    from jax_grpo.bench import trl_peer

    problem, ours = tiny_update
    plain = trl_peer.GRPOConfig
    monkeypatch.setattr(trl_peer, "GRPOConfig", lambda **given: plain(**given | {"use_bias_correction_kl": True}))
    with pytest.raises(runner.Disagreement, match="loss"):
        runner.measure(update.VARIANTS["TRL"](problem), 3, expected=ours)


def test_a_peers_loss_is_accumulated_over_parts_of_at_most_its_rows(tiny_update, monkeypatch):
    pytest.importorskip("trl")
    monkeypatch.setattr("jax_grpo.bench.problems.PEER_ROWS", 3)  # of 8 completions: 4 parts
    problem, ours = tiny_update
    for variant in ("TRL", "torch_ref"):
        record = runner.measure(update.VARIANTS[variant](problem), 3, expected=ours)
        assert record["micro_batches"] == 4


@pytest.mark.slow
def test_a_named_model_takes_its_own_weights_here_and_in_trl(tmp_path):
    """A Llama, in two micro-batches on either side; `torch_ref` stands beside GPT-2s of random weights alone."""
    pytest.importorskip("trl")
    judge(CASES["llama_tied"], torch.float32).save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(131)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", unk_token="w0").save_pretrained(tmp_path)
    problem = Problem(2, 4, 32, 131, 2, 4, 16, 4, positions=64, model=str(tmp_path), micro_batches=2)
    ours = runner.measure(update.VARIANTS["jax_grpo"](problem), 3)
    theirs = runner.measure(update.VARIANTS["TRL-plain-head"](problem), 3, expected=ours)
    assert ours["micro_batches"] == theirs["micro_batches"] == 2
    assert ours["flops"] == theirs["flops"] > 0
    with pytest.raises(runner.NotHere, match=r"is no GPT-2 of random weights"):
        update.VARIANTS["torch_ref"](problem)


def test_a_config_whose_loss_trl_is_not_given_is_refused(monkeypatch, tmp_path):
    trl_peer = pytest.importorskip("jax_grpo.bench.trl_peer")
    file = tmp_path / "k1.yaml"
    file.write_text((CONFIGS / "legality.yaml").read_text().replace("estimator: k3", "estimator: k1"))
    with pytest.raises(NotTheSame, match="the plain k3 only"):
        trl_peer.arguments_of(update.BENCH.problem(str(file)), tmp_path)


@pytest.mark.slow  # every variant of every benchmark, each in a process of its own
def test_a_dry_run_of_the_suite_completes_with_every_entry(tmp_path):
    suite_all.main(["--out", str(tmp_path), "--dry-run", "--minutes", "60"])
    text = (tmp_path / "README.md").read_text()
    assert "no figure here means anything" in text
    for name in suite_all.ENTRIES:
        record = json.loads((tmp_path / "raw" / f"{name}.json").read_text())
        skipped = {variant: x["skipped"] for variant, x in record.get("variants", {}).items() if "skipped" in x}
        print(name, skipped)
        assert suite_all.complete(record), name
        assert all(
            reason.startswith(("the package ", "its kernels need a GPU", "vLLM is")) for reason in skipped.values()
        )


def test_ours_is_the_first_variant_and_no_other_stands_in_for_it():
    timed = {"ours": {"error": "none"}, "ours-chunked": {"median_ms": 1.0}, "torch": {"median_ms": 3.0}}
    assert suite_all.peers({"x": {"variants": timed}}) == []


@pytest.mark.parametrize("name", [name for name, entry in suite_all.ENTRIES.items() if "--variants" in entry.command])
def test_the_first_variant_of_every_entry_is_its_benchs_default(name):
    bench, given = parsed(name)
    assert given["--variants"].split(",")[0] == next(iter(bench.variants))


def test_peers_are_compared_with_the_first_variant():
    timed = {
        "ours": {"median_ms": 2.0},
        "torch": {"median_ms": 3.0},
        "TRL": {"error": "none"},
        "torch-b": {"median_ms": 5.0},
    }
    assert suite_all.peers({"x": {"variants": timed}})[-2] == "| x | ours 2.0 ms | torch 3.0 ms | 1.50 |"


def test_a_config_of_another_family_is_no_problem_of_gpt2s(tmp_path):
    """Its sizes alone would be those of a GPT-2, which would be measured in its place."""
    (tmp_path / "config.json").write_text(json.dumps(CASES["llama_tied"] | {"vocab_size": 640}))
    model = f"{{architecture: {tmp_path / 'config.json'}, tokenizer: chess}}"
    (tmp_path / "c.yaml").write_text(
        f"run_dir: none\niterations: 9\nmodel: {model}\nprompts: {{max_prompt_tokens: 32}}\nrollout: {{max_new_tokens: 4}}\n"
    )
    with pytest.raises(
        ConfigError, match="the model is a llama; the implementations that are compared here are GPT-2s"
    ):
        sizes_of(str(tmp_path / "c.yaml"))
