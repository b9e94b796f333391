"""`update.micro_batches: auto` chooses the fewest that fit, says so, and trains what the number itself would train."""

import json
from pathlib import Path

import numpy as np
import pytest
from conftest import config
from safetensors.numpy import load_file
from short_runs import TIMES

from jax_grpo.config import Config, ConfigError, load_config
from jax_grpo.config.tasks import task_of
from jax_grpo.memory.compile import program_bytes
from jax_grpo.memory.fit import MARGIN, NothingFits, bytes_of, choose_micro_batches, fewest, limit_of
from jax_grpo.memory.programs import run_of
from jax_grpo.system.memory import available
from jax_grpo.tasks import make_task
from jax_grpo.train import train

QUICKSTART = Path(__file__).parents[2] / "configs" / "legality.yaml"


def settings(folder="unused", iterations=1, **update):
    """A tiny run whose activations are much larger than its weights."""
    return config(
        run_dir=str(folder),
        iterations=iterations,
        model={"tokenizer": "chess", "num_layers": 1, "max_position_embeddings": 128},
        task={"name": "length"},
        prompts={"per_iteration": 4, "max_prompt_tokens": 80},
        update=update,
        logging={"samples_every": 0, "tensorboard": False, "progress": False},
        checkpoint={"every": 0},
    )


def update_bytes(parts: int) -> int:
    run = run_of(settings(micro_batches=parts))
    update = next(program for program in run.programs if program.name == "update")
    return program_bytes("local", update) + run.resident["reference"]


