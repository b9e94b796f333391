"""README.md of an exported model: how to use it, its evaluation, how it was trained and from what. Reads files, loads no model."""

import json
from pathlib import Path
from typing import Any

import chess

from jax_grpo.config.files import RUN_WEIGHTS
from jax_grpo.positions.rookworld import policy_prompt
from jax_grpo.run.files import is_checkpoint
from jax_grpo.run.folder import read_record

CARD = """---
library_name: transformers
tags: [chess, gpt2, grpo]
{licence}---

# {name}

A GPT-2 of {architecture[num_layers]} layers, width {architecture[hidden_size]}, {parameters:,} parameters, with the \
{tokenizer} tokenizer, trained with jax_grpo. \
Parameters' SHA-256 in jax_grpo: `{sha256}`.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
prompt = "{prompt}"
tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
answer = model.generate(**tokens, max_new_tokens=8, do_sample=False)
print(tokenizer.decode(answer[0, tokens["input_ids"].shape[1] :]))
```

Prompts: `{whole_row}` asks for five moves, their evaluations and the best move; `{one_move}` for one move (take
the first word of the answer); `A: <FEN>+<uci>+<last moves>+` for the next state. Moves may be illegal: check them.

## Evaluation

{evaluation}
## Training

{training}"""


def model_card(model: dict[str, Any], source: Path, folder: Path, evaluation: Path | None) -> str:
    """The card of a model (`model.named.describe_model`), exported from the folder `source` to `folder`, which its example names.

    `evaluation` is the folder of an evaluation of these weights, if there is one.
    """
    file = source / "provenance.json"
    provenance = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return CARD.format(
        **model,
        licence="license: mit\n" if str(provenance.get("licence", "")).startswith("MIT") else "",
        folder=folder.name,
        prompt=policy_prompt(chess.STARTING_FEN, "B:"),
        whole_row=policy_prompt("<FEN>", "M:"),
        one_move=policy_prompt("<FEN>", "B:"),
        evaluation=_evaluation(evaluation),
        training=_training(source, provenance),
    )


def _evaluation(folder: Path | None) -> str:
    if folder is None:
        return "None was given. `python -m jax_grpo.evaluate` makes one.\n"
    _, body = (folder / "evaluation.md").read_text(encoding="utf-8").split("\n", 1)  # the card has its own title
    return body.replace("\n## ", "\n### ").strip() + "\n"


def _training(source: Path, provenance: dict[str, Any]) -> str:
    """The run that made the weights, where they still lie in its folder, and where they say that they come from."""
    text = ""
    run = source.parent.parent if is_checkpoint(source) else source.parent
    if (is_checkpoint(source) or source.name == RUN_WEIGHTS) and (run / "config.yaml").is_file():
        if starts := read_record(run)["starts"]:
            last = starts[-1]
            commit = (last.get("git") or {}).get("commit", "unknown")
            packages = ", ".join(f"{name} {version}" for name, version in last["packages"].items() if version)
            text += f"- command: `{last['command']}`\n- commit: {commit}\n- packages: {packages}\n"
            text += f"- devices: {', '.join(last['hardware']['devices'])}; started {last['time']}\n"
        text += f"\n```yaml\n{(run / 'config.yaml').read_text(encoding='utf-8').rstrip()}\n```\n"
    if provenance:
        text += f"\nProvenance:\n\n```json\n{json.dumps(provenance, indent=1)}\n```\n"
    return text or "Unknown: the weights' folder has no provenance.json and lies in no run's folder.\n"
