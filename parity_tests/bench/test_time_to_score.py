"""The comparison with TRL by time: settings are handed over or refused, completions end alike, and curves meet where they do."""

import json

import pytest
import torch
from conftest import config, experiment

from jax_grpo.bench import curves, trl_settings, variants
from jax_grpo.bench.trl_settings import NotTheSame
from jax_grpo.chess.tasks.policy import SPACES, policy_stop
from jax_grpo.config import Config
from jax_grpo.config.tasks import task_of
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.tasks import make_task
from jax_grpo.tasks.base import Prompt

time_to_score = experiment("time_to_score")
# Settings that reach TRL otherwise than by `GRPOConfig`: the schedule as a list of rates, the prompts as texts.
HANDED_OVER = {"update.schedule", "update.warmup_steps", "update.total_steps", "update.final_learning_rate_fraction"}
# Settings that change how something is computed and no number of it, or that act only beside one that is refused.
WITHOUT_EFFECT = {
    "update.micro_batches", "update.memory_limit_gb", "update.offload_optimizer", "kl.offload_reference",
    "update.max_consecutive_nonfinite", "kl.target", "kl.beta_bounds",
}  # fmt: skip


def changed(base: Config, key: str) -> Config:
    """The config with another value of one setting, whether it may stand there or not."""
    section, name = key.split(".")
    value = trl_settings.value_of(base, key)
    other = (not value) if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else "another"
    part = getattr(base, section).model_copy(update={name: other})
    return base.model_copy(update={section: part})


@pytest.mark.parametrize(
    ("section", "loss"),
    [(section, ("clip", "dapo")) for section in ("rollout", "advantage", "objective", "kl", "update")]
    + [("objective", loss) for loss in (("cispo", "dapo"), ("sapo", "grpo"), ("vespo", "dapo"))],
)
def test_every_setting_of_the_learning_reaches_trl_or_is_refused(section, loss):
    """A setting that is added later must be thought of here."""
    given = config(objective=dict(zip(("name", "aggregation"), loss, strict=True)))
    base = trl_settings.trl_settings(given)
    for name in type(getattr(given, section)).model_fields:
        key = f"{section}.{name}"
        if key in HANDED_OVER | WITHOUT_EFFECT:
            continue
        try:
            assert trl_settings.trl_settings(changed(given, key)) != base, f"{key} is lost on the way to TRL"
        except NotTheSame as error:
            assert key in str(error)


def test_settings_of_one_meaning_are_handed_over_by_trls_names():
    given = config(
        iterations=5,
        objective={"epsilon_low": 0.1, "epsilon_high": 0.3, "aggregation": "dr_grpo", "importance_level": "sequence"},
        kl={"beta": 0.07, "importance_corrected": True},
        update={"epochs": 2, "learning_rate": 2e-3, "betas": [0.8, 0.9], "epsilon": 1e-7, "weight_decay": 0.1},
        advantage={"scale": "batch"},
        rollout={"temperature": 0.7},
    )
    actual = trl_settings.trl_settings(given)
    expected = {
        "epsilon": 0.1, "epsilon_high": 0.3, "loss_type": "dr_grpo", "importance_sampling_level": "sequence", "beta": 0.07,
        "use_bias_correction_kl": True, "num_iterations": 2, "max_steps": 10, "learning_rate": 2e-3, "adam_beta1": 0.8,
        "adam_beta2": 0.9, "adam_epsilon": 1e-7, "weight_decay": 0.1, "scale_rewards": "batch", "temperature": 0.7,
        "num_generations": 4, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 1,
    }  # fmt: skip
    assert expected.items() <= actual.items()


def test_a_large_batch_is_generated_at_once_and_accumulated():
    actual = trl_settings.trl_settings(config(prompts={"per_iteration": 60}, rollout={"group_size": 16}))
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
    assert [actual[name] for name in names] == [240, 4, 4]