def trained(folder) -> tuple[dict, dict]:
    """Weights, and metrics that are not times."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return load_file(folder / "weights" / "model.safetensors"), [
        {key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows
    ]


def same(first, second) -> None:
    assert first[1] == second[1]
    assert first[0].keys() == second[0].keys()
    assert all(np.array_equal(first[0][name], second[0][name]) for name in first[0])


@pytest.fixture(scope="module")
def two_fit() -> float:
    """A limit in 10^9 bytes under which two micro-batches fit and one does not."""
    needed = {parts: update_bytes(parts) for parts in (1, 2)}
    print(needed)
    return (needed[1] + needed[2]) / 2 / (1 - MARGIN) / 1e9


@pytest.mark.slow  # two runs and the programs of a search
def test_auto_under_a_small_limit_trains_as_the_number_itself_bit_for_bit(two_fit, tmp_path, capsys):
    train(settings(tmp_path / "auto", micro_batches="auto", memory_limit_gb=two_fit))
    output = capsys.readouterr().out
    assert "update.micro_batches: auto is 2, of 8 completions:" in output and "(update.memory_limit_gb)" in output
    train(settings(tmp_path / "number", micro_batches=2))
    same(trained(tmp_path / "auto"), trained(tmp_path / "number"))
    assert load_config(str(tmp_path / "auto" / "config.yaml")).update.micro_batches == 2
    assert json.loads((tmp_path / "auto" / "run.json").read_text())["starts"][0]["micro_batches"] == 2


@pytest.mark.slow
def test_a_run_that_continues_keeps_the_number_that_was_chosen(two_fit, tmp_path, capsys):
    folder = tmp_path / "auto"
    train(settings(folder, micro_batches="auto", memory_limit_gb=two_fit))
    train(settings(folder, iterations=2, micro_batches="auto"), resume="auto")  # no limit: a new run would choose 1
    assert "auto is 2, as the checkpoint's run chose" in capsys.readouterr().out
    train(settings(tmp_path / "number", iterations=2, micro_batches=2))
    same(trained(folder), trained(tmp_path / "number"))


def test_what_is_chosen_is_the_first_that_fits_with_few_programs_compiled():
    possible = [1, 2, 4, 8, 16, 32, 64]
    for limit in range(60, 1100, 7):
        asked = []

        def needs(parts: int, asked=asked) -> int:
            asked.append(parts)
            return 50 + 1024 // parts

        fitting = [parts for parts in possible if 50 + 1024 // parts <= limit]
        assert fewest(possible, needs, limit) == (fitting[0] if fitting else None)
        assert len(set(asked)) <= 4


def test_a_limit_below_one_completion_is_refused_before_training():
    with pytest.raises(
        NothingFits, match=r"needs 0\.\d+ GB with one completion at a time, and 90% of 0.000 GB may be used"
    ):
        choose_micro_batches(settings(micro_batches="auto", memory_limit_gb=1e-6, minibatches=4), print)


@pytest.mark.slow
def test_a_run_with_functions_of_ones_own_is_sized_too(tmp_path):
    values = {"run_dir": str(tmp_path / "run"), "iterations": 1, "task": {"name": "prompts"}, "kl": {"beta": 0.0},
        "model": {"tokenizer": "chess", "num_layers": 1, "num_heads": 2, "hidden_size": 16, "max_position_embeddings": 32},
        "prompts": {"split": "all", "per_iteration": 2, "max_prompt_tokens": 16},
        "rollout": {"group_size": 2, "max_new_tokens": 4}, "update": {"micro_batches": "auto", "memory_limit_gb": 1e-6},
    }  # fmt: skip
    with pytest.raises(NothingFits, match="with one completion at a time"):
        train(values, rewards=[lambda completions, **columns: [0.0] * len(completions)], dataset=[{"prompt": "e4"}])
    assert not (tmp_path / "run" / "run.json").exists(), "nothing has begun"


def test_a_task_of_ones_own_is_refused_before_it_is_sized(tmp_path):
    """As a built-in one is: what does not fit would be named after a compile that takes minutes."""
    values = settings(tmp_path / "run", micro_batches="auto", memory_limit_gb=1e-6).model_dump()
    own = make_task(task_of(**values["task"]))
    with pytest.raises(
        ConfigError, match=r"^task: beside a task that is given to `train`, the config's section does nothing"
    ):
        train(Config.model_validate(values), task=own)
    del values["task"]
    with pytest.raises(ConfigError, match=r"^rewards: a task that is given scores by itself"):
        train(Config.model_validate(values), task=own, rewards=[len])
    values["prompts"]["template"] = "{{ fen }}"
    with pytest.raises(ConfigError, match=r"^prompts.template '{{ fen }}' would do nothing: task 'length' asks about"):
        train(Config.model_validate(values), task=own)


@pytest.mark.slow
def test_a_run_with_a_task_of_ones_own_is_sized_too(two_fit, tmp_path, capsys):
    values = settings(tmp_path / "auto", micro_batches="auto", memory_limit_gb=two_fit).model_dump()
    own = make_task(task_of(**values.pop("task")))
    train(Config.model_validate(values), task=own)
    assert "update.micro_batches: auto is 2, of 8 completions:" in capsys.readouterr().out
    train(settings(tmp_path / "number", micro_batches=2))
    same(trained(tmp_path / "auto"), trained(tmp_path / "number"))


@pytest.mark.slow  # the programs of a search
def test_an_evaluation_that_no_micro_batch_makes_smaller_is_refused_by_its_name():
    """64 held-out prompts beside two of training: the update fits, the evaluation does not."""
    values = settings(micro_batches="auto").model_dump()
    values["prompts"]["per_iteration"], values["rollout"]["group_size"] = 2, 2
    values["evaluation"]["positions"] = 1
    plain = Config.model_validate(values)
    update = bytes_of(plain.with_micro_batches(1), "update", "local")
    evaluation = max(
        bytes_of(plain.with_micro_batches(1), f"evaluation/{mode}", "local") for mode in ("greedy", "sampled")
    )
    assert update < 0.9 * evaluation
    values["update"]["memory_limit_gb"] = (update + evaluation) / 2 / (1 - MARGIN) / 1e9
    with pytest.raises(
        NothingFits, match=r"the evaluation/\w+ program needs .* however the update is cut.*evaluation\.positions 0"
    ):
        choose_micro_batches(Config.model_validate(values), print)


@pytest.mark.slow
def test_a_changed_batch_that_the_old_number_does_not_cut_is_chosen_for_anew():
    output: list[str] = []
    actual = choose_micro_batches(
        settings(micro_batches="auto", memory_limit_gb=1.0), output.append, before={"update": {"micro_batches": 7}}
    )
    assert actual.update.micro_batches == 1
    assert output == [output[0]] and "auto is 1, of 16 completions" in output[0] and "1 programs compiled" in output[0]


def test_limits_come_from_the_config_the_card_or_the_memory_that_is_free():
    assert limit_of(2.5, "rtx4090") == (2.5e9, "update.memory_limit_gb")
    assert limit_of(None, "rtx4090")[0] == pytest.approx(0.75 * 25.39e9, rel=1e-3)
    assert 0 < limit_of(None, "cpu")[0] == pytest.approx(available(1 << 60), rel=0.2)


def test_a_number_of_another_kind_is_refused_by_its_key():
    with pytest.raises(
        ConfigError, match=r"update.micro_batches is 'all'; expected a whole number of at least 1, or auto"
    ):
        load_config(str(QUICKSTART), ["--update.micro_batches", "all"])
    with pytest.raises(ValueError, match=r"only jax_grpo.train and jax_grpo.memory resolve: give a number"):
        print(settings(micro_batches="auto").update.parts)
