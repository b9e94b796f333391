"""`python -m torch_ref.parity_families --out DIR`: every family of models, three precisions, two judges, one table.

`jax_grpo` against `torch_ref` and against transformers' own model in `torch_ref`'s loss and optimiser, on tiny random weights:
logits, loss, KL and gradients of one step, twenty AdamW steps, greedy completions. Writes results.json and README.md. Exit status 1
if anything is outside its tolerance. Needs the package `transformers`.
"""

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from jax_grpo.config import Config
from jax_grpo.config.model import ModelConfig
from jax_grpo.policy.named import Model, load_model
from jax_grpo.rollout.decoding import DecodingSettings
from jax_grpo.rollout.generate import make_generate
from jax_grpo.rollout.sampling import Sampling
from torch_ref.compare import TOLERANCES, largest, logits_tolerance
from torch_ref.crafted import NEW, PROMPT, Arrays, crafted_batch
from torch_ref.generate import end_of_text, generate
from torch_ref.judge import CASES, Judged, judge, true_float64
from torch_ref.model import LanguageModel
from torch_ref.parity import ADAMW_STEPS, environment, many_steps, one_step
from torch_ref.replay import STORAGE
from torch_ref.update import precision
from torch_ref.weights import load_hf

JUDGES = ("torch_ref", "transformers")
GREEDY_TOKENS, GREEDY_PROMPTS = 24, 8
EOS = 1
SPREAD = 0.1  # of the weights: as large as the contract's tolerances in bfloat16 were set for


class Column(NamedTuple):
    """A column of the table: a kind of error, and how large it may be at a precision."""

    title: str
    tolerance: dict[str, float | None]
    """None: reported only. A logit above 8 is allowed more (`logits_tolerance`)."""


# The contract's own tolerances, whose reasons stand beside them in `compare`. Greedy: the share of tokens, up to the first end of
# text, that differ. In float64 and float32 none may: the likeliest two tokens of these weights are nowhere within rounding of each
# other. In bfloat16 near ties fall either way, and whatever follows one differs.
COLUMNS = {
    "logits": Column("logits", {dtype: allowed.logits for dtype, allowed in TOLERANCES.items()}),
    "loss": Column("loss", {dtype: allowed.scalars for dtype, allowed in TOLERANCES.items()}),
    "kl": Column("KL", {dtype: allowed.scalars for dtype, allowed in TOLERANCES.items()}),
    "gradients": Column("worst gradient", {dtype: allowed.gradients for dtype, allowed in TOLERANCES.items()}),
    "change": Column("twenty steps", {dtype: allowed.change for dtype, allowed in TOLERANCES.items()}),
    "greedy": Column("greedy tokens", {"float64": 0.0, "float32": 0.0, "bfloat16": None}),
}


def settings(dtype: str, weights: Path, **sections: Any) -> Config:
    """A config for `crafted_batch`'s shapes, every knob of the loss away from the value at which it does nothing."""
    base: dict[str, Any] = {
        "iterations": ADAMW_STEPS,
        "run_dir": "unused",
        "model": {
            "weights": str(weights),
            "tokenizer": "chess",  # of which nothing is read: these are batches of token ids
            "compute_dtype": dtype,
            "param_dtype": "float64" if dtype == "float64" else "float32",
        },
        "prompts": {"per_iteration": 2, "max_prompt_tokens": 8},
        "rollout": {"group_size": 4, "max_new_tokens": NEW, "temperature": 0.8},
        "kl": {"beta": 0.3},
        "objective": {"epsilon_low": 0.15, "epsilon_high": 0.25},
        "update": {"learning_rate": 1e-3, "micro_batches": 2, "weight_decay": 0.1, "max_grad_norm": 0.5},
    }
    for name, value in sections.items():
        base[name] = base.get(name, {}) | value
    return Config.model_validate(base)


def write_weights(case: str, folder: Path) -> None:
    """The case's folder as transformers writes it, in float64."""
    with true_float64():
        judge(CASES[case], torch.float64, SPREAD).save_pretrained(folder)


def load_jax(settings: ModelConfig, seed: int) -> Model:
    """`jax_grpo`'s model of the folder; call under x64 for float64."""
    return load_model(settings, seed, PROMPT + NEW)