def test_all_that_trl_has_no_counterpart_of_is_listed_at_once():
    given = config(
        kl={"adaptive": True}, rollout={"top_k": 5}, objective={"name": "reinforce", "entropy_quantile": 0.5}
    )
    with pytest.raises(NotTheSame) as error:
        trl_settings.trl_settings(given)
    for words in (
        "kl.adaptive True: TRL's beta is constant; expected False",
        "rollout.top_k 5",
        "entropy_quantile 0.5",
    ):
        assert words in str(error.value)
    assert "objective.name reinforce with objective.aggregation dapo: expected clip with grpo" in str(error.value)


@pytest.mark.parametrize(
    ("text", "kept"),
    [(" e2e4 and more", " e2e4"), (" e7e8q", " e7e8q"), (" e7e8 x", " e7e8 "), ("xe2e4", "x"), (" e2", " e2")],
)
def test_a_completion_ends_for_trl_where_the_stop_rule_ends_it(text, kept):
    tokenizer = Tokenizer.load("chess")
    stop, ids = time_to_score.Stop(policy_stop(), "chess", SPACES), tokenizer.encode(text)
    padded = [*ids, tokenizer.eos_id] if kept != text else ids
    assert tokenizer.decode(stop.cut(padded)) == kept
    ended, prompt = stop.criterion(), [[7, 7]]
    actual = [bool(ended(torch.tensor([prompt[0] + ids[:n]]), None)) for n in range(1, len(ids) + 1)]
    length = len(tokenizer.encode(kept))
    assert actual == [n >= length and kept != " e2" for n in range(1, len(ids) + 1)]


def test_end_of_text_ends_a_completion_and_belongs_to_it():
    stop = time_to_score.Stop(policy_stop(), "chess", SPACES)
    assert stop.cut([Tokenizer.load("chess").eos_id, 5, 6]) == [Tokenizer.load("chess").eos_id]


FEN = "4k3/8/8/8/8/8/4P3/4K3 w - - 0 1"


def reward() -> time_to_score.Reward:
    task = make_task(task_of(name="policy", prompt_style="best_move", rewards={"legal": 2.0, "parseable": 0.5}))
    from jax_grpo.chess.positions.position import Position

    prompts = [task.prompt(Position(FEN), 0) for _ in range(8)]
    assert all(isinstance(prompt, Prompt) for prompt in prompts)
    return time_to_score.Reward(task, config(), prompts)


def test_trls_reward_is_the_tasks_weighted_sum_of_the_truncated_text():
    answers = [" e2e4", " e2e4 q", " e7e5", "x"]
    actual = reward()(completions=answers * 4, completion_ids=[[1, 2]] * 16, row=sorted(list(range(4)) * 4))
    # legal 2 and parseable 0.5; parseable 0.5; malformed -0.5
    assert actual[:4] == pytest.approx([2.5, 2.5, 0.5, -0.5])


def test_prompts_in_another_order_than_ours_are_refused():
    one = reward()
    row = sorted(list(range(4)) * 4)
    one(completions=["x"] * 16, completion_ids=[[1]] * 16, row=row)
    with pytest.raises(NotTheSame, match=r"iteration 1: TRL asked prompts \[0, 0, 0\]\.\.\.; expected \[4, 4, 4\]"):
        one(completions=["x"] * 16, completion_ids=[[1]] * 16, row=row)


def run(scores, seconds) -> dict:
    points = [[10 * i, score] for i, score in enumerate(scores)]
    return {"points": points, "clock": seconds, "scores": [{"eval/x": score} for score in scores]}


def same_score(ours: dict, peer: dict) -> str:
    record = {"variants": {"jax_grpo": [], "TRL": []}, "runs": {"jax_grpo": {"0": ours}, "TRL": {"0": peer}}}
    return time_to_score.same_score(record)[-1]


def test_times_to_the_same_score_are_interpolated_at_the_lower_end():
    actual = same_score(run([0.0, 0.4, 0.8], [0, 10, 20]), run([0.0, 0.2, 0.6], [0, 100, 200]))
    assert actual == "| TRL | 0 | 0.6000 | 15.0 s (iteration 15.0) | 200.0 s (iteration 20.0) | 13.33 |"


