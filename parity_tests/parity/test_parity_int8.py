"""Adapters on a base in int8 against `torch_ref`'s twin, and in float64 against `peft` on a model of the same rounded values.

The judge's matrices are rounded here, a third time, column by column in Python; both implementations read the files' own values.
"""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from both import show
from safetensors.numpy import load_file, save_file
from test_parity_adapters import WAYS, Folders, compare_step, config_of, judged, written
from transformers.pytorch_utils import Conv1D

from jax_grpo.chess.positions.sources import selfplay_positions
from jax_grpo.config import Config
from jax_grpo.config.files import ADAPTER_CONFIG
from jax_grpo.policy.adapters import divided
from jax_grpo.policy.peft_files import ADAPTER_FILE
from jax_grpo.run.checkpoints import content_hash
from torch_ref.adapters import trained, with_adapters
from torch_ref.compare import TOLERANCES, largest
from torch_ref.crafted import crafted_batch
from torch_ref.judge import CASES
from torch_ref.parity import STORAGE, one_step, whole_iterations
from torch_ref.parity_families import load_jax, precise, settings
from torch_ref.weights import load_hf

ALLOWED = TOLERANCES["float64"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return functools.partial(written, tmp_path_factory.mktemp("int8"))


def int8_config(case: str, folder: Folders, **model: Any) -> Config:
    return config_of(case, folder, adapter={"weights": str(folder.adapter), "base_dtype": "int8"}, **model)


def twin(config: Config, folder: Folders, dtype: str = "float64"):
    return with_adapters(load_hf(folder.base, dtype=STORAGE[dtype]), config.model, config.seed)


def on_levels(column: np.ndarray) -> np.ndarray:
    """The column's values on its own 255 levels, in float64."""
    wide = column.astype(np.float32)
    step = np.float32(max(abs(x) for x in wide)) / np.float32(127)
    return np.array([float(step) * round(float(x / step)) for x in wide])


@torch.no_grad()
def rounded_in_place(model):
    """transformers' model with what int8 and bfloat16 leave of its weights."""
    maps = {f"{name}.weight": module for name, module in model.named_modules() if name != "lm_head"}
    for name, parameter in model.named_parameters():
        module = maps.get(name)
        if isinstance(module, torch.nn.Linear | Conv1D):
            columns = parameter.T if isinstance(module, torch.nn.Linear) else parameter
            values = np.apply_along_axis(on_levels, 0, columns.numpy())
            columns.copy_(torch.from_numpy(values))
        else:
            parameter.copy_(parameter.bfloat16())
    return model


@pytest.mark.default_cases("gpt2", "gemma3_text")
@pytest.mark.parametrize("case", CASES)
def test_loss_kl_and_every_adapters_gradient_on_a_base_in_int8(folders, case):
    folder = folders(case)
    config, layout = int8_config(case, folder), WAYS[case][1]
    model = twin(config, folder)
    compare_step(config, layout, model, lambda: judged(folder, rounded_in_place))
    assert all("lora_" in name for name in trained(model)), "nothing of the base is trained"


def smaller(folder: Path, to: Path) -> Path:
    """The folder's adapters with a third of their size: 0.1, of which `TOLERANCES` were set for weights in bfloat16."""
    to.mkdir()
    stored = load_file(folder / ADAPTER_FILE)
    save_file({name: x / 3 for name, x in stored.items()}, to / ADAPTER_FILE, {"format": "pt"})
    shutil.copy(folder / ADAPTER_CONFIG, to)
    return to


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_in_float32_and_bfloat16_the_two_are_as_far_apart_as_their_roundings(folders, case, dtype, tmp_path):
    """The contract's tolerances of each precision, for its own reasons (see `TOLERANCES`): 8 bits stand exactly in bfloat16, so
    that a product with int8 has the roundings of one with matrices in bfloat16, and one more where it is scaled: two instead of
    one, forwards and backwards. Roundings are independent, so twice as many are sqrt(2) times as far off: this bounds a single
    tensor of gradients; the mean over the tensors may be half of that. What needs the room is one tensor whose terms cancel,
    llama's first v_proj: 5.5e-2, and 5.9e-2 where the product was rounded once; all others are below 4e-2. The percentile of
    the KL is one token's, no mean, and as far off as its log-probability, which has a bound of its own.
    """
    folder, allowed = folders(case), TOLERANCES[dtype]
    given = {"adapter": {"weights": str(smaller(folder.adapter, tmp_path / "a")), "base_dtype": "int8"}}
    config = settings(dtype, folder.base, lm_head={"implementation": WAYS[case][0]}, model=given)
    model = twin(config, folder, dtype)
    arrays = crafted_batch(model, shared_prompts=True)
    with precise(dtype):
        errors, _ = one_step(config.learning(), load_jax(config.model, config.seed), model, arrays)
    show("logits", {"logits": errors["logits"]}, allowed.logits * max(1, errors["largest_logit"] / 8))
    show("logp", {"logp": errors["logp"]}, allowed.logp)
    one_tokens = () if dtype == "float32" else ("kl/p95",)
    means = {name: error for name, error in errors["scalars"].items() if name not in one_tokens}
    show("loss and metrics", means, allowed.scalars)
    one_tensor = allowed.gradients * (1 if dtype == "float32" else 2**0.5)
    show("gradients", dict([largest(errors["gradients"])]), one_tensor)
    show("gradients", {"mean over tensors": float(np.mean(list(errors["gradients"].values())))}, one_tensor / 2)


@pytest.mark.parametrize("case", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
def test_both_trainers_take_the_same_iterations_on_a_base_in_int8(folders, case, tmp_path, monkeypatch):
    """The reference of the KL is the rounded base: the first KL is 0, and what sampled is what is trained."""
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"fen": position.fen}) for position in selfplay_positions(2, 0)[:40]]
    (tmp_path / "positions.jsonl").write_text("\n".join(rows))
    sizes = {"n_positions": 128} if case == "gpt2" else {"max_position_embeddings": 128}
    folder = folders(case, json.dumps(sizes | {"vocab_size": 640}))
    config = Config.model_validate(
        {
            "iterations": 2,
            "run_dir": "unused",
            "seed": 3,
            "model": {
                "weights": str(folder.base), "tokenizer": "chess", "compute_dtype": "float64", "param_dtype": "float64",
                "adapter": {"weights": str(folder.begun), "base_dtype": "int8"},
            },
            "task": {"name": "length", "length_cap": 6},
            "prompts": {"source": "positions.jsonl", "per_iteration": 4, "max_prompt_tokens": 80},
            "rollout": {"group_size": 4, "max_new_tokens": 6},
            "kl": {"beta": 0.1},
            "update": {"epochs": 2, "minibatches": 2, "micro_batches": 2, "learning_rate": 1e-2, "weight_decay": 0.1},
        }
    )  # fmt: skip
    with precise("float64"):
        actual = whole_iterations(config, tmp_path / "saved")
    assert actual["metrics"][1]["kl/mean"] > 1e-8, "the policy is no longer the reference"
    assert actual["metrics"][1]["logp_mismatch/max"] < ALLOWED.logp, "what sampled is what is trained"
    for errors in actual["iterations"]:
        show("metrics", errors, ALLOWED.scalars)
    show("change", actual["change"], ALLOWED.change or 0)