@contextlib.contextmanager
def precise(dtype: str) -> Iterator[None]:
    """JAX, and transformers, in all the digits of the dtype."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.enable_x64(dtype == "float64"))
        stack.enter_context(jax.default_matmul_precision("highest"))
        if dtype == "float64":
            stack.enter_context(true_float64())
        yield


def load_judge(name: str, settings: ModelConfig) -> LanguageModel:
    """The same weights in `torch_ref` or in transformers; call under `precise`."""
    folder, dtype = settings.weights, STORAGE[settings.compute_dtype]
    assert folder is not None
    if name == "torch_ref":
        return load_hf(folder, dtype=dtype)
    from transformers import AutoModelForCausalLM

    return Judged(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval())


def errors_of(config: Config, against: str, batches: list[Arrays]) -> dict[str, Any]:
    """By column; `gradients` and `change` with the tensor's name beside. Call under `precise`."""
    step, _ = one_step(
        config.learning(), load_jax(config.model, config.seed), load_judge(against, config.model), batches[0]
    )
    change, _ = many_steps(
        config.learning(), load_jax(config.model, config.seed), load_judge(against, config.model), batches
    )
    return {
        "logits": step["logits"],
        "largest_logit": step["largest_logit"],
        "logp": step["logp"],
        "loss": step["scalars"]["loss"],
        "kl": step["scalars"]["kl/mean"],
        "scalars": largest(step["scalars"]),
        "gradients": largest(step["gradients"]),
        "change": largest(change),
        "greedy": greedy_difference(config, against),
    }


def greedy_difference(config: Config, against: str) -> float:
    """The share of greedy tokens that differ, of completions of prompts of several lengths padded on the left."""
    jax_model, model = load_jax(config.model, config.seed), load_judge(against, config.model)
    vocabulary = model.config.vocab_size
    rng = np.random.default_rng(11)
    mask = (np.arange(PROMPT) >= PROMPT - 1 - np.arange(GREEDY_PROMPTS)[:, None] % PROMPT).astype(np.int32)
    ids = rng.integers(2, vocabulary, mask.shape).astype(np.int32) * mask
    stops = np.zeros((2, vocabulary), np.int32)
    stops[0, EOS] = stops[1] = 1
    decoding = DecodingSettings(
        vocab_size=vocabulary, pad_id=0, sampling=Sampling(temperature=0.0), stop_table_SV=stops, accept_state=1
    )
    numbers = np.arange(GREEDY_PROMPTS)
    rollout = make_generate(jax_model.graphdef, decoding, group_size=1, max_new_tokens=GREEDY_TOKENS)(
        jax_model.params, ids, mask, 0 * numbers, numbers, 0, 0
    )
    tokens, live = np.asarray(rollout.completion_ids_PGC)[:, 0], np.asarray(rollout.completion_mask_PGC)[:, 0] == 1
    tensors = torch.from_numpy(ids).long(), torch.from_numpy(mask).long()
    with torch.no_grad(), precision(config.model.compute_dtype, "cpu"):
        expected = _greedy(model, *tensors).numpy()
    width = min(tokens.shape[1], expected.shape[1])
    differ = (tokens[:, :width] != expected[:, :width]) & live[:, :width]
    assert live.sum() > GREEDY_TOKENS, "completions long enough to compare"
    return float(differ.sum() / live.sum())


