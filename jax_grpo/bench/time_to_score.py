"""The same training by `jax_grpo` and by TRL, one after the other: held-out scores against iterations and against seconds.

    python -m jax_grpo.bench.time_to_score --config configs/quickstart.yaml --every 20 --out docs/results/time_to_score

Both begin with the same weights, read the same prompts in the same order, and have the same reward and settings (`trl_settings`,
which refuses what TRL has no counterpart of). Seconds are of training alone, compiling included; both clocks stand still while
weights are saved or evaluated. Our evaluator scores all weights on the same held-out positions. Each run is its own process.
"""

import os
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from jax_grpo.bench import curves, trl_training
from jax_grpo.bench.curves import Point, Run, RunFailed, curve, finished, first_reached
from jax_grpo.bench.records import command_parser, header, line, new_record, same_settings, save, saved, selected
from jax_grpo.bench.runner import QUIET
from jax_grpo.bench.trl_settings import NotTheSame, differences, require_same, trl_settings
from jax_grpo.config import Config, ConfigError, load_config, require_all_trained
from jax_grpo.system.process import child_record

MODULE = "jax_grpo.bench.time_to_score"
OURS = "jax_grpo"
SCORE = "eval/sampled/reward"
START_TOLERANCE = 1e-5  # between scores of the same weights
PACKAGES = ("jax_grpo", "jax", "jaxlib", "flax", "optax", "torch", "transformers", "trl", "accelerate")
# Of our run beside what the config says: nothing that is no part of training.
TRAINING_ALONE = shlex.split(
    "--logging.tensorboard false --logging.samples_every 0 --checkpoint.every 0 --checkpoint.keep_best 0"
)


def train_ours(config: str, words: Sequence[str], score: str) -> dict[str, Any]:
    """`curves.measured` of `jax_grpo.train`, all scores of each evaluation, each iteration's mean reward and length.

    Raises:
        RunFailed: it ended with an error, or has no such score.
    """
    records = curves.trained(config, [*words, *TRAINING_ALONE], cold=True)
    evaluations = [record for record in records if "loss" not in record]
    iterations = [record for record in records if "loss" in record]
    return curves.measured(records, score) | {
        "scores": [{name: x for name, x in record.items() if name.startswith("eval/")} for record in evaluations],
        "rewards": [record["reward/mean"] for record in iterations],
        "completion_lengths": [record["completion_length/mean"] for record in iterations],
    }


def train_peer(peer: str, config: Config, every: int, score: str) -> dict[str, Any]:
    """The same of TRL, whose weights are evaluated when it is done.

    Raises:
        RunFailed: one of its processes ended with an error.
    """
    record: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="time_to_score-") as folder:
        (Path(folder) / trl_training.CONFIG).write_text(config.model_dump_json())
        for step in trl_training.STEPS:
            command = [sys.executable, "-m", trl_training.__name__, step, folder, peer, str(every)]
            record |= child_record(command, os.environ | QUIET)
            if "error" in record:
                raise RunFailed(f"{step}: {record['error']}")
    return with_points(record, record.pop("saved"), score)


def with_points(run: Run, iterations: Iterable[int], score: str) -> Run:
    """The run with `points` of this one of its `scores`."""
    return run | {"points": [[at, scores[score]] for at, scores in zip(iterations, run["scores"], strict=True)]}


def earlier_runs(earlier: Mapping[str, Any], name: str, score: str) -> dict[str, Run]:
    """Finished runs of an earlier record, which may have been of another score."""
    runs = {seed: run for seed, run in finished(earlier, name).items() if score in run["scores"][0]}
    return {seed: with_points(run, [at for at, _ in run["points"]], score) for seed, run in runs.items()}


def same_score(ours: Sequence[Point], peer: Sequence[Point]) -> dict[str, float | None]:
    """The lower of the two last scores, when each curve first reached it, and how many times as long the peer took."""
    level = min(ours[-1].score, peer[-1].score)
    reached = [first_reached(points, level) or (None, None) for points in (ours, peer)]
    result: dict[str, float | None] = {"level": level}
    for axis, pair in zip(("iteration", "seconds"), zip(*reached, strict=True), strict=True):
        result |= {f"{axis}_ours": pair[0], f"{axis}_peer": pair[1]}
        result[f"{axis}_ratio"] = pair[1] / pair[0] if pair[0] and pair[1] is not None else None
    return result


def compared(ours: Run, peer: Run) -> Run:
    """A peer's run with its time to the same score as ours, where both have points; an error where they did not begin alike."""
    if "error" in ours or "error" in peer:
        return peer
    other = peer["scores"][0]
    for key, value in ours["scores"][0].items():
        if not abs(value - other.get(key, float("nan"))) <= START_TOLERANCE:
            values = f"{value} in our run and {other.get(key)} of TRL's weights"
            return {"error": f"NotTheSame: before training {key} is {values}; expected one"}
    return peer | {"same_score": same_score(curve(ours), curve(peer))}


