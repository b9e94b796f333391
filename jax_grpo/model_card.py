"""README.md of an exported model: how to use it, its evaluation, how it was trained and from what. Reads files, loads no model."""

import json
from pathlib import Path
from typing import Any

from jax_grpo.checkpoint_files import is_checkpoint
from jax_grpo.config_files import RUN_WEIGHTS
from jax_grpo.run_folder import read_record

USAGE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}")
tokenizer = AutoTokenizer.from_pretrained("{folder}")
prompt = "P: rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1    B:"
tokens = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
answer = model.generate(**tokens, max_new_tokens=8, do_sample=False)
print(tokenizer.decode(answer[0, tokens["input_ids"].shape[1] :]))
```
"""
PROMPTS = """Prompts: `P: <FEN>    M:` asks for five moves, their evaluations and the best move; `P: <FEN>    B:` for one move (take
the first word of the answer); `A: <FEN>+<uci>+<last moves>+` for the next state. Moves may be illegal: check them.
"""


def model_card(name: str, source: Path, folder: Path, evaluation: Path | None, model: dict[str, Any]) -> str:
    """The card's text.

    Args:
        name: of the model.
        source: folder of the weights that were exported.
        folder: of the export, for its usage example.
        evaluation: folder of an evaluation of these weights, or None.
        model: `parameters`, `architecture`, `tokenizer`, `sha256`.
    """
    provenance = _json(source / "provenance.json")
    run = _run_folder(source)
    shape = model["architecture"]
    licence = ["license: mit"] if str(provenance.get("licence", "")).startswith("MIT") else []
    front = ["---", "library_name: transformers", "tags: [chess, gpt2, grpo]", *licence, "---", ""]
    parts = [
        "\n".join(front),
        f"# {name}\n",
        f"A GPT-2 of {shape['num_layers']} layers, width {shape['hidden_size']}, {model['parameters']:,} parameters, with the "
        f"{model['tokenizer']} tokenizer, trained with jax_grpo. Parameters' SHA-256 in jax_grpo: `{model['sha256']}`.\n",
        "## Use\n",
        USAGE.format(folder=folder.name),
        PROMPTS,
        "## Evaluation\n",
        _evaluation(evaluation),
        "## Training\n",
        _training(run, provenance),
    ]
    return "\n".join(parts)


def _run_folder(source: Path) -> Path | None:
    """The run that made the weights, where they still lie in its folder."""
    found = source.parent.parent if is_checkpoint(source) else source.parent
    inside = is_checkpoint(source) or source.name == RUN_WEIGHTS
    return found if inside and (found / "config.yaml").is_file() else None


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _evaluation(folder: Path | None) -> str:
    if folder is None:
        return "None was given. `python -m jax_grpo.evaluate` makes one.\n"
    _, body = (folder / "evaluation.md").read_text(encoding="utf-8").split("\n", 1)  # the card has its own title
    return body.replace("\n## ", "\n### ").strip() + "\n"


def _training(run: Path | None, provenance: dict[str, Any]) -> str:
    parts = []
    if run is not None:
        starts = read_record(run)["starts"]
        if starts:
            last = starts[-1]
            commit = (last.get("git") or {}).get("commit", "unknown")
            packages = ", ".join(f"{name} {version}" for name, version in last["packages"].items() if version)
            parts.append(f"- command: `{last['command']}`\n- commit: {commit}\n- packages: {packages}\n")
            parts.append(f"- devices: {', '.join(last['hardware']['devices'])}; started {last['time']}\n")
        parts.append(f"\n```yaml\n{(run / 'config.yaml').read_text(encoding='utf-8').rstrip()}\n```\n")
    if provenance:
        parts.append(f"\nProvenance:\n\n```json\n{json.dumps(provenance, indent=1)}\n```\n")
    return "".join(parts) or "Unknown: the weights' folder has no provenance.json and lies in no run's folder.\n"
