"""Every command takes the same names for a model: a packaged one, a run's folder, a Hugging Face folder, a checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import TINY, config, tiny_model

from jax_grpo import replay
from jax_grpo.chess.evaluate import __main__ as evaluate
from jax_grpo.chess.play import match, uci
from jax_grpo.chess.play.player import Player
from jax_grpo.config import check_files
from jax_grpo.config.files import require_weights
from jax_grpo.config.loading import ConfigError, load_yaml
from jax_grpo.config.sections import CheckpointConfig
from jax_grpo.export import __main__ as export
from jax_grpo.memory.programs import run_of
from jax_grpo.model.architecture import Architecture
from jax_grpo.model.tokenizer import Tokenizer, TokenizerError
from jax_grpo.model.weights import load_hf, save_hf
from jax_grpo.policy.named import load_named
from jax_grpo.run.checkpoints import Checkpoints, content_hash
from jax_grpo.sft import __main__ as sft
from jax_grpo.trainer import Trainer
from torch_ref import replay as torch_replay
from torch_ref import train as torch_train

CHESS = Tokenizer.load("chess")
SIZES = Architecture(CHESS.vocab_size, num_layers=1, num_heads=2, hidden_size=16, max_position_embeddings=256)


def params_of(sizes: Architecture):
    from flax import nnx

    from jax_grpo.model.decoder import Decoder

    return nnx.state(Decoder(sizes, rngs=nnx.Rngs(0)), nnx.Param)


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> dict[str, str]:
    """The same weights as a finished run's folder, its exported weights, and one of its checkpoints."""
    run = tmp_path_factory.mktemp("runs") / "x"
    params = params_of(SIZES)
    settings = config(run_dir=str(run), model={"tokenizer": "chess"})
    save_hf(run / "weights", SIZES, params, CHESS)
    (run / "config.yaml").write_text(settings.resolved_yaml())
    manifest = {"architecture": SIZES.__dict__, "config": settings.model_dump()}
    with Checkpoints(run / "checkpoints", CheckpointConfig(keep_best=0)) as checkpoints:
        checkpoints.save(7, {"params": params}, manifest, {})
    return {"run": str(run), "folder": str(run / "weights"), "checkpoint": str(run / "checkpoints" / "000007")}


KINDS = ("run", "folder", "checkpoint")


@pytest.mark.parametrize("kind", KINDS)
def test_evaluate_uci_match_and_export_find_the_same_weights_and_tokenizer(names, kind, tmp_path):
    expected, name = content_hash(load_hf(names["folder"])[1]), names[kind]
    policy = load_named(name)
    assert content_hash(policy.params) == expected and policy.tokenizer.name == "chess"
    player = Player(name)
    assert content_hash(player.policy.params) == expected and player.policy.tokenizer.name == "chess"
    assert export.export_hf(name, tmp_path / "out") and content_hash(load_hf(tmp_path / "out")[1]) == expected
    with pytest.raises(SystemExit, match="--engine"):  # refused by its next option, and not by the weights
        match.main(["--weights", name, "--games", "1", "--engine", str(tmp_path / "no engine")])
    arguments = ["--weights", name, "--out", str(tmp_path / "e"), "--suite", "policy", "--data", str(tmp_path / "none")]
    with pytest.raises(SystemExit, match="none"):
        evaluate.main(arguments)