def summary(record: Mapping[str, Any]) -> str:
    """Markdown: every point of every run, then the times to the same score."""
    lines = [header("run", "seed", "iterations", "training seconds", record["score"])]
    for name, runs in record["runs"].items():
        for seed, run in runs.items():
            if "error" in run:
                lines.append(line(name, seed, run["error"], "", ""))
                continue
            for point in curve(run):
                lines.append(line(name, seed, point.iteration, f"{point.seconds:.1f}", f"{point.score:.4f}"))
    lines += ["", header("peer", "seed", "score reached by both", "ours after", "peer after", "peer / ours")]
    for peer in record["peers"]:
        both = {seed: run["same_score"] for seed, run in finished(record, peer).items() if "same_score" in run}
        for seed, same in both.items():
            times = [_after(same[f"seconds_{side}"], same[f"iteration_{side}"]) for side in ("ours", "peer")]
            ratio = "-" if same["seconds_ratio"] is None else f"{same['seconds_ratio']:.2f}"
            lines.append(line(peer, seed, f"{same['level']:.4f}", *times, ratio))
        ratios = [same["seconds_ratio"] for same in both.values() if same["seconds_ratio"] is not None]
        if len(ratios) > 1:
            lines.append(line(peer, "median", "", "", "", f"{statistics.median(ratios):.2f}"))
    return "\n".join(lines)


def _after(seconds: float | None, iteration: float | None) -> str:
    return "not" if seconds is None or iteration is None else f"{seconds:.1f} s (iteration {iteration:.1f})"


def _arguments(argv: Sequence[str] | None) -> tuple[Any, list[str], Config]:
    """The command's arguments, the settings of both sides as words, and the config; checked before anything is started."""
    parser = command_parser(MODULE, __doc__)
    parser.allow_abbrev = False
    option = parser.add_argument
    option("--config", required=True, metavar="FILE", help="of the policy task; any setting can follow: --kl.beta 0.1")
    option("--every", type=int, default=20, metavar="E", help="iterations between evaluations (default: 20)")
    option("--seeds", default="0", help="with commas between, of both (default: 0)")
    option("--peers", default="TRL", help=f"of {', '.join(trl_training.PEERS)} (default: TRL)")
    option("--score", default=SCORE, metavar="METRIC", help=f"of the evaluations (default: {SCORE})")
    option("--out", required=True, type=Path, metavar="DIR", help="time_to_score.json, .md and .png")
    option("--resume", action="store_true", help="keep the runs that DIR already has")
    arguments, words = parser.parse_known_args(argv)
    try:
        config = load_config(arguments.config, words)
        require_all_trained(config, "this comparison")
        require_same(config)
    except (ConfigError, NotTheSame) as error:
        parser.error(str(error))
    arguments.peers = selected("--peers", arguments.peers, trl_training.PEERS)
    arguments.seeds = curves.seeds_of(arguments.seeds, parser)
    if not 1 <= arguments.every <= config.iterations:
        parser.error(f"--every {arguments.every}: expected 1 to the {config.iterations} iterations")
    if not arguments.score.startswith(("eval/greedy/", "eval/sampled/")):
        parser.error(f"--score {arguments.score!r}: expected eval/greedy/... or eval/sampled/..., such as {SCORE}")
    if config.evaluation.positions == 0:
        parser.error("evaluation.positions is 0, so there is no score to reach; give --evaluation.positions 1000")
    return arguments, [*words, "--evaluation.every", str(arguments.every)], config


def main(argv: list[str] | None = None) -> None:
    arguments, words, config = _arguments(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    file, score, names = arguments.out / "time_to_score.json", arguments.score, (OURS, *arguments.peers)
    record = new_record(
        MODULE, argv, score=score, every=arguments.every, peers=arguments.peers, config=config.model_dump(mode="json"),
        trl=trl_settings(config), differences=differences(config),
        versions={name: metadata.version(name) for name in PACKAGES}, runs={},
    )  # fmt: skip
    earlier = saved(file) if arguments.resume else {}
    if same_settings(earlier, record, "every", "config", "trl", "versions"):
        record["runs"] = {name: earlier_runs(earlier, name, score) for name in names}

    def train(name: str, seed: str) -> dict[str, Any]:
        of_seed = [*words, "--seed", seed]
        if name == OURS:
            return train_ours(arguments.config, of_seed, score)
        return train_peer(name, load_config(arguments.config, of_seed), arguments.every, score)

    curves.run_all(record, file, arguments.seeds, {name: partial(train, name) for name in names})
    runs = record["runs"]
    for peer in arguments.peers:
        runs[peer] = {seed: compared(runs[OURS][seed], run) for seed, run in runs[peer].items()}
    save(file, record)
    curves.draw(record, f"held-out {score.removeprefix('eval/')}", file.with_suffix(".png"))
    curves.conclude(record, summary(record), file.with_suffix(".md"))


if __name__ == "__main__":
    main()
