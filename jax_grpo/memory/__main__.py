"""Does a run fit, and what fills the device? `python -m jax_grpo.memory --config C.yaml --target rtx4090 --out DIR`"""

import argparse
import json
import os
import sys
from pathlib import Path

from jax_grpo.system import devices


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m jax_grpo.memory", description=(__doc__ or "").splitlines()[0])
    option, targets = parser.add_argument, ", ".join(devices.known())
    option(
        "--config",
        required=True,
        help="of the run; any --section.key value overrides it; of a --mesh.fsdp 4 every figure is of each device",
    )
    option("--target", default="rtx4090", help=f"{targets}, cpu, or local (default: rtx4090)")
    option("--json", metavar="FILE", help="the report as data")
    option("--out", metavar="DIR", help="the report as JSON, Markdown and a picture")
    option("--search", action="store_true", help="also the largest micro-batch and batch (a minute or two)")
    option("--launches", action="store_true", help="also kernels, bytes and FLOPs, with the least times (GPU targets)")
    option("--measure", action="store_true", help="run each program here and compare (targets cpu and local)")
    arguments, overrides = parser.parse_known_args(argv)
    if arguments.target != "local":
        os.environ["JAX_PLATFORMS"] = "cpu"  # with a GPU platform asked for, JAX looks for a driver first
    from jax_grpo.config import load_config
    from jax_grpo.memory.compile import HERE, CannotCompile
    from jax_grpo.memory.fit import choose_micro_batches
    from jax_grpo.memory.measured import compare
    from jax_grpo.memory.report import report, save_picture, text

    if arguments.measure and arguments.target not in HERE:
        raise SystemExit(
            f"--measure runs programs on this machine; --target {arguments.target} is not it: give cpu or local"
        )
    if arguments.launches and arguments.target in HERE:
        raise SystemExit(f"--launches counts kernels of a GPU: give --target one of {targets}, not {arguments.target}")
    try:
        config = load_config(arguments.config, overrides)
        if (count := config.mesh.devices) > 1 and (arguments.search or arguments.launches or arguments.measure):
            raise ValueError(
                f"--search, --launches and --measure are of one device, and the mesh is of {count}; leave them out"
            )
        if count > 1 and arguments.target == "cpu":  # before JAX looks for devices
            flag = f"--xla_force_host_platform_device_count={count}"
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
        config = choose_micro_batches(config, print, target=arguments.target)
        record = report(config, arguments.target, search=arguments.search, launches=arguments.launches)
    except (CannotCompile, ValueError) as error:  # the project's input errors are ValueErrors
        raise SystemExit(f"{type(error).__name__}: {error}") from error
    command = "python -m jax_grpo.memory " + " ".join(sys.argv[1:] if argv is None else argv)
    words, record = text(record), {"command": command, **record}
    if arguments.measure:
        numbered = [*overrides, "--update.micro_batches", str(config.update.parts)]  # what `auto` stands for
        record["measured"], comparison = compare(arguments.config, numbered, arguments.target, record["programs"])
        words += comparison
    print(words, end="")
    several = "".join(f"_{axis}{size}" for axis, size in config.mesh.sizes.items() if size > 1)
    data, name = json.dumps(record, indent=1) + "\n", f"{Path(arguments.config).stem}_{arguments.target}{several}"
    if arguments.json:
        Path(arguments.json).write_text(data)
    if arguments.out:
        folder = Path(arguments.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(data)
        (folder / f"{name}.md").write_text(f"`{command}`\n\n{words}\n![by part]({name}.png)\n")
        save_picture(record, folder / f"{name}.png", Path(arguments.config).stem)


if __name__ == "__main__":
    main()
