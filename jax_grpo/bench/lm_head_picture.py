"""A picture of LM heads by number of tokens, from JSON files of `jax_grpo.bench.lm_head`: memory, and time where measured."""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def tokens_of(shape: str) -> int:
    """T of `T,H,V`."""
    return int(shape.split(",", 1)[0])


def draw(files: list[dict], path: Path) -> None:
    """One line a variant: total megabytes, or median milliseconds where the files hold times."""
    files = sorted(files, key=lambda file: tokens_of(file["shape"]))
    quantities = {
        "memory, MB": lambda record: record.get("total", 0) / 1e6 or (record.get("peak_bytes_in_use") or 0) / 1e6,
        "time, ms": lambda record: record.get("masked 0%", {}).get("median_ms", 0),
    }
    shown = [name for name, of in quantities.items() if any(of(r) for file in files for r in file["variants"].values())]
    figure, panels = plt.subplots(1, len(shown), figsize=(6.4 * len(shown), 4.2), squeeze=False)
    for panel, name in zip(panels[0], shown, strict=True):
        for variant in files[0]["variants"]:
            points = [(tokens_of(f["shape"]), quantities[name](f["variants"][variant])) for f in files]
            panel.plot(*zip(*points, strict=True), marker="o", label=variant)
        panel.set(xlabel="tokens", ylabel=name, xscale="log", yscale="log", title=f"{files[0]['target']}, {name}")
        panel.set_xticks([tokens_of(f["shape"]) for f in files], [str(tokens_of(f["shape"])) for f in files])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jax_grpo.bench.lm_head_picture", description=__doc__)
    parser.add_argument("files", nargs="+", help="JSON of shapes T,H,V, the same variants in each")
    parser.add_argument("--out", required=True, help="PNG")
    arguments = parser.parse_args(argv)
    draw([json.loads(Path(file).read_text()) for file in arguments.files], Path(arguments.out))


if __name__ == "__main__":
    main()