@pytest.mark.default_cases("qwen3")
@pytest.mark.parametrize("case", ["gpt2", "llama", "qwen3", "gemma3_text"])
def test_both_hold_the_same_whole_numbers_and_scales_and_all_else_in_bfloat16(folders, case):
    folder = folders(case)
    config = int8_config(case, folder)
    model = dict(twin(config, folder).named_buffers())
    with precise("float64"):
        loaded = load_jax(config.model, config.seed)
    flat = {"/".join(map(str, path)): leaf for path, leaf in divided(loaded.params)[1].flat_state()}
    for name, leaf in flat.items():
        dtype = {"kernel": jnp.int8, "kernel_scale": jnp.float32}.get(name.rpartition("/")[2], jnp.bfloat16)
        assert leaf.get_value().dtype == dtype, name
    ours = np.concatenate([np.asarray(x.get_value()).ravel() for n, x in sorted(flat.items()) if n.endswith("/kernel")])
    theirs = np.concatenate([x.numpy().ravel() for name, x in model.items() if name.endswith("q_OI")])
    assert ours.size == theirs.size == sum(x.size for x in map(np.asarray, model.values()) if x.dtype == np.int8)
    assert np.array_equal(np.bincount(ours.astype(int) + 127), np.bincount(theirs.astype(int) + 127))
    assert ours.min() == -127 or ours.max() == 127
    scales = [x.get_value() for name, x in flat.items() if name.endswith("/kernel_scale")]
    scales_of_twin = [x.numpy() for name, x in model.items() if name.endswith("scale_O")]
    assert np.array_equal(np.sort(np.concatenate(scales)), np.sort(np.concatenate(scales_of_twin)))
    assert content_hash(divided(loaded.params)[1]) == content_hash(divided(load_again(config).params)[1])


def load_again(config: Config):
    with jax.enable_x64(False):  # the same base in a run of another precision
        narrow = {"compute_dtype": "float32", "param_dtype": "float32"}
        return load_jax(config.model.model_copy(update=narrow), config.seed)
