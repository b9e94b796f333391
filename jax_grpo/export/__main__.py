"""Weights for other software: `python -m jax_grpo.export --weights RUN --format hf --out DIR`.

The folder loads with `transformers.AutoModelForCausalLM` and `AutoTokenizer`: the same logits, the same ids. What was written is
read back and compared bit for bit. Its README.md, the card, says how the model is used, how it was trained and from what.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import chess
import jax.numpy as jnp
import yaml

from jax_grpo.config.files import RUN_WEIGHTS, weights_directory
from jax_grpo.evaluate import EvaluationError
from jax_grpo.evaluate.tables import read_report
from jax_grpo.export.tokenizer import save_for_transformers
from jax_grpo.model.named import describe_model, find_style, load_named, said_of_style
from jax_grpo.model.weights import WeightsError, load_hf, save_hf
from jax_grpo.positions.rookworld import policy_prompt
from jax_grpo.report.records import read_records
from jax_grpo.run.checkpoints import content_hash
from jax_grpo.run.files import CheckpointError, is_checkpoint
from jax_grpo.run.folder import read_record

CARD = Path(__file__).parents[1] / "assets" / "card.md"
CHESS_TASKS = ("policy", "environment", "game", "mixed")
CHESS_TOKENIZERS = ("chess", "gpt2")  # of weights that say nothing of their task: those of RookWorld-LM and of ours
WHOLE_ROW, ONE_MOVE = policy_prompt("<FEN>", "M:"), policy_prompt("<FEN>", "B:")
CHESS_PROMPTS = f"""Prompts: `{WHOLE_ROW}` asks for five moves, their evaluations and the best move; `{ONE_MOVE}` for one move (take
the first word of the answer); `A: <FEN>+<uci>+<last moves>+` for the next state. Moves may be illegal: check them."""


def export_hf(weights: str, out: Path, evaluation: Path | None = None) -> list[Path]:
    """Writes model.safetensors (float32, vocabulary unpadded), both configs, the tokenizer's files and README.md; returns them.

    `weights` is a name of `model.named`; `out` is made, or replaced where it is an earlier export; `evaluation` is the folder of an
    evaluation of these weights, for the card. Raises WeightsError: `out` has other files, or what was read back differs; and
    EvaluationError: `evaluation` is missing, or of other weights.
    """
    policy = load_named(weights)
    model = describe_model(weights, policy)
    if evaluation is not None and (measured := read_report(evaluation)["model"])["sha256"] != model["sha256"]:
        raise EvaluationError(
            f"--evaluation {evaluation} is of {measured['name']} ({measured['sha256'][:12]}), not of these weights "
            f"({model['sha256'][:12]}); evaluate these: python -m jax_grpo.evaluate --weights {weights} --out DIR"
        )
    source = weights_directory(weights)
    if out.resolve() == source.resolve():
        raise WeightsError(f"--out {out} is the folder of the weights themselves; give another one")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as working:
        folder = Path(working) / out.name
        said = said_of_style(find_style(weights))
        save_hf(folder, policy.architecture, policy.params, policy.tokenizer, said)
        save_for_transformers(policy.tokenizer, folder, policy.architecture.max_position_embeddings)
        (folder / "README.md").write_text(model_card(model, source, out, evaluation), encoding="utf-8")
        if content_hash(load_hf(folder, jnp.float32)[1]) != model["sha256"]:
            raise WeightsError(f"{out}: the weights read back differ from those written; is the disk sound?")
        if out.exists():
            if others := sorted({path.name for path in out.iterdir()} - {path.name for path in folder.iterdir()}):
                reason = f"other files in it ({others[0]}); give a new folder, or an earlier export"
                raise WeightsError(f"--out {out} has {reason}")
            shutil.rmtree(out)
        folder.rename(out)
    return sorted(out.iterdir())


def model_card(model: dict[str, Any], source: Path, folder: Path, evaluation: Path | None) -> str:
    """The card of a model (see `describe_model`) that is exported from the folder `source` to `folder`."""
    file = source / "provenance.json"
    provenance = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    template = CARD.read_text(encoding="utf-8").rstrip()
    return template.format(
        **model | _use(source, model["tokenizer"]),
        licence="license: mit\n" if str(provenance.get("licence", "")).startswith("MIT") else "",
        folder=folder.name,
        evaluation=_evaluation(evaluation),
        training=_training(source, provenance),
    )


def _run_of(source: Path) -> Path | None:
    """The run whose folder the weights lie in."""
    run = source.parent.parent if is_checkpoint(source) else source.parent
    return run if (is_checkpoint(source) or source.name == RUN_WEIGHTS) and (run / "config.yaml").is_file() else None


def _use(source: Path, tokenizer: str) -> dict[str, Any]:
    """How the model is asked: chess's own prompts, or for another task the first one that its run shows."""
    run = _run_of(source)
    settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")) if run else {}
    task = settings.get("task", {}).get("name")
    if task in CHESS_TASKS or (task is None and tokenizer in CHESS_TOKENIZERS):
        prompt, prompts, tags, new_tokens = policy_prompt(chess.STARTING_FEN, "B:"), CHESS_PROMPTS, "chess, ", 8
    else:
        shown = read_records(run / "samples.jsonl", missing_ok=True) if run else []
        prompt = shown[0]["samples"][0]["prompt"] if shown else "..."
        prompts = f"The prompt is one that its run showed; the task was `{task}`." if shown else "Put a prompt there."
        tags, new_tokens = "", settings.get("rollout", {}).get("max_new_tokens", 64)
    return {"prompt": json.dumps(prompt), "prompts": prompts, "tags": f"{tags}gpt2, grpo", "new_tokens": new_tokens}


def _evaluation(folder: Path | None) -> str:
    if folder is None:
        return "None was given. `python -m jax_grpo.evaluate` makes one.\n"
    _, body = (folder / "evaluation.md").read_text(encoding="utf-8").split("\n", 1)  # the card has its own title
    return body.replace("\n## ", "\n### ").strip() + "\n"


def _training(source: Path, provenance: dict[str, Any]) -> str:
    """The run that made the weights, where they still lie in its folder, and where they say that they come from."""
    text = ""
    if run := _run_of(source):
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


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jax_grpo.export", allow_abbrev=False)
    option = parser.add_argument
    option("--weights", required=True, metavar="RUN", help="a run folder, a checkpoint, packaged:rook-small")
    option("--out", required=True, type=Path, metavar="DIR", help="folder to make")
    option("--format", choices=["hf"], default="hf", help="hf: safetensors that transformers loads")
    option("--evaluation", type=Path, metavar="DIR", help="an evaluation of these weights, for the model card")
    arguments = parser.parse_args(argv)
    try:
        files = export_hf(arguments.weights, arguments.out, arguments.evaluation)
    except (CheckpointError, OSError, ValueError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    print("saved:", ", ".join(map(str, files)))


if __name__ == "__main__":
    main()
