"""The memory report of several devices: bytes of each of them, and what they send to each other."""

from pathlib import Path

import pytest
from compiled_reports import CONFIGS, compiled_report, needs_plugin

from jax_grpo.memory.__main__ import main
from jax_grpo.memory.traffic import Moved, collectives

CONFIG = """
iterations: 2
run_dir: unused
model: {tokenizer: chess, num_layers: 2, num_heads: 4, hidden_size: 64, max_position_embeddings: 208}
task: {name: policy, prompt_style: best_move}
prompts: {per_iteration: 8, max_prompt_tokens: 80}
rollout: {group_size: 4, max_new_tokens: 4}
update: {learning_rate: 1.0e-3, micro_batches: 2}
lm_head: {implementation: chunked}
"""
# Two data, two fsdp, two tensor; devices are counted in that order.
MESH = {"data": 2, "fsdp": 2, "tensor": 2}
HLO = """HloModule jit_update, entry_computation_layout={()->f32[]}

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %gather = f32[8,4]{1,0} all-gather(f32[4,4]{1,0} %x), channel_id=1, replica_groups={{0,2},{1,3},{4,6},{5,7}}, dimensions={0}
  %scatter = f32[4,4]{1,0} reduce-scatter(f32[8,4]{1,0} %gather), replica_groups=[4,2]<=[2,2,2]T(0,2,1), dimensions={0}
}

%decode (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %neighbours = f32[6]{0} collective-permute(f32[6]{0} %y), channel_id=3, source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
}

ENTRY %main (a: f32[8,4]) -> f32[] {
  %loop = (s32[], f32[8,4]) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %open = (s32[], f32[8,4]) while(%t), condition=%c, body=%decode
  %sum = f32[10]{0} all-reduce(f32[10]{0} %g), channel_id=4, replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
  %start = (f32[4,4]{1,0}, bf16[2]{0}, f32[8,4]{1,0}, bf16[4]{0}) all-gather-start(%x, %z), replica_groups=[4,2]<=[8]
  %done = (f32[8,4]{1,0}, bf16[4]{0}) all-gather-done(%start)
}
"""


def test_what_is_moved_is_counted_by_axis_in_loops_as_often_as_they_run():
    assert collectives(HLO, MESH) == [
        Moved("fsdp", "all-gather", 3, 3 * 8 * 4 * 4 // 2, False),
        Moved("fsdp", "reduce-scatter", 3, 3 * 4 * 4 * 4, False),
        Moved("tensor", "all-gather", 1, (8 * 4 * 4 + 4 * 2) // 2, False),
        Moved("data and fsdp", "all-reduce", 1, 10 * 4 * 2 * 3 // 4, False),
        Moved("tensor", "collective-permute", 1, 6 * 4, True),
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mesh.model", "2"], "command line: unknown key mesh.model"),
        (["--mesh.fsdp", "2", "--search"], "--search, --launches and --measure are of one device, and the mesh is of 2"),
        (["--mesh.tensor", "3"], "mesh.tensor 3 must divide"),
    ],
)  # fmt: skip
def test_a_mesh_that_cannot_be_is_one_sentence(words, message, tmp_path):
    (tmp_path / "c.yaml").write_text(CONFIG)
    with pytest.raises(SystemExit, match=message):
        main(["--config", str(tmp_path / "c.yaml"), "--target", "cpu", *words])


def report(folder: Path, target: str, *words: str) -> dict:
    """Of the tiny run, by the command line."""
    (folder / "c.yaml").write_text(CONFIG)
    return compiled_report(folder / "c.yaml", folder, *words, target=target)


TARGETS = ["cpu", pytest.param("rtx4090", marks=needs_plugin)]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_figures_are_of_each_device(target, tmp_path):
    """Under fsdp each has a quarter of parameters, moments and reference, gathers the rest, and scatters gradients."""
    actual = report(tmp_path, target, "--mesh.fsdp", "4")
    whole = actual["parameters"] * 4  # bytes: float32
    assert actual["resident"]["parameters"] == actual["resident"]["reference"] == whole // 4
    assert 0 <= actual["resident"]["moments"] - 2 * whole // 4 < 64, "and counts"
    update = next(program for program in actual["programs"] if program["name"] == "update")
    assert sum(update["parts"].values()) == update["total"]
    held = actual["resident"]["parameters"] + actual["resident"]["moments"]
    assert held <= update["arguments"] < held + 20_000, "and its share of the batch"
    moved = {(each["axis"], each["opcode"]): each["bytes"] for each in update["moved"]}
    assert set(axis for axis, _ in moved) == {"fsdp"}
    # A GPU's program gathers three quarters of every parameter for each of the two micro-batches; XLA:CPU once, before the loop.
    gathered, scattered = moved["fsdp", "all-gather"], moved.get(("fsdp", "reduce-scatter"), 0)
    print(f"{target}: {gathered} bytes gathered, {scattered} scattered; parameters {whole}")
    times = 1 if target == "cpu" else 2
    assert times * whole * 3 / 4 <= gathered < 1.01 * times * whole * 3 / 4, "and little else"
    assert scattered == 2 * whole * 3 / 4


@pytest.mark.slow
@needs_plugin
def test_weights_are_gathered_in_the_dtype_they_are_read_in(tmp_path):
    """The linear maps' in bfloat16, by the update and by the reference, whose masters are in float32."""
    actual = report(tmp_path, "rtx4090", "--mesh.fsdp", "4", "--model.compute_dtype", "bfloat16")
    kernels = 12 * 64 * 64 * 2  # of two blocks
    others = actual["parameters"] - kernels
    for name in ("reference", "update"):
        program = next(program for program in actual["programs"] if program["name"] == name)
        (gathered,) = (each["bytes"] for each in program["moved"] if each["opcode"] == "all-gather")
        most = 2 * 3 / 4 * (2 * kernels + 4 * others)
        print(f"{name}: {gathered} bytes gathered in two micro-batches, of {most:.0f} at most")
        assert 2 * 3 / 4 * 2 * kernels < gathered < 1.02 * most


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"data": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_an_episodes_caches_are_written_in_place_and_cut_over_the_mesh(target, mesh, tmp_path):
    """What goes from turn to turn: keys and values of prompts, of earlier turns and of the newest, and which of them count."""
    words = [word for axis, n in mesh.items() for word in (f"--mesh.{axis}", str(n))]
    actual = compiled_report(CONFIGS / "guess.yaml", tmp_path, *words, target=target)
    later = next(program for program in actual["programs"] if program["name"] == "rollout/later turns")
    prompts, group, layers, width, columns = 64 // mesh.get("data", 1), 8, 2, 64 // mesh.get("tensor", 1), 2 * (2 + 8)
    retained = prompts * (16 + group * (columns + 2 - 1)) * 2 * layers * width * 4 + prompts * group * columns
    print(f"{target}, {mesh}: {later['aliased']} bytes in place of {retained}")
    assert retained <= later["aliased"] < retained + 4096, "in blocks of 64 bytes"
    assert sum(later["parts"].values()) == later["total"]
