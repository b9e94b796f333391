"""Compiled programs: counted, bounded by the widths of prompts, and kept for the next run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import config
from short_runs import TIMES

from jax_grpo.report.records import read_records
from jax_grpo.rollout.generate import encode_prompts
from jax_grpo.trainer import Trainer

RUN = [
    "--config", "configs/length_toy.yaml", "--iterations", "2", "--logging.tensorboard", "false", "--checkpoint.every", "0",
]  # fmt: skip


@pytest.mark.slow  # compiles every program twice
def test_a_program_is_compiled_once_for_each_width_of_prompts():
    trainer = Trainer(
        config(
            model={"num_layers": 1, "hidden_size": 16, "max_position_embeddings": 100},
            prompts={"source": "packaged", "per_iteration": 1, "max_prompt_tokens": 80},
        )
    )
    compiled, widths = [], []
    for iteration in range(8):
        metrics = trainer.iterate(iteration)[0]
        texts = [prompt.text for prompt in trainer.prompts.in_order(iteration)[1]]
        widths.append(encode_prompts(texts, trainer.tokenizer, 80).ids_PT.shape[1])
        compiled.append({name: metrics[f"compile/{name}"] for name in ("generate", "score", "update")})
        assert (metrics["time/compile"] > 0) == any(compiled[-1].values())
    assert len(set(widths)) > 1, "several widths"
    for iteration, (width, counts) in enumerate(zip(widths, compiled, strict=True)):
        first = width not in widths[:iteration]
        assert counts == {"generate": first, "score": first, "update": first}, (iteration, width, counts)


@pytest.mark.slow
def test_a_second_run_takes_the_programs_of_the_first_and_gives_the_same_numbers(tmp_path, request):
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"} | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    metrics, seconds, files = [], [], []
    for run in ("first", "second"):
        command = [sys.executable, "-m", "jax_grpo.train", *RUN, "--run_dir", str(tmp_path / run)]
        command += ["--compilation_cache", str(tmp_path / "programs")]
        subprocess.run(command, check=True, env=environment, cwd=request.config.rootpath, capture_output=True)
        records = read_records(tmp_path / run / "metrics.jsonl")
        seconds.append(records[0]["time/compile"])
        metrics.append([{k: v for k, v in record.items() if not k.startswith(TIMES)} for record in records])
        files.append({path.name for path in (tmp_path / "programs").iterdir() if "generate" in path.name})
    print(f"first run {seconds[0]:.1f} s to compile, second {seconds[1]:.1f} s")
    assert files[0] and files[0] == files[1], "the second run compiles nothing that the first has kept"
    assert metrics[0] == metrics[1]