def _greedy(model: LanguageModel, ids_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    if isinstance(model, Judged):
        ends = {"do_sample": False, "eos_token_id": EOS, "pad_token_id": 0}
        return model.peer.generate(ids_BT, attention_mask=mask_BT, max_new_tokens=GREEDY_TOKENS, **ends)[:, PROMPT:]
    stop = end_of_text(EOS, model.config.vocab_size, len(ids_BT))
    return generate(model, ids_BT, mask_BT, max_new_tokens=GREEDY_TOKENS, stop=stop).tokens_BC


def measure(cases: list[str], folder: Path, note: Any) -> dict[str, Any]:
    """Errors by case, precision and judge."""
    results: dict[str, Any] = {}
    for case in cases:
        write_weights(case, folder / case)
        results[case] = {}
        model = load_hf(folder / case, dtype=torch.float64)
        batches = [crafted_batch(model, seed=seed) for seed in range(ADAMW_STEPS)]
        for dtype in TOLERANCES:
            note(f"{case}, {dtype}")
            config = settings(dtype, folder / case)
            with precise(dtype):
                results[case][dtype] = {name: errors_of(config, name, batches) for name in JUDGES}
            jax.clear_caches()
    return results


def size_of(error: Any) -> float:
    """Of an error, alone or behind the name of its tensor."""
    return error if isinstance(error, float) else error[1]


def allowed(column: str, dtype: str, errors: Mapping[str, Any]) -> float | None:
    """The tolerance of a column at a precision, of these errors."""
    if column == "logits":
        return logits_tolerance(dtype, errors["largest_logit"])
    return COLUMNS[column].tolerance[dtype]


def outside(results: Mapping[str, Any]) -> list[str]:
    """Whatever is outside its tolerance, one line each."""
    lines = []
    for case, by_dtype in results.items():
        for dtype, by_judge in by_dtype.items():
            for name, errors in by_judge.items():
                for column in COLUMNS:
                    bound = allowed(column, dtype, errors)
                    if bound is not None and not size_of(errors[column]) <= bound:
                        lines.append(f"{case}, {dtype}, {name}: {column} {errors[column]}, tolerance {bound:.1e}")
    return lines


def page(results: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """The table in Markdown."""
    wrong = outside(results)
    lines = [
        "# Parity of every family of models",
        "",
        "`jax_grpo` against `torch_ref` / against transformers' own model in `torch_ref`'s loss and optimiser: "
        + ("**outside: " + "; ".join(wrong) + "**." if wrong else "everything within its tolerance."),
        "",
        f"Two layers of width 32, 4 heads that share 2 of keys and values (GPT-2: 4), random weights of deviation {SPREAD:g}; "
        f"texts of up to {PROMPT + NEW} tokens padded on both sides, windows of 4 tokens; one clipped step with a KL term, then "
        "twenty of AdamW with gradient clipping. Logits: largest absolute difference. Loss, KL: relative to the value or to its "
        "floor. Gradient: relative L2 of the worst tensor. Twenty steps: relative L2 of the worst parameter's change. Greedy "
        "tokens: the share that differ.",
    ]
    for dtype in TOLERANCES:
        titles = [column.title for column in COLUMNS.values()]
        bounds = ["reported" if x is None else f"{x:.0e}" for x in (c.tolerance[dtype] for c in COLUMNS.values())]
        bounds[0] += " (x size / 8 above 8)"
        lines += ["", f"## {dtype}", "", "| family | " + " | ".join(titles) + " |", "|---" * (len(titles) + 1) + "|"]
        lines += ["| tolerance | " + " | ".join(bounds) + " |"]
        for case, by_dtype in results.items():
            pairs = [
                " / ".join(f"{size_of(by_dtype[dtype][name][column]):.1e}" for name in JUDGES) for column in COLUMNS
            ]
            lines.append(f"| {case} | " + " | ".join(pairs) + " |")
    versions = ", ".join(f"{package} {version}" for package, version in report["versions"].items())
    lines += [
        "",
        f"    {report['command']}",
        "",
        f"{report['machine']}, {report['device']}; {versions}; {report['seconds']} s.",
        "",
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """The command line."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m torch_ref.parity_families", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", required=True, type=Path, help="folder of the report")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES), help="all by default")
    arguments = parser.parse_args(argv)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        # Both judges meet the same programs, which are compiled once.
        jax.config.update("jax_compilation_cache_dir", folder + "/programs")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        results = measure(arguments.cases, Path(folder), lambda text: print(text, flush=True))
    report = environment(argv, "torch_ref.parity_families", ("transformers",))
    report |= {"seconds": round(time.perf_counter() - began), "errors": results}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "results.json").write_text(json.dumps(report, indent=1) + "\n")
    (arguments.out / "README.md").write_text(page(results, report))
    print(page(results, report))
    sys.exit(1 if outside(results) else 0)


if __name__ == "__main__":
    main()