@pytest.mark.slow
def test_the_uci_engine_answers_with_a_run_s_weights(names):
    command = [sys.executable, "-m", "jax_grpo.uci", "--weights", names["run"]]
    done = subprocess.run(command, input="position startpos\ngo\n", capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "bestmove" in done.stdout, done.stdout + done.stderr[-2000:]


@pytest.mark.default_cases("checkpoint")
@pytest.mark.parametrize("kind", KINDS)
def test_a_config_takes_them_too_training_memory_and_the_reference(names, kind, tmp_path):
    model = {"weights": names[kind], "tokenizer": "chess", "num_layers": 5}  # sizes are the weights' own
    settings = config(
        run_dir=str(tmp_path),
        model=model,
        task={"name": "length"},
        prompts={"source": "selfplay:1", "max_prompt_tokens": 80},
    )
    check_files(settings)
    expected = content_hash(load_hf(names["folder"])[1])
    assert content_hash(Trainer(settings).state.params) == expected
    run = run_of(settings)
    assert run.architecture == SIZES and run.assumed is None
    if kind != "checkpoint":  # torch_ref reads Hugging Face folders only
        theirs = torch_train.Trainer(settings, torch_train.choices.Options()).state.model
        ours = np.asarray(load_hf(names["folder"])[1]["wte"]["embedding"][...])[: SIZES.vocab_size]
        assert np.array_equal(dict(theirs.named_parameters())["transformer.wte.weight"].detach().numpy(), ours)


@pytest.mark.default_cases("folder")
@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_start_takes_them_too(names, kind, tmp_path):
    file = tmp_path / "sft.yaml"
    rows = {"mixture": {"best_move": 1.0}, "rows": 4, "learning_rate": 1e-30}
    file.write_text(
        json.dumps(
            {"out": str(tmp_path / "out"), "stages": [rows], "weights": names[kind], "batch_size": 4, "weight_decay": 0}
        )
    )
    final = sft.train(load_yaml(sft.SFTConfig, str(file), []))
    trained, given = load_hf(final)[1], load_hf(names["folder"])[1]
    assert all(map(np.allclose, jax.tree.leaves(trained), jax.tree.leaves(given)))


def batch_file(folder: Path, vocabulary: int = TINY.vocab_size) -> str:
    rng = np.random.default_rng(0)
    ones = np.ones((4, 12), np.int32)
    mask = ones * (np.arange(12) >= 8)
    ids = rng.integers(0, vocabulary, (4, 12))
    advantages = np.array([1.0, -1.0, 0.5, -0.5])
    np.savez(folder / "b.npz", input_ids=ids, attention_mask=ones, completion_mask=mask, advantages=advantages)
    return str(folder / "b.npz")


@pytest.mark.slow_cases("gpt2")
@pytest.mark.parametrize("tokenizer", ["gpt2", "chess"])
def test_replay_asks_for_no_tokenizer(tokenizer, tmp_path):
    """A batch is token ids: a vocabulary of 131, which no tokenizer has, and a config that names one with more."""
    save_hf(tmp_path / "w", TINY, tiny_model()[1])
    settings = config(model={"tokenizer": tokenizer, "vocab_size": 131})
    (tmp_path / "c.yaml").write_text(settings.resolved_yaml())
    common = ["--config", str(tmp_path / "c.yaml"), "--weights", str(tmp_path / "w"), "--batch", batch_file(tmp_path)]
    for program, out in ((replay, "o.npz"), (torch_replay, "t.npz")):
        program.main([*common, "--out", str(tmp_path / out)])
    ours, theirs = (np.load(tmp_path / name) for name in ("o.npz", "t.npz"))
    # tolerance: DESIGN 8's for float32 scalars of one step
    assert float(ours["loss"]) == pytest.approx(float(theirs["loss"]), rel=1e-4, abs=1e-6)
    assert float(ours["grad_norm"]) == pytest.approx(float(theirs["grad_norm"]), rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_replay_takes_them_too(names, kind, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(config().resolved_yaml())
    batch = batch_file(tmp_path, SIZES.vocab_size)
    common = ["--config", str(file), "--weights", names[kind], "--batch", batch]
    for program in (replay, torch_replay)[: 1 if kind == "checkpoint" else 2]:
        program.main([*common, "--out", str(tmp_path / "o.npz")])
        assert np.isfinite(np.load(tmp_path / "o.npz")["loss"])


def test_replay_names_ids_that_the_model_has_not(tmp_path):
    """JAX takes the nearest row of the embedding for an id beyond it, and says nothing."""
    save_hf(tmp_path / "w", TINY, tiny_model()[1])
    (tmp_path / "c.yaml").write_text(config().resolved_yaml())
    arguments = ["--config", str(tmp_path / "c.yaml"), "--weights", str(tmp_path / "w"), "--out", str(tmp_path / "o")]
    for program in (replay, torch_replay):
        with pytest.raises(SystemExit, match=r"input_ids .* 0 to 130"):
            program.main([*arguments, "--batch", batch_file(tmp_path, 5000)])


def test_a_model_of_another_vocabulary_without_a_tokenizer_is_never_taken_for_gpt2(tmp_path):
    save_hf(tmp_path, Architecture(60000, 1, 2, 16, 256), params_of(Architecture(60000, 1, 2, 16, 256)))
    for load in (load_named, Player):
        with pytest.raises(TokenizerError, match=r"has no tokenizer .* vocabulary of 60000 is not GPT-2's 50257"):
            load(str(tmp_path))


def test_an_unfinished_run_is_told_what_to_do_by_every_command(names, tmp_path):
    (tmp_path / "config.yaml").write_text("")
    message = r"a run that has not exported its weights .* --resume auto"
    with pytest.raises(ConfigError, match=message):
        require_weights(str(tmp_path))
    with pytest.raises(SystemExit, match=message):
        uci.main(["--weights", str(tmp_path)])
    with pytest.raises(SystemExit, match=message):
        match.main(["--weights", str(tmp_path)])
    with pytest.raises(ConfigError, match=message):
        check_files(config(model={"weights": str(tmp_path)}))
