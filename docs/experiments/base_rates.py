"""How often a model answers the questions of reasoning-gym's data sets before any training: the table of docs/results/reasoning.

    python docs/experiments/base_rates.py --out docs/results/reasoning

Of each data set `--prompts` held-out questions, `--samples` answers each, sampled at temperature 1. A group has signal where its
answers' scores differ; `right_signal` is the share of groups in which some are right and some are not. Not part of the package.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

import jax_grpo
from jax_grpo.config.tasks import task_of
from jax_grpo.rollout.texts import Generator
from jax_grpo.tasks import make_task
from jax_grpo.tasks.checked import made_prompt

NUMBER, WORD, WHOLE = "last_number", "last_word", "whole"
DATASETS = {  # the rule that finds the answer; the library's settings are its defaults, but for those given
    "aiw": (NUMBER, {}),
    "base_conversion": (WORD, {}),
    "basic_arithmetic": (NUMBER, {}),
    "bitwise_arithmetic": (WORD, {}),
    "chain_sum": (NUMBER, {}),
    "coin_flip": (NUMBER, {}),
    "count_bits": (NUMBER, {}),
    "count_primes": (NUMBER, {}),
    "decimal_arithmetic": (NUMBER, {}),
    "family_relationships": (WORD, {}),
    "fraction_simplification": (WHOLE, {}),
    "gcd": (NUMBER, {}),
    "gsm_symbolic": (NUMBER, {}),
    "isomorphic_strings": (WORD, {}),
    "lcm": (NUMBER, {}),
    "leg_counting": (NUMBER, {}),
    "letter_counting": (NUMBER, {}),
    "number_sequence": (NUMBER, {}),
    "number_sorting": (WHOLE, {}),
    "power_function": (NUMBER, {}),
    "prime_factorization": (WHOLE, {}),
    "products": (NUMBER, {}),
    "simple_equations": (NUMBER, {}),
    "simple_geometry": (NUMBER, {}),
    "spell_backward": (WORD, {}),
    "syllogism": (WORD, {}),
    "word_sorting": (WHOLE, {}),
}


def rates(scores_PG: np.ndarray) -> dict[str, float]:
    """Of one data set: the mean score, the share of right answers, and of groups with signal."""
    signal_P = (scores_PG != scores_PG[:, :1]).any(1)
    return {
        "score": float(scores_PG.mean()),
        "right": float((scores_PG == 1).mean()),
        "signal": float(signal_P.mean()),
        "right_signal": float(((scores_PG == 1).any(1) & (scores_PG != 1).any(1)).mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--weights", default="smollm2-135m-instruct")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--ask", help="what follows a question, in the same message", default="")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    policy, began = jax_grpo.load_named(arguments.weights), time.monotonic()
    settings = {name: {"answer": answer, "settings": own} for name, (answer, own) in DATASETS.items()}
    ask = [{"role": "user", "content": "{{ question }}" + arguments.ask}]
    task = make_task(task_of(name="reasoning_gym", datasets=settings, ask=ask), tokenizer=arguments.weights)
    generate = Generator(policy, task.stop_rule, arguments.tokens, 1.0, seed=0, samples=arguments.samples)
    prompts, row = {name: [] for name in DATASETS}, 0
    while any(len(requested) < arguments.prompts for requested in prompts.values()):
        prompt, row = made_prompt(task, row, row, heldout=True), row + 1
        requested = prompts[json.loads(prompt.answer or "")[0]]
        if len(requested) < arguments.prompts and prompt not in requested:
            requested.append(prompt)
    every = [prompt for requested in prompts.values() for prompt in requested]
    texts = generate(
        every, tick=lambda done: print(f"{done} of {len(every)} prompts, {time.monotonic() - began:.0f} s")
    )
    repeated = [prompt for prompt in every for _ in range(arguments.samples)]
    scores = task.score(repeated, texts)["score"].values_B.reshape(len(DATASETS), arguments.prompts, arguments.samples)
    actual = {
        name: rates(scores_PG) | {"answer": DATASETS[name][0]} for name, scores_PG in zip(DATASETS, scores, strict=True)
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    requested = {key: value for key, value in vars(arguments).items() if key != "out"}
    report = {"asked": requested, "seconds": round(time.monotonic() - began), "datasets": actual}
    (arguments.out / "base_rates.json").write_text(json.dumps(report, indent=1) + "\n")
    size = arguments.prompts * arguments.samples
    samples = [
        {"dataset": name, "prompt": requested[0].text, "completions": texts[start : start + arguments.samples]}
        for start, (name, requested) in zip(range(0, len(texts), size), prompts.items(), strict=True)
    ]
    (arguments.out / "base_rate_samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    for name, of in sorted(actual.items(), key=lambda item: -item[1]["signal"]):
        figures = " | ".join(f"{of[key]:.2f}" for key in ("score", "right", "right_signal", "signal"))
        print(f"| {name} | {of['answer'].replace('_', ' ')} | {figures} |")


if __name__ == "__main__":
    main()
