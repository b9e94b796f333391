"""Whole runs of adapters: what they save, that they continue bit for bit, and where their weights can go from there."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from conftest import TINY
from flax import nnx
from safetensors.numpy import load_file
from short_runs import EPISODES, cut_and_whole, letters, lines_without_times, write_inputs

import jax_grpo
from jax_grpo.bench.problems import sizes_of
from jax_grpo.config import Config, ConfigError, load_config
from jax_grpo.export import __main__ as export
from jax_grpo.model.decoder import Decoder
from jax_grpo.model.tokenizer import Tokenizer
from jax_grpo.model.weights import load_hf, save_hf
from jax_grpo.policy.adapters import divided
from jax_grpo.policy.named import load_named, load_policy
from jax_grpo.run.checkpoints import content_hash, load
from jax_grpo.run.files import CheckpointError
from jax_grpo.train import train
from jax_grpo.trainer import Trainer
from torch_ref.options import Options
from torch_ref.parity import main as parity_main
from torch_ref.train import train as torch_train

RANK = 2


def base_folder(folder: Path, seed: int = 0, positions: int = 96) -> Path:
    """A small random GPT-2 over the vocabulary of chess."""
    if not (base := folder / f"base{seed}").exists():
        tokenizer = Tokenizer.load("chess")
        sizes = dataclasses.replace(TINY, vocab_size=tokenizer.vocab_size, max_position_embeddings=positions)
        save_hf(base, sizes, nnx.split(Decoder(sizes, rngs=nnx.Rngs(seed)), nnx.Param)[1], tokenizer)
    return base


def settings(folder: Path, run: str = "run", **changes) -> Config:
    model = {"weights": str(base_folder(folder)), "adapter": {"rank": RANK, "alpha": 4.0}} | changes.pop("model", {})
    given = {"run_dir": str(folder / run), "kl": {"beta": 0.1}, "update": {"learning_rate": 3e-2}} | changes
    return letters(folder, model=model, **given)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return folder, train(settings(folder, evaluation={"positions": 2}, prompts={"split": "train"}))


def test_checkpoints_and_weights_are_of_the_adapters_size(finished):
    folder, run = finished
    saved = load(run / "checkpoints" / "000004")
    adapters = sum(x.size for name, x in saved.arrays.items() if name.startswith("params/"))
    width, inner, layers = 32, 128, 2
    assert adapters == layers * RANK * (width + 3 * width + width + width + width + inner + inner + width)
    assert sum(x.size for name, x in saved.arrays.items() if name.startswith("opt_state/")) <= 2 * adapters + 2
    assert saved.content["identity"]["base"] and not any("kernel" in name for name in saved.arrays)
    whole = (folder / "base0" / "model.safetensors").stat().st_size
    assert (run / "weights" / "adapter_model.safetensors").stat().st_size < whole / 4
    assert not (run / "weights" / "model.safetensors").exists()
    records = lines_without_times(run)
    assert records[0]["kl/mean"] < records[-1]["kl/mean"] if "kl/mean" in records[-1] else records
    assert any(record.get("grad_norm", 0) > 1e-3 for record in records)


@pytest.mark.slow
def test_the_finished_run_is_a_model_for_every_reader(finished):
    """A named policy, peft beside it, the export of both kinds, the tokenizer, and each checkpoint."""
    folder, run = finished
    policy = jax_grpo.load_named(str(run))
    base = load_hf(folder / "base0")[1]
    assert divided(policy.params)[1] is None and content_hash(policy.params) != content_hash(base)
    assert jax.tree.structure(policy.params) == jax.tree.structure(base)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "base0").eval()
    theirs = peft.PeftModel.from_pretrained(plain, run / "weights").eval()
    ids = np.arange(5, 17).reshape(2, 6)
    hidden = nnx.merge(policy.graphdef, policy.params)(jnp.asarray(ids), jnp.ones((2, 6), jnp.int32))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(ids)).logits.numpy()
    actual = np.asarray(hidden @ policy.params["wte"]["embedding"][...].T)[..., : expected.shape[-1]]
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    export.main(["--weights", str(run), "--out", str(folder / "whole")])
    assert content_hash(load_hf(folder / "whole")[1]) == content_hash(policy.params)
    last = run / "checkpoints" / "000004"
    assert content_hash(load_named(str(last)).params) == content_hash(policy.params)
    for name, source in (("peft", run), ("of_checkpoint", last)):
        export.main(["--weights", str(source), "--out", str(folder / name), "--format", "peft"])
        assert content_hash(load_named(str(folder / name)).params) == content_hash(policy.params)
    with pytest.raises(SystemExit, match="has no adapters: all of its parameters were trained; give --format hf"):
        export.main(["--weights", "packaged:rook-small", "--out", str(folder / "none"), "--format", "peft"])
    assert policy.generate("P", max_new_tokens=3) is not None


def test_adapters_are_continued_as_a_new_runs_start_and_are_its_reference(finished):
    folder, run = finished
    trainer = Trainer(settings(folder, model={"adapter": {"weights": str(run)}}))
    expected = load(run / "checkpoints" / "000004").arrays
    for name, leaf in nnx.to_flat_state(trainer.state.params):
        path = "params/" + "/".join(map(str, name))
        assert np.array_equal(leaf.get_value(), expected[path]), path
    assert content_hash(trainer.reference) == content_hash(trainer.weights)
    trainer.task.close()


@pytest.mark.slow
@pytest.mark.parametrize("base", ["parameters", "int8"])
def test_a_run_that_died_continues_bit_for_bit(base, tmp_path, monkeypatch):
    model = {"adapter": {"rank": RANK, "alpha": 4.0, "base_dtype": base}}
    cut, whole = cut_and_whole(lambda run: settings(tmp_path, run, model=model), monkeypatch)
    states = [load(path / "checkpoints" / "000004") for path in (cut, whole)]
    assert states[0].arrays.keys() == states[1].arrays.keys()
    for name, array in states[1].arrays.items():
        assert np.array_equal(array, states[0].arrays[name]), name
    written = [load_file(path / "weights" / "adapter_model.safetensors") for path in (cut, whole)]
    assert written[0].keys() == written[1].keys()
    assert all(np.array_equal(x, written[0][name]) for name, x in written[1].items())
    assert lines_without_times(cut) == lines_without_times(whole)


def test_a_run_whose_base_or_adapter_is_another_is_not_continued(tmp_path):
    run = train(settings(tmp_path, iterations=1))
    longer = {"iterations": 2}
    with pytest.raises(CheckpointError, match=r"model.weights holds something else .*: its base is"):
        train(settings(tmp_path, **longer, model={"weights": str(base_folder(tmp_path, 1))}), resume="auto")
    for adapter, message in (
        ({"rank": 3, "alpha": 4.0}, "model.adapter.rank is 3, but .* was made with 2: the adapters have its size"),
        ({"rank": RANK, "alpha": 8.0}, "model.adapter.alpha is 8.0, but"),
        (None, "model.adapter is None, but .* the saved parameters are adapters, or all there are"),
    ):
        with pytest.raises(CheckpointError, match=message):
            train(settings(tmp_path, **longer, model={"adapter": adapter}), resume="auto")
    base = base_folder(tmp_path) / "model.safetensors"
    other = base_folder(tmp_path, 1) / "model.safetensors"
    base.write_bytes(other.read_bytes())
    for name in (str(run), str(run / "checkpoints" / "000001")):
        with pytest.raises(ValueError, match=r"trained on other weights|hold something else now"):
            load_named(name)


@pytest.mark.slow
def test_a_run_on_int8_is_what_it_trained_wherever_it_goes_and_is_continued_on_int8_alone(tmp_path):
    """Readers and `--format hf` add the adapters into what int8 holds; PEFT's folder stands beside the base's own files."""
    on_int8 = {"adapter": {"rank": RANK, "alpha": 4.0, "base_dtype": "int8"}}
    run = train(settings(tmp_path, iterations=1, model=on_int8))
    trainer = Trainer(settings(tmp_path, model={"adapter": {"weights": str(run), "base_dtype": "int8"}}))
    ids, mask = jnp.arange(5, 17).reshape(2, 6), jnp.ones((2, 6), jnp.int32)
    trained = nnx.merge(trainer.policy.graphdef, trainer.weights)(ids, mask)
    trainer.task.close()
    policy = load_named(str(run))
    np.testing.assert_allclose(nnx.merge(policy.graphdef, policy.params)(ids, mask), trained, atol=2e-5)
    last = run / "checkpoints" / "000001"
    assert content_hash(load_named(str(last)).params) == content_hash(policy.params)
    assert not any("kernel" in name for name in load(last).arrays), "adapters alone"
    export.main(["--weights", str(run), "--out", str(tmp_path / "whole")])
    assert content_hash(load_hf(tmp_path / "whole")[1]) == content_hash(policy.params)
    export.main(["--weights", str(last), "--out", str(tmp_path / "adapters"), "--format", "peft"])
    assert content_hash(load_named(str(tmp_path / "adapters")).params) == content_hash(policy.params)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base0").eval()
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path / "adapters").merge_and_unload()
    own = policy.params["h"][0]["mlp"]["c_fc"]["kernel"][...]
    gap = np.abs(theirs.transformer.h[0].mlp.c_fc.weight.detach().numpy() - own)
    base = load_hf(tmp_path / "base0")[1]["h"][0]["mlp"]["c_fc"]["kernel"][...]
    half_a_level = np.abs(base).max(0) / 254
    assert gap.max() > 0 and np.all(gap <= half_a_level * 1.001), (
        "merged into the files' own weights, it is the other model"
    )
    with pytest.raises(
        CheckpointError, match=r"model.adapter.base_dtype is 'parameters', but .* with 'int8': int8 rounds"
    ):
        train(settings(tmp_path, iterations=2), resume="auto")


def test_a_folder_without_adapters_does_not_begin_any(tmp_path):
    base = base_folder(tmp_path)
    with pytest.raises(
        ConfigError, match=r"model.adapter.weights is .*, and .* has no adapter_config.json of adapters alone; expected"
    ):
        load_policy(settings(tmp_path, model={"adapter": {"weights": str(base)}}).model, 0, 1)
    file = tmp_path / "a" / "adapter_config.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["c_fc"]}))
    with pytest.raises(ConfigError, match="base_model_name_or_path is None; expected the folder of the weights"):
        load_named(str(tmp_path / "a"), tokenizer="chess")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": {"refill": {"rounds": 2, "ahead": True}}, "prompts": {"curriculum": {"passed": 0.5}}},
        {
            "kl": {"beta": 0.1, "reference_every": 2, "adaptive": True},
            "update": {"micro_batches": 2, "minibatches": 2},
        },
        {"objective": {"name": "kl_cov", "cov_share": 0.2}, "lm_head": {"implementation": "chunked"}},
        {"model": {"adapter": {"merged_rollouts": True, "targets": ["c_fc"], "rank_stabilised": True}, "remat": True}},
        {"update": {"micro_batches": "auto", "offload_optimizer": True}, "model": {"decode_attention": "pallas"}},
        {
            "update": {"micro_batches": "auto"},
            "model": {"decode_attention": "pallas", "compute_dtype": "bfloat16", "adapter": {"base_dtype": "int8"}},
        },
    ],
    ids=["refill", "moving reference", "kl_cov", "merged", "auto", "int8"],
)
def test_settings_beside_adapters_train(changes, tmp_path):
    run = train(settings(tmp_path, iterations=2, **changes))
    records = [record for record in lines_without_times(run) if "loss" in record]
    assert len(records) == 2 and all(math.isfinite(record["loss"]) for record in records)
    assert any(record["grad_norm"] > 0 for record in records)


@pytest.mark.slow
def test_episodes_are_played_and_trained_on_with_adapters(tmp_path):
    write_inputs(tmp_path)
    model = f"{{weights: {base_folder(tmp_path, positions=208)}, adapter: {{rank: {RANK}}}}}"
    words = ["--run_dir", str(tmp_path / "run"), "--iterations", "2", "--record_batches", "0", "--model", model]
    run = train(load_config(str(tmp_path / "c.yaml"), [*words, *EPISODES["guess"]]))
    records = [record for record in lines_without_times(run) if "loss" in record]
    assert len(records) == 2 and records[1]["kl/mean"] > records[0]["kl/mean"] >= 0
    # What sampled a later turn's tokens is what scores them, in float32.
    assert all(record["logp_mismatch/max"] < 1e-4 for record in records)
    assert records[0]["grad_norm"] > 0


def test_the_reference_trains_adapters_from_the_same_config_and_writes_what_everybody_reads(tmp_path):
    config = settings(tmp_path, "torch", iterations=1)
    run = torch_train(config, Options())
    policy, fresh = load_named(str(run)), load_hf(tmp_path / "base0")[1]
    assert content_hash(policy.params) != content_hash(fresh)
    again = Trainer(settings(tmp_path, model={"adapter": {"weights": str(run)}}))
    assert any(np.any(leaf) for leaf in jax.tree.leaves(again.state.params))
    again.task.close()


def test_what_looks_at_all_parameters_refuses_a_config_of_adapters(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(settings(tmp_path).resolved_yaml())
    for command in (
        lambda: sizes_of(str(file)),
        lambda: parity_main(["--config", str(file), "--out", str(tmp_path / "out")]),
    ):
        with pytest.raises((ConfigError, SystemExit), match=r"is of all parameters, and the config has model\.adapter"):
            command()
