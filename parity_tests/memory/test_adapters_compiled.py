"""Adapters compiled for an RTX 4090 that is not there: what a decode step writes, and what they and their base take."""

from pathlib import Path

import jax
import pytest
from test_adapters import FREE, copies_of_base, flat_kernels, written_in_loops
from test_memory import needs_plugin

from jax_grpo.config import load_config
from jax_grpo.memory.compile import compile_program
from jax_grpo.memory.hlo import Module
from jax_grpo.memory.programs import run_of, size
from jax_grpo.policy.adapters import divided

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMALL = """{"model_type": "llama", "vocab_size": 50257, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2,
"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "tie_word_embeddings": true}"""


def config_of(folder: Path, *overrides: str):
    """The exemplar's settings on a small Llama."""
    (folder / "config.json").write_text(SMALL)
    small = ["--model.architecture", str(folder / "config.json"), "--prompts.max_prompt_tokens", "64"]
    return load_config(
        str(CONFIGS / "llama31_8b_lora_4090.yaml"), [*small, "--rollout.max_new_tokens", "48", *overrides]
    )


@needs_plugin
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("rollout", ["--model.adapter.merged_rollouts", "false"]),
        ("rollout", ["--model.adapter.merged_rollouts", "true"]),
        ("update", ["--update.micro_batches", "2"]),
        ("rollout", ["--model.adapter.base_dtype", "int8"]),
        ("update", ["--model.adapter.base_dtype", "int8", "--update.micro_batches", "2"]),
    ],
    ids=["applied", "merged", "update", "int8", "int8 update"],
)
def test_no_step_of_a_loop_copies_a_matrix_of_the_base(name, overrides, tmp_path):
    run = run_of(config_of(tmp_path, *overrides))
    hlo = compile_program("rtx4090", run.program(name)).hlo
    assert len(written_in_loops(hlo)) > 20
    assert copies_of_base(hlo, run.program("rollout").arguments[0], (16, 32, 48)) == []


@needs_plugin
@pytest.mark.parametrize("name", ["rollout", "update"])
def test_int8_is_read_as_it_is_and_no_matrix_becomes_floats_outside_of_a_loop_either(name, tmp_path):
    run = run_of(config_of(tmp_path, "--model.adapter.base_dtype", "int8", "--update.micro_batches", "2"))
    hlo = compile_program("rtx4090", run.program(name)).hlo
    module, shapes = Module(hlo), {x.shape for _, x in flat_kernels(run.program("rollout").arguments[0])}
    entry = [one for one in module.instructions.values() if one.computation == module.entry]
    given = [array for one in entry if one.opcode == "parameter" for array in one.arrays if array.dtype == "s8"]
    assert len(given) == 8 and {array.sizes for array in given} == shapes, "two blocks of four"
    either = shapes | {sizes[::-1] for sizes in shapes}
    within = {one.called[0] for one in module.instructions.values() if one.opcode == "fusion"}  # writes nothing itself
    made = [
        (one.opcode, array)
        for one in module.instructions.values()
        if one.opcode not in FREE and one.computation not in within
        for array in one.arrays
        if array.sizes in either and array.dtype in ("bf16", "f32", "f16")
    ]
    assert made == []


@pytest.mark.slow
def test_the_report_knows_the_base_and_what_is_trained(tmp_path):
    run = run_of(config_of(tmp_path))
    adapters, base = divided(run.program("rollout").arguments[0])
    assert run.resident["base"] == size(base) == 2 * sum(x.size for x in jax.tree.leaves(base))
    assert run.resident["parameters"] == size(adapters) == run.resident["reference"]
    assert run.resident["moments"] == 2 * size(adapters) + 4
    for program in run.programs:
        assert "base" in program.holds and run.beside(program) < size(base)
        arguments = sum(size(tree) for tree in program.arguments)
        assert arguments > sum(run.resident[name] for name in program.holds)
    whole = run_of(config_of(tmp_path, "--model.adapter", "null"))
    assert "base" not in whole.resident
    small = run_of(config_of(tmp_path, "--model.adapter.base_dtype", "int8")).resident
    kernels = [x.size for _, x in flat_kernels(base)]
    columns = sum(x.shape[1] for _, x in flat_kernels(base))
    assert small["base"] == run.resident["base"] - sum(kernels) + 4 * columns, (
        "a byte less of each number, and the scales"
    )
    assert small["parameters"] == run.resident["parameters"]
