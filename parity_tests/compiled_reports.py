"""Memory reports by the command line, and whether XLA's compiler for GPUs is installed here. No GPU is used."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jax_grpo.memory.compile import INSTALL

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
PLUGIN = any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"))
needs_plugin = pytest.mark.skipif(not PLUGIN, reason=INSTALL)


def compiled_report(config: Path, folder: Path, *words: str, target: str = "rtx4090") -> dict:
    """The report of a config for a target, from a process of its own; any but `local` is compiled for without a driver."""
    file = folder / "report.json"
    command = [
        sys.executable,
        "-m",
        "jax_grpo.memory",
        "--config",
        str(config),
        "--target",
        target,
        "--json",
        str(file),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | ({} if target == "local" else {"JAX_PLATFORMS": "cpu"})
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    print(done.stdout)
    return json.loads(file.read_text())
