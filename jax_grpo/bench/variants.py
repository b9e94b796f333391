"""Settings against each other: the same run with some settings changed, over seeds; a table and a picture of a metric.

    python -m jax_grpo.bench.variants --config configs/length_toy.yaml --seeds 0,1,2 --out docs/results/shaping \\
        --variant "sum first" --variant "GDPO: --advantage.components gdpo"

Each run is a process of its own, `python -m jax_grpo.train`, in a folder that is thrown away; what is kept are the metric and the
entropy by iteration. A record is written after each run, and a run that is there is not made again.
"""

import argparse
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax_grpo.bench.harness import command_of, command_parser, header, line, save, saved
from jax_grpo.bench.machine import line_of, machine
from jax_grpo.config import ConfigError, check_files, load_config
from jax_grpo.report.records import read_records
from jax_grpo.system.process import failure

MODULE = "jax_grpo.bench.variants"
ENTROPY, SECONDS = "entropy", "time/iteration"


class Variant(NamedTuple):
    """Settings under a name: words of a command line, such as `--advantage.scale none`."""

    name: str
    overrides: list[str]


def parse_variant(text: str) -> Variant:
    """`NAME` or `NAME: --section.key value ...`."""
    name, _, settings = text.partition(":")
    return Variant(name.strip(), shlex.split(settings))


def train(config: str, overrides: Sequence[str], metric: str) -> dict[str, Any]:
    """One run's points [iteration, metric], its last entropy in nats and its seconds of training; `error` where it fails."""
    with tempfile.TemporaryDirectory(prefix="variants-") as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "jax_grpo.train", "--config", config, *overrides, "--run_dir", str(run)]
        child = subprocess.run(
            [*command, "--logging.progress", "false"],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        if child.returncode:
            return {"error": failure(child.stderr, child.returncode)}
        records = read_records(run / "metrics.jsonl")
    points = [[record["iteration"], record[metric]] for record in records if record.get(metric) is not None]
    if not points:
        named = sorted({name for record in records for name in record})
        return {"error": f"the run has no {metric}; expected one of {', '.join(named)}"}
    entropies = [record[ENTROPY] for record in records if record.get(ENTROPY) is not None]
    seconds = sum(record.get(SECONDS, 0.0) for record in records)
    return {"points": points, "entropy": entropies[-1] if entropies else None, "seconds": seconds}


def summary(record: Mapping[str, Any]) -> str:
    """Markdown: each variant's last value of the metric over the seeds, its entropy and its seconds; means and both ends."""
    lines = [
        header(
            "variant", "settings", record["metric"], "lowest to highest", "entropy at the end, nats", "seconds", "seeds"
        )
    ]
    for name, settings in record["variants"].items():
        runs = record["runs"].get(name, {})
        done = [run for run in runs.values() if "error" not in run]
        shown = f"`{shlex.join(settings)}`" if settings else "as the config has them"
        failed = "; ".join(f"seed {seed}: {run['error']}" for seed, run in runs.items() if "error" in run)
        if not done:
            lines.append(line(name, shown, failed or "not run", "", "", "", "0"))
            continue
        last = [run["points"][-1][1] for run in done]
        entropies = [run["entropy"] for run in done if run["entropy"] is not None]
        entropy = f"{statistics.mean(entropies):.2f}" if entropies else "-"
        seconds = f"{statistics.mean(run['seconds'] for run in done):.0f}"
        spread = f"{min(last):.3f} to {max(last):.3f}"
        lines.append(
            line(name, shown, f"{statistics.mean(last):.3f}", spread, entropy, seconds, f"{len(done)} {failed}".strip())
        )
    return "\n".join(lines)


def draw(record: Mapping[str, Any], file: Path) -> None:
    """A line a variant: the seeds' mean of the metric over iterations, and between the lowest and the highest a shade."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np
    from matplotlib.ticker import MaxNLocator

    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name in record["variants"]:
        runs = [run["points"] for run in record["runs"].get(name, {}).values() if "error" not in run]
        if not runs:
            continue
        points_RN2 = np.array([run[: min(map(len, runs))] for run in runs], np.float64)
        steps_N, values_RN = points_RN2[0, :, 0], points_RN2[..., 1]
        (drawn,) = axis.plot(steps_N, values_RN.mean(0), marker="o", markersize=3, label=name)
        axis.fill_between(steps_N, values_RN.min(0), values_RN.max(0), color=drawn.get_color(), alpha=0.15)
    axis.set(xlabel="iteration", ylabel=record["metric"])
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(alpha=0.3)
    if axis.lines:
        axis.legend(frameon=False)
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Every variant's settings are checked before anything is started."""
    parser = command_parser(MODULE, __doc__)
    option = parser.add_argument
    option("--config", required=True, metavar="FILE", help="what all variants share")
    option("--variant", action="append", required=True, metavar="'NAME: --section.key value'", help="once for each")
    option("--seeds", default="0,1,2", help="with commas between (default: 0,1,2)")
    option("--metric", default="reward/mean", help="of metrics.jsonl (default: reward/mean)")
    option("--out", required=True, type=Path, metavar="DIR", help="variants.json, .md and .png")
    arguments = parser.parse_args(argv)
    arguments.variants = [parse_variant(text) for text in arguments.variant]
    names = [variant.name for variant in arguments.variants]
    if twice := [name for name in names if names.count(name) > 1 or not name]:
        parser.error(f"--variant {twice[0]!r}: expected a name for each, and no name twice")
    seeds = arguments.seeds.split(",")
    if not all(seed.isdigit() and int(seed) < 2**31 for seed in seeds):
        parser.error(f"--seeds {arguments.seeds!r}: expected whole numbers from 0 to 2147483647 with commas between")
    arguments.seeds = list(dict.fromkeys(seeds))
    for variant in arguments.variants:
        try:
            check_files(load_config(arguments.config, variant.overrides))
        except ConfigError as error:
            parser.error(f"--variant {variant.name!r}: {error}")
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = _arguments(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "variants.json"
    record: dict[str, Any] = {
        "command": command_of(MODULE, argv),
        "metric": arguments.metric,
        "config": load_config(arguments.config).model_dump(),
        "machine": machine(),
        "variants": {variant.name: variant.overrides for variant in arguments.variants},
        "runs": {},
    }
    earlier = saved(file)
    if earlier.get("config") == record["config"] and earlier.get("metric") == record["metric"]:
        record["runs"] = {
            name: {seed: run for seed, run in runs.items() if "error" not in run}
            for name, runs in earlier["runs"].items()
            if earlier["variants"][name] == record["variants"].get(name)
        }
    print(f"# {record['command']}\n# {line_of(record['machine'])}", flush=True)
    for seed in arguments.seeds:
        for variant in arguments.variants:
            runs = record["runs"].setdefault(variant.name, {})
            if seed not in runs:
                runs[seed] = train(arguments.config, [*variant.overrides, "--seed", seed], arguments.metric)
                save(file, record)
            said = runs[seed].get("error") or f"{record['metric']} {runs[seed]['points'][-1][1]:.4f}"
            print(f"seed {seed}, {variant.name}: {said}", flush=True)
    table = summary(record)
    (arguments.out / "variants.md").write_text(f"`{record['command']}`\n\n{line_of(record['machine'])}\n\n{table}\n")
    draw(record, arguments.out / "variants.png")
    print(table)
    if failed := [run["error"] for runs in record["runs"].values() for run in runs.values() if "error" in run]:
        raise SystemExit(f"{len(failed)} run(s) failed: {failed[0]}")


if __name__ == "__main__":
    main()
