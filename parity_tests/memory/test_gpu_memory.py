"""The device's memory: what the report says against what was held, and what is said when it is too little."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from compiled_reports import CONFIGS, PLUGIN, ROOT, compiled_report
from conftest import PATIENCE_S
from device import needs_gpu, on_gpu

from jax_grpo.config import load_config
from jax_grpo.memory.measured import fresh
from jax_grpo.memory.programs import run_of
from jax_grpo.system import devices

pytestmark = pytest.mark.gpu
TOLERANCE = 0.05  # the project's claim; cuDNN's workspace and the allocator's rounding are in no report
CONFIGS_MEASURED = ("legality", "bench_8x174", "rookworld_4090")


@pytest.mark.parametrize("config", CONFIGS_MEASURED)
def test_the_report_is_the_peak_that_was_measured_for_every_program(config, monkeypatch):
    """On a CPU resident pages stand for the allocator's peak; there one program shows that the way works."""
    file = CONFIGS / f"{config}.yaml"
    if on_gpu():
        names = [program.name for program in run_of(load_config(str(file))).programs]
    elif config == "legality":
        names = ["reference"]
        # Its matrix library packs operands into memory of its own, which XLA does not count.
        library = "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_INVALID"
        monkeypatch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {library}")
    else:
        needs_gpu("a CPU's allocator keeps no peak, and test_memory's slow tests read resident pages")
    actual = {name: fresh(str(file), [], "local", name) for name in names}
    for name, record in actual.items():
        assert "error" not in record, f"{name}: {record['error']}"
        compiled, held = record["compiled"] / 1e6, record["peak"] / 1e6
        print(f"{config}, {name}: report {compiled:.1f} MB, held {held:.1f} MB, {compiled / held - 1:+.1%}")
    for name, record in actual.items():
        assert record["compiled"] == pytest.approx(record["peak"], rel=TOLERANCE), name


@pytest.mark.parametrize("config", ["bench_8x174", "rookworld_4090"])
def test_what_was_said_of_the_card_without_it_is_what_it_needs(config, tmp_path):
    """The figures of docs/memory.md and of the README, compiled without a driver, against those compiled on the card."""
    needs_gpu("both reports would be of a CPU")
    kind = jax.devices()[0].device_kind
    target = next((name for name in devices.known() if devices.read(name).device_kind == kind), None)
    if target is None or not PLUGIN:
        pytest.skip(
            f"needs a file in assets/targets for {kind}, there are {', '.join(devices.known())}; and the plugin"
        )
    described = compiled_report(CONFIGS / f"{config}.yaml", tmp_path, target=target)
    here = compiled_report(CONFIGS / f"{config}.yaml", tmp_path, target="local")
    for planned, actual in zip(described["programs"], here["programs"], strict=True):
        print(
            f"{config}, {planned['name']}: {planned['peak'] / 1e6:.1f} MB planned, {actual['peak'] / 1e6:.1f} MB here"
        )
        assert planned["peak"] == pytest.approx(actual["peak"], rel=TOLERANCE), planned["name"]


# A micro-batch of 128 completions of 32 tokens, each with 50,304 logits.
CONFIG = """
iterations: 1
model: {tokenizer: gpt2, num_layers: 1, num_heads: 2, hidden_size: 16, max_position_embeddings: 128}
task: {name: length}
prompts: {per_iteration: 8, max_prompt_tokens: 80}
rollout: {group_size: 16, max_new_tokens: 32}
kl: {beta: 0.0}
logging: {samples_every: 0, tensorboard: false}
checkpoint: {every: 0}
compilation_cache: null
"""
LOGITS = 128 * 32 * 50304 * 4  # bytes; on a CPU the update asks for three times as many
# A CPU has no pool: there the process may take so much more than it holds at first, for threads and the compiler too.
IN_LITTLE_MEMORY = """
import pathlib, re, resource, sys
import jax
from jax_grpo.train import main

if jax.default_backend() == "cpu":
    status = pathlib.Path("/proc/self/status").read_text()
    mapped = 1024 * int(re.search(r"VmSize:\\s+(\\d+) kB", status).group(1))
    resource.setrlimit(resource.RLIMIT_AS, (mapped + int(sys.argv[1]),) * 2)
main(sys.argv[2:])
"""


def in_little_memory(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """`jax_grpo.train` in a process whose device has less memory than the update needs, and more than a sixteenth of it."""
    # On a CPU, beyond what was mapped at first, all at once maps 4.8 times the logits, a sixteenth 2.1 times.
    limit = (0.9 if on_gpu() else 3.4) * LOGITS
    (folder / "c.yaml").write_text(CONFIG)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"}
    if not on_gpu():
        environment["XLA_FLAGS"] = ""  # those of quick compiling make slow loops, over 50,304 columns here
        environment["MALLOC_ARENA_MAX"] = "1"  # glibc maps up to 0.13 GB more for each thread, held or not
    else:
        default = jax.devices()[0].memory_stats()["bytes_limit"]  # three quarters of the card, unless asked otherwise
        share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75")) * limit / default
        environment |= {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.4f}", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    command = [sys.executable, "-c", IN_LITTLE_MEMORY, str(int(limit)), "--config", str(folder / "c.yaml")]
    command += ["--run_dir", str(folder / "run"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT, timeout=PATIENCE_S
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of a process's memory is Linux's")
def test_a_run_that_does_not_fit_says_which_program_and_fits_with_what_it_advises(tmp_path):
    done = in_little_memory(tmp_path)
    kind = re.escape(jax.devices()[0].device_kind)
    message = re.search(
        rf"the update program does not fit on {kind} \(it asked for ([\d.]+) ?([KMGT]i?B) more\)\. Its micro-batch has "
        r"128 completions: set update\.micro_batches (\d+) \(now 1\) for 64, which trains the same",
        done.stderr + done.stdout,
    )
    assert done.returncode and message, done.stderr[-2000:]
    print(message.group(0))
    assert message.group(2) in ("GB", "GiB") and message.group(3) == "2"
    again = in_little_memory(tmp_path, "--restart", "--update.micro_batches", "16")
    assert again.returncode == 0, again.stderr[-2000:]
