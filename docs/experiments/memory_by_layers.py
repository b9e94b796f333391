"""Memory of a deep model's rollout and update on a 4090, from compiles of two and of four of its layers: a straight line.

    JAX_PLATFORMS=cpu python docs/experiments/memory_by_layers.py --config configs/qwen3_4b_lora_4090.yaml [--section.key value ...]

Minutes where `python -m jax_grpo.memory` takes an hour on slow cores; that one compiles the model itself, and is to be believed
where both are there. Not part of the package.
"""

import argparse
import json
import tempfile
from pathlib import Path

from jax_grpo.config import load_config
from jax_grpo.memory.compile import device, program_bytes
from jax_grpo.memory.programs import run_of

TARGET = "rtx4090"


def bytes_of(config: str, overrides: list[str], described: dict, layers: int, folder: Path) -> dict[str, int]:
    """Bytes on the card while each program is in it, and of what stays there."""
    file = folder / f"{layers}.json"
    file.write_text(json.dumps(described | {"num_hidden_layers": layers}))
    run = run_of(load_config(config, [*overrides, "--model.architecture", str(file)]))
    programs = {name: run.program(name) for name in ("rollout", "update")}
    return {name: program_bytes(TARGET, one) + run.beside(one) for name, one in programs.items()} | run.resident


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    arguments, overrides = parser.parse_known_args()
    described = json.loads(Path(str(load_config(arguments.config, overrides).model.architecture)).read_text())
    with tempfile.TemporaryDirectory() as folder:
        two, four = (bytes_of(arguments.config, overrides, described, count, Path(folder)) for count in (2, 4))
    deeper = (described["num_hidden_layers"] - 4) / 2
    actual = {name: round((four[name] + deeper * (four[name] - two[name])) / 1e9, 2) for name in four}
    spare = device(TARGET).memory / 1e9 - max(actual["rollout"], actual["update"])
    print(json.dumps(actual | {"spare": round(spare, 2)}))


if __name__ == "__main__":
    main()
