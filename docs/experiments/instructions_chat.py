"""What stands beside configs/instructions_chat.yaml in docs/results/instructions: answers side by side, and rates by type.

    python docs/experiments/instructions_chat.py --before smollm2-135m-instruct --after runs/instructions_chat

Not part of the package. Greedy answers of both models to the 200 held-out prompts; the first ten are printed.
"""

import argparse
import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np

import jax_grpo
from jax_grpo.config import load_config
from jax_grpo.prompts.chat import ChatTemplate
from jax_grpo.tasks.instructions import score

CONFIG, FOLDER, SHOWN = "configs/instructions_chat.yaml", Path("configs/instructions_chat"), 10


def greedy(weights: str, rows: list[dict[str, Any]]) -> list[str]:
    config = load_config(CONFIG, [])
    template = ChatTemplate(str(config.model.weights))
    texts = [template.render(row["messages"]) for row in rows]
    policy = jax_grpo.load_named(weights)
    return policy.generate(texts, max_new_tokens=config.rollout.max_new_tokens, temperature=0.0, seed=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name in ("--before", "--after"):
        parser.add_argument(name, required=True, help="weights, as a config names them")
    arguments = parser.parse_args()
    lines = (FOLDER / "heldout.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in dict.fromkeys(lines)]
    columns = {name: [row[name] for row in rows] for name in ("topic", "instruction_id_list", "kwargs")}
    columns["prompts"] = [row["messages"] for row in rows]
    rewards, both, counting = runpy.run_path(str(FOLDER / "rewards.py")), [], []
    for weights in (arguments.before, arguments.after):
        answers = greedy(weights, rows)
        both.append(answers)
        given = columns | {"completions": [[{"role": "assistant", "content": text}] for text in answers]}
        counting.append((np.array(rewards["counts"](**given)), rewards["followed"](**given), score(rows, answers)))
    print("| type | prompts | before | after |\n|---|---|---|---|")
    for name in sorted({one for row in rows for one in row["instruction_id_list"]}):
        own = ~np.isnan(counting[0][2][name])
        rates = [100 * np.mean(scores[name][own] * counts[own]) for counts, _, scores in counting]
        print(f"| `{name}` | {own.sum()} | {rates[0]:.0f} % | {rates[1]:.0f} % |")
    print("\n| prompt | before | after |\n|---|---|---|")
    for number in range(SHOWN):
        shown = [
            " ".join(answers[number].split()) + (" **(followed)**" if followed[number] else "")
            for answers, (_, followed, _) in zip(both, counting, strict=True)
        ]
        print("|", " | ".join([rows[number]["messages"][0]["content"], *shown]), "|")


if __name__ == "__main__":
    main()
