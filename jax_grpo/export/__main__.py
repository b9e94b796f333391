"""Weights for other software: `python -m jax_grpo.export --weights RUN --format hf --out DIR`.

The folder loads with `transformers.AutoModelForCausalLM` and `AutoTokenizer`: the same logits, the same ids. What was written is
read back and compared bit for bit. Its README.md, the card, says how the model is used, how it was trained and from what. Adapters
are added into their base first; `--format peft` writes them alone, as `peft.PeftModel` loads them.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import yaml

from jax_grpo.config import Config, earlier
from jax_grpo.config.files import RUN_WEIGHTS, base_of, is_adapter, read_settings, weights_directory
from jax_grpo.evaluate import EvaluationError
from jax_grpo.export.recipe import recipe
from jax_grpo.model.tokenizer import Tokenizer, tokenizer_of
from jax_grpo.model.weights import WeightsError, load_hf, save_hf
from jax_grpo.names import EVALUATIONS, STYLES, by_name
from jax_grpo.policy.named import describe_model, load_named, read_checkpoint
from jax_grpo.policy.peft_files import save_adapters
from jax_grpo.report.records import read_records
from jax_grpo.run.checkpoints import content_hash
from jax_grpo.run.files import CheckpointError, is_checkpoint
from jax_grpo.run.folder import read_record

CARD = Path(__file__).parents[1] / "assets" / "card.md"


def export_hf(weights: str, out: Path, evaluation: Path | None = None) -> list[Path]:
    """Writes model.safetensors (float32, vocabulary unpadded), both configs, the tokenizer's files and README.md; returns them.

    `weights` is a name of `policy.named`; `out` is made, or replaced where it is an earlier export; `evaluation` is the folder of
    an evaluation of these weights, for the card. Raises WeightsError: `out` has other files, or what was read back differs; and
    EvaluationError: `evaluation` is missing, or of other weights.
    """
    policy = load_named(weights)
    model = describe_model(weights, policy)
    if evaluation is not None and (measured := by_name(EVALUATIONS)(evaluation)["model"])["sha256"] != model["sha256"]:
        raise EvaluationError(
            f"--evaluation {evaluation} is of {measured['name']} ({measured['sha256'][:12]}), not of these weights "
            f"({model['sha256'][:12]}); evaluate these: python -m jax_grpo.evaluate --weights {weights} --out DIR"
        )
    source = _source(weights, out)
    model_source = source
    while is_adapter(model_source):
        model_source = weights_directory(base_of(model_source))
    card = out / "README.md"
    if (out / "config.json").is_file() and not (card.is_file() and "jax_grpo" in card.read_text(encoding="utf-8")):
        raise WeightsError(f"--out {out} holds a model that is no earlier export; give a new folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as working:
        folder = Path(working) / out.name
        style = by_name(STYLES)
        own = style.model_settings(style.find_style(weights))
        save_hf(folder, policy.architecture, policy.params, policy.tokenizer, own, model_source)
        (folder / "README.md").write_text(
            model_card(model, policy.tokenizer, source, out, evaluation), encoding="utf-8"
        )
        if content_hash(load_hf(folder, jnp.float32)[1]) != model["sha256"]:
            raise WeightsError(f"{out}: the weights read back differ from those written; is the disk sound?")
        if out.exists():
            if others := sorted({path.name for path in out.iterdir()} - {path.name for path in folder.iterdir()}):
                reason = f"other files in it ({others[0]}); give a new folder, or an earlier export"
                raise WeightsError(f"--out {out} has {reason}")
            shutil.rmtree(out)
        folder.rename(out)
    return sorted(out.iterdir())


def export_peft(weights: str, out: Path) -> list[Path]:
    """Writes the adapters of a run, or of one of its checkpoints, in PEFT's format, and the tokenizer's files; returns the files.

    Raises WeightsError: there are none, or `out` is a folder that has files.
    """
    source = _source(weights, out)
    if out.exists() and any(out.iterdir()):
        raise WeightsError(f"--out {out} holds files; give a new folder")
    if is_adapter(source):
        shutil.copytree(source, out, dirs_exist_ok=True)
        return sorted(out.iterdir())
    saved = read_checkpoint(source, jnp.float32) if is_checkpoint(source) else None
    if saved is None or saved.adapter is None:
        raise WeightsError(f"--weights {weights} has no adapters: all of its parameters were trained; give --format hf")
    run = Config.model_validate(earlier.current(saved.content["config"]))
    style = by_name(STYLES)
    save_adapters(
        out,
        saved.architecture,
        saved.adapter,
        saved.params,
        base=str(weights_directory(str(run.model.weights))),
        base_hash=saved.content["identity"]["base"],
        base_dtype=run.model.base_dtype,
        tokenizer=Tokenizer.load(tokenizer_of(run.model)),
        more=style.model_settings(style.find_style(weights)),
    )
    return sorted(out.iterdir())


def _source(weights: str, out: Path) -> Path:
    """The folder of the weights, which is not that of the export."""
    source = weights_directory(weights)
    if out.resolve() == source.resolve():
        raise WeightsError(f"--out {out} is the folder of the weights themselves; give another one")
    return source


def model_card(model: dict[str, Any], tokenizer: Tokenizer, source: Path, folder: Path, evaluation: Path | None) -> str:
    """The card of a model (see `describe_model`) that is exported from the folder `source` to `folder`."""
    provenance, run = read_settings(source / "provenance.json"), _run_of(source)
    settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")) if run else {}
    records = read_records(run / "samples.jsonl", missing_ok=True) if run else []
    shown = [sample["prompt"] for record in records[:1] for sample in record["samples"]]
    template = CARD.read_text(encoding="utf-8").rstrip()
    return template.format(
        **model | recipe(source, settings, shown, tokenizer, folder.name),
        family=model["architecture"].get("family", "gpt2"),
        licence="license: mit\n" if str(provenance.get("licence", "")).startswith("MIT") else "",
        folder=folder.name,
        evaluation=_evaluation(evaluation),
        training=_training(source, provenance),
    )


def _run_of(source: Path) -> Path | None:
    """The run whose folder the weights lie in."""
    run = source.parent.parent if is_checkpoint(source) else source.parent
    return run if (is_checkpoint(source) or source.name == RUN_WEIGHTS) and (run / "config.yaml").is_file() else None


def _evaluation(folder: Path | None) -> str:
    if folder is None:
        return "None was given: `python -m jax_grpo.export --evaluation DIR` puts one here.\n"
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
            command = (
                f"`{last['command']}`" if last["command"] else "none; `jax_grpo.train.train` was called from Python"
            )
            text += f"- command: {command}\n- commit: {commit}\n- packages: {packages}\n"
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
    formats = "hf: safetensors that transformers loads, adapters added into their base; peft: a run's adapters alone"
    option("--format", choices=["hf", "peft"], default="hf", help=formats)
    option("--evaluation", type=Path, metavar="DIR", help="an evaluation of these weights, for the model card")
    arguments = parser.parse_args(argv)
    if arguments.format == "peft" and arguments.evaluation is not None:
        raise SystemExit(
            f"--evaluation {arguments.evaluation} is for a model's card, which --format peft does not write"
        )
    try:
        if arguments.format == "peft":
            files = export_peft(arguments.weights, arguments.out)
        else:
            files = export_hf(arguments.weights, arguments.out, arguments.evaluation)
    except (CheckpointError, OSError, ValueError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    print("saved:", ", ".join(map(str, files)))


if __name__ == "__main__":
    main()
