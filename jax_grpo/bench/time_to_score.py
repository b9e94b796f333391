"""The same training by `jax_grpo` and by TRL, one after the other: held-out scores against iterations and against seconds.

    python -m jax_grpo.bench.time_to_score --config configs/quickstart.yaml --every 20 --out docs/results/time_to_score

Both begin with the same weights, read the same prompts in the same order, and have the same reward and settings (`trl_settings`,
which refuses what TRL has no counterpart of). Seconds are of training alone, compiling included; both clocks stand still while
weights are saved or evaluated. All weights are asked the same held-out positions by our evaluator. Each run is its own process.
"""

import functools
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from jax_grpo.bench.harness import CHILD, command_of, command_parser, save, saved, selected
from jax_grpo.bench.machine import line_of, machine
from jax_grpo.bench.score_curves import OURS, draw, of_records, require_same_start, same_score, summary
from jax_grpo.bench.trl_settings import NotTheSame, differences, require_same, trl_settings
from jax_grpo.bench.trl_training import PEERS, WEIGHTS
from jax_grpo.config import Config, ConfigError, load_config
from jax_grpo.report.records import read_records
from jax_grpo.system.process import child_record

MODULE = "jax_grpo.bench.time_to_score"
SCORE = "eval/sampled/reward"
PACKAGES = ("jax_grpo", "jax", "jaxlib", "flax", "optax", "torch", "transformers", "trl", "accelerate")
# Of our run beside what the config says: nothing that is no part of training, and nothing compiled before.
QUIET = {
    "logging.tensorboard": False, "logging.samples_every": 0, "logging.progress": False, "checkpoint.every": 0,
    "checkpoint.keep_best": 0, "compilation_cache": None,
}  # fmt: skip


def run_of(config: Config, seed: int, every: int) -> Config:
    """The config of one seed's runs, evaluated after every so many iterations."""
    changed = QUIET | {"seed": seed, "evaluation.every": every}
    values = config.model_dump()
    for key, value in changed.items():
        *section, name = key.split(".")
        (values[section[0]] if section else values)[name] = value
    return Config.model_validate(values)


def train_ours(config: Config, folder: Path) -> dict[str, Any]:
    """`jax_grpo.train` of the config; its points with their scores, and each iteration's mean reward. `error` where it fails."""
    run = folder / "run"
    file = folder / "config.yaml"
    file.write_text(config.model_copy(update={"run_dir": str(run)}).resolved_yaml())
    code = f"import sys; from jax_grpo import train; train.main(sys.argv[1:]); print({json.dumps('{}')})"
    record = child_record([sys.executable, "-c", code, "--config", str(file)], _environment())
    return record or of_records(read_records(run / "metrics.jsonl"))


def train_peer(peer: str, config: Config, every: int, folder: Path) -> dict[str, Any]:
    """The same of TRL, whose weights are evaluated when it is done."""
    given = {"folder": str(folder), "peer": peer, "every": every, "config": config.model_dump()}
    record: dict[str, Any] = {}
    for step in STEPS:
        command = [sys.executable, "-m", MODULE, CHILD, json.dumps({**given, "step": step})]
        record |= child_record(command, _environment())
        if "error" in record:
            return {"error": f"{step}: {record['error']}"}
    scores = record.pop("scores")
    points = [{"iteration": i, "seconds": s, **scores[str(i)]} for i, s in record["points"]]
    return {**record, "points": points}


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    return kept | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"}


def _prepare(given: Mapping[str, Any], config: Config, folder: Path) -> dict[str, Any]:
    from jax_grpo.bench.trl_training import prepare

    prepare(config, folder)
    return {}


def _train(given: Mapping[str, Any], config: Config, folder: Path) -> dict[str, Any]:
    from jax_grpo.bench.trl_training import train

    return train(folder, given["every"], positions=given["peer"] == "TRL-positions")


def _evaluate(given: Mapping[str, Any], config: Config, folder: Path) -> dict[str, Any]:
    """Scores of every folder of weights by iteration, as a run's own evaluation makes them."""
    from jax_grpo.model.named import load_policy
    from jax_grpo.positions.dataset import heldout_positions
    from jax_grpo.programs import context
    from jax_grpo.train import make_evaluator
    from jax_grpo.trainer import Trainer

    trainer = Trainer(config.with_micro_batches(1))
    evaluator = make_evaluator(trainer, heldout_positions(config, trainer.positions, trainer.task.read))
    assert evaluator is not None, "a config without held-out positions is refused"
    scores = {}
    for weights in sorted((folder / WEIGHTS).iterdir()):
        model = config.model.model_copy(update={"weights": str(weights)})
        params = load_policy(model, config.seed, context(config)).params
        scores[str(int(weights.name))] = evaluator(params, int(weights.name)).metrics
    trainer.task.close()
    return {"scores": scores}


STEPS = {"prepare": _prepare, "train": _train, "evaluate": _evaluate}


