"""A profiled run writes what the config asks for, for the iterations it names, and trains the same."""

import gzip
import json

import pydantic
import pytest
from conftest import config

from jax_grpo.config.sections import ProfileConfig
from jax_grpo.train import train


def run(folder, **profile):
    settings = config(
        run_dir=str(folder),
        iterations=3,
        model={"tokenizer": "chess", "max_position_embeddings": 128},
        task={"name": "length"},
        prompts={"max_prompt_tokens": 80},
        logging={"samples_every": 0, "tensorboard": False, "progress": False},
        profile=profile,
    )
    return train(settings)


@pytest.mark.slow  # a run
def test_a_run_of_three_iterations_traces_the_chosen_one_and_saves_its_memory(tmp_path):
    folder = run(tmp_path / "run", memory=True, trace_steps=[2, 3])
    assert [path.name for path in (folder / "profile").glob("*.prof")] == ["memory_000002.prof"]
    assert gzip.decompress((folder / "profile" / "memory_000002.prof").read_bytes()), "a pprof file is gzipped"
    traces = list((folder / "profile").rglob("*.xplane.pb"))
    assert len(traces) == 1 and traces[0].stat().st_size > 10_000
    losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 3


@pytest.mark.slow
def test_without_steps_the_memory_is_that_after_the_first_iteration(tmp_path):
    folder = run(tmp_path / "run", memory=True)
    assert [path.name for path in (folder / "profile").iterdir()] == ["memory_000000.prof"]


def test_steps_in_the_wrong_order_are_refused():
    with pytest.raises(pydantic.ValidationError, match=r"profile.trace_steps \[3, 3\] must be \[first, last\]"):
        ProfileConfig(trace_steps=[3, 3])