def test_a_curve_that_only_falls_reaches_nothing():
    actual = same_score(run([0.5, 0.4], [0, 10]), run([0.5, 0.6], [0, 5]))
    assert actual == "| TRL | 0 | 0.4000 | not | not | - |"


def test_sides_that_do_not_begin_alike_are_not_compared():
    with pytest.raises(curves.RunFailed, match=r"before training eval/x is 0\.1 in our run and 0\.2 of TRL's weights"):
        time_to_score.require_same_start(run([0.1, 0.2], [0, 1]), run([0.2, 0.3], [0, 1]))


def test_seconds_are_those_of_iterations_alone():
    training = {"loss": 0.0, "time/iteration": 2.0, "reward/mean": 0.5, "entropy": 1.5}
    records = [
        {"iteration": 0, "eval/x": 0.1}, {"iteration": 0, **training}, {"iteration": 1, **training},
        {"iteration": 2, "eval/x": 0.3, "time/evaluation": 9.0},
    ]  # fmt: skip
    assert variants.measured(records, "eval/x") == {
        "points": [[0, 0.1], [2, 0.3]], "clock": [0.0, 4.0], "seconds": 4.0, "entropy": 1.5,
        "scores": [{"eval/x": 0.1}, {"eval/x": 0.3}],
    }  # fmt: skip


TINY = """
iterations: 3
run_dir: unused
model: {tokenizer: chess, num_layers: 2, num_heads: 2, hidden_size: 32, max_position_embeddings: 96}
task: {name: policy, prompt_style: best_move}
prompts: {per_iteration: 4, max_prompt_tokens: 80}
rollout: {group_size: 4, max_new_tokens: 4}
kl: {beta: 0.1}
update: {epochs: 2, learning_rate: 3.0e-3, schedule: cosine, warmup_steps: 1, micro_batches: auto}
evaluation: {positions: 64}
"""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--evaluation.positions", "0"], "evaluation.positions is 0, so there is no score to reach"),
        (["--every", "4"], "--every 4: expected 1 to the 3 iterations"),
        (["--seeds", "0,x"], "--seeds '0,x': expected whole numbers"),
        (["--kl.adaptive", "true"], "kl.adaptive True: TRL's beta is constant"),
        (["--score", "reward/mean"], "--score 'reward/mean': expected eval/greedy/"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(tmp_path, capsys, options, words):
    (tmp_path / "c.yaml").write_text(TINY)
    given = ["--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path), "--every", "1", *options]
    with pytest.raises(SystemExit):
        time_to_score.arguments_of(given)
    assert words in capsys.readouterr().err


@pytest.mark.slow  # five processes, of which one imports TRL
def test_both_sides_train_a_tiny_model_and_are_compared(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text(TINY)
    out = tmp_path / "out"
    options = ["--config", str(tmp_path / "c.yaml"), "--every", "2", "--out", str(out), "--peers", "TRL-positions"]
    time_to_score.main(options)
    record = json.loads((out / "time_to_score.json").read_text())
    ours, peer = (record["runs"][name]["0"] for name in ("jax_grpo", "TRL-positions"))
    for side in (ours, peer):
        assert [iteration for iteration, _ in side["points"]] == [0, 2, 3]
        assert side["clock"][0] == 0 and side["clock"] == sorted(side["clock"]) and side["clock"][-1] == side["seconds"]
        assert len(side["scores"]) == 3 and side["seconds"] > 0
    # Random weights write hardly any move: without the stop rule every completion would have 4 tokens.
    assert len(peer["rewards"]) == 3 and 1 <= peer["completion_lengths"][0] < 2
    assert peer["scores"][0] != peer["scores"][-1], "TRL's weights moved, and were the ones evaluated"
    assert (out / "time_to_score.png").stat().st_size > 10_000
    assert (out / "time_to_score.md").read_text().count("| TRL-positions |") == 2, "its scores, and when it had ours"
    capsys.readouterr()
    time_to_score.main(options)
    assert json.loads((out / "time_to_score.json").read_text())["runs"] == record["runs"], "not run again"