def _arguments(argv: Sequence[str] | None) -> tuple[Any, Config]:
    """Checked before anything is started."""
    parser = command_parser(MODULE, __doc__)
    parser.allow_abbrev = False
    option = parser.add_argument
    option("--config", required=True, metavar="FILE", help="of the policy task; any setting can follow: --kl.beta 0.1")
    option("--iterations", type=int, metavar="N", help="of both, their schedules too (default: the config's)")
    option("--every", type=int, default=20, metavar="E", help="iterations between evaluations (default: 20)")
    option("--seeds", default="0", help="with commas between, of both (default: 0)")
    option("--peers", default="TRL", help=f"of {', '.join(PEERS)} (default: TRL)")
    option("--score", default=SCORE, metavar="METRIC", help=f"of the evaluations (default: {SCORE})")
    option("--out", required=True, type=Path, metavar="DIR", help="time_to_score.json, .md and .png")
    option("--resume", action="store_true", help="keep the runs that DIR already has")
    arguments, overrides = parser.parse_known_args(argv)
    if arguments.iterations is not None:
        overrides += ["--iterations", str(arguments.iterations)]
    try:
        config = load_config(arguments.config, overrides)
        require_same(config)
    except (ConfigError, NotTheSame) as error:
        parser.error(str(error))
    arguments.peers = selected("--peers", arguments.peers, PEERS)
    seeds = arguments.seeds.split(",")
    if not all(seed.isdigit() and int(seed) < 2**31 for seed in seeds):
        parser.error(f"--seeds {arguments.seeds!r}: expected whole numbers from 0 to 2147483647 with commas between")
    arguments.seeds = list(dict.fromkeys(map(int, seeds)))
    if not 1 <= arguments.every <= config.iterations:
        parser.error(f"--every {arguments.every}: expected 1 to the {config.iterations} iterations")
    if not arguments.score.startswith(("eval/greedy/", "eval/sampled/")):
        parser.error(f"--score {arguments.score!r}: expected eval/greedy/... or eval/sampled/..., such as {SCORE}")
    if config.evaluation.positions == 0:
        parser.error("evaluation.positions is 0, so there is no score to reach; give --evaluation.positions 1000")
    return arguments, config


def main(argv: list[str] | None = None) -> None:
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == [CHILD]:
        given = json.loads(words[1])
        config = Config.model_validate(given["config"])
        print(json.dumps(STEPS[given["step"]](given, config, Path(given["folder"]))))
        return
    arguments, config = _arguments(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "time_to_score.json"
    record: dict[str, Any] = {
        "command": command_of(MODULE, argv), "score": arguments.score, "every": arguments.every,
        "peers": arguments.peers, "config": config.model_dump(), "trl": trl_settings(config),
        "differences": differences(config), "versions": {name: _version(name) for name in PACKAGES},
        "machine": machine(), "runs": {},
    }  # fmt: skip
    record["runs"] = _kept(saved(file), record) if arguments.resume else {}
    print(f"# {record['command']}\n# {line_of(record['machine'])}", flush=True)
    for seed in arguments.seeds:
        runs: dict[str, Any] = record["runs"].setdefault(str(seed), {})
        for name in (OURS, *arguments.peers):
            if name not in runs:
                runs[name] = _run(name, run_of(config, seed, arguments.every), arguments.every)
            _compare(runs, name, arguments.score)
            print(f"seed {seed}, {name}: {runs[name].get('error', 'done')}", flush=True)
            save(file, record)
    text = f"`{record['command']}`\n\n{line_of(record['machine'])}\n\n{summary(record)}\n"
    (arguments.out / "time_to_score.md").write_text(text)
    draw(record, arguments.out / "time_to_score.png")
    print(summary(record))
    if failed := [name for runs in record["runs"].values() for name, run in runs.items() if "error" in run]:
        raise SystemExit(f"{len(failed)} run(s) failed, {failed[0]} first; see {file}; --resume keeps the others")


def _run(name: str, config: Config, every: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="time_to_score-") as folder:
        work = Path(folder)
        return train_ours(config, work) if name == OURS else train_peer(name, config, every, work)


def _compare(runs: dict[str, Any], name: str, score: str) -> None:
    """Adds a peer's times to the same score as ours, where both have points."""
    ours, peer = runs[OURS], runs[name]
    if name == OURS or "error" in ours or "error" in peer:
        return
    try:
        require_same_start(ours, peer)
        peer["same_score"] = same_score(ours, peer, score)
    except (NotTheSame, KeyError) as error:
        runs[name] = {"error": f"{type(error).__name__}: {error}"}


def _kept(earlier: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """Runs without an error of an earlier record of the same settings on the same machine."""
    same = all(earlier.get(name) == record[name] for name in ("every", "config", "trl", "versions"))
    if not same or earlier["machine"].get("processor") != record["machine"]["processor"]:
        return {}
    return {
        seed: {name: run for name, run in by_name.items() if "error" not in run}
        for seed, by_name in earlier["runs"].items()
    }


@functools.cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
