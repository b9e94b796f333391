"""The memory report: what the dumps say is read as it stands, and the configs named for a 4090 fit on one.

The compiled tests are skipped without JAX's CUDA plugin, which holds the compiler; no GPU is used.
"""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_reports import CONFIGS, PLUGIN, compiled_report, needs_plugin
from conftest import config, shapes_given

from jax_grpo.config import load_config
from jax_grpo.evaluate import during_training
from jax_grpo.memory.__main__ import main
from jax_grpo.memory.compile import compile_program, device, program_bytes
from jax_grpo.memory.dumps import Live, at_peak
from jax_grpo.memory.fit import bytes_of, largest
from jax_grpo.memory.measured import fresh
from jax_grpo.memory.programs import GPT2_SMALL, _tokenizer_and_sizes, run_of
from jax_grpo.memory.report import _cache_sizes, bytes_by_part
from jax_grpo.model.weights import abstract_params
from jax_grpo.prompts.dataset import heldout_rows
from jax_grpo.system.devices import UnknownTarget
from jax_grpo.train import make_evaluator
from jax_grpo.trainer import Trainer

SPARE = 2e9  # bytes that a driver, an allocator and a screen may take


def tiny(**sections):
    """A run of the length task on a tiny model."""
    model = {"tokenizer": "chess", "max_position_embeddings": 128}
    return config(**({"model": model, "task": {"name": "length"}, "prompts": {"max_prompt_tokens": 80}} | sections))


def test_the_arguments_are_those_that_the_trainer_gives(tmp_path):
    settings = tiny(run_dir=str(tmp_path), update={"minibatches": 2})
    trainer = Trainer(settings)
    seen = shapes_given(trainer, "generate", "score", "update")
    trainer.iterate(0)
    planned = {
        program.name: [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(program.arguments)]
        for program in run_of(settings).programs
    }
    assert planned["rollout"] == seen["generate"][0]
    assert [planned["score"], planned["reference"]] == seen["score"]
    assert planned["update"] == seen["update"][0]


@pytest.mark.slow
def test_the_evaluations_programs_are_those_that_the_evaluator_runs(tmp_path):
    settings = tiny(run_dir=str(tmp_path), evaluation={"positions": 3})
    trainer, seen = Trainer(settings), {}
    evaluator = make_evaluator(trainer, heldout_rows(settings, trainer.positions, trainer.task.read))
    assert evaluator is not None
    for mode, program in evaluator._generate.items():

        def spy(*arguments, mode=mode, program=program):
            seen[mode] = [(np.shape(x), jnp.asarray(x).dtype.name) for x in jax.tree.leaves(arguments)]
            return program(*arguments)

        evaluator._generate[mode] = spy
    evaluator(trainer.state.params)
    planned = {
        program.name: [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(program.arguments)]
        for program in run_of(settings).programs
    }
    assert {f"evaluation/{mode}": shapes for mode, shapes in seen.items()} == {
        name: shapes for name, shapes in planned.items() if name.startswith("evaluation/")
    }
    assert len(seen) == 2 and not any(name.startswith("evaluation/") for name in names_of(tiny()))


def names_of(settings) -> list[str]:
    return [program.name for program in run_of(settings).programs]


@pytest.mark.slow
def test_a_small_run_needs_what_its_evaluation_needs_and_that_grows_with_its_batch_and_cap(monkeypatch):
    """64 held-out prompts at a time beside two of training: the evaluation is the largest program by far."""

    def needs(cap: int = 6) -> int:
        small = {"prompts": {"per_iteration": 2, "max_prompt_tokens": 80}, "evaluation": {"positions": 3}}
        rollout = {"group_size": 2, "max_new_tokens": cap}
        return bytes_of(tiny(**small, rollout=rollout, kl={"beta": 0.1}), "evaluation/sampled", "cpu")

    plain, longer = needs(), needs(cap=24)
    run = run_of(tiny(prompts={"per_iteration": 2, "max_prompt_tokens": 80}, rollout={"group_size": 2}))
    others = {program.name: program_bytes("cpu", program) for program in run.programs}
    monkeypatch.setattr(during_training, "BATCH", 128)
    wider = needs()
    print(
        f"evaluation {plain / 1e6:.2f} MB, cap 24: {longer / 1e6:.2f}, 128 prompts: {wider / 1e6:.2f}; others {others}"
    )
    assert plain > max(others.values()), "its parameters, moments and reference included"
    # four times the completions' keys and values; twice those of the prompts too: 2 layers, 2 arrays, 32 wide, 4 bytes
    assert longer - plain > 64 * 18 * 2 * 2 * 32 * 4 and wider - plain > 64 * 80 * 2 * 2 * 32 * 4


def test_a_program_that_the_disk_has_is_compiled_anew_for_what_xla_says_of_it():
    """JAX's key leaves the options of dumps out, and a program from the disk (this session has a folder) dumps nothing."""
    program = run_of(tiny()).program("reference")
    first = compile_program("cpu", program)
    jax.clear_caches()
    assert compile_program("cpu", program) == first and first.live


@pytest.mark.slow
@pytest.mark.parametrize("offloaded", [False, True])
def test_parts_sum_to_what_the_device_holds(offloaded):
    settings = tiny(update={"offload_optimizer": offloaded}, kl={"offload_reference": offloaded})
    assert run_of(settings).in_host.keys() == ({"moments", "reference"} if offloaded else set())
    run = run_of(settings, shares_host_memory=True)
    for program in run.programs:
        compiled = compile_program("cpu", program)
        by_part = bytes_by_part(run, program, compiled)
        print(program.name, by_part)
        assert sum(by_part.values()) == compiled.total + run.beside(program)
        assert by_part["parameters"] == run.resident["parameters"]
        assert by_part["moments"] == run.resident["moments"] >= 2 * by_part["parameters"]
        assert by_part["reference"] == run.resident["reference"] == by_part["parameters"]


def test_largest_finds_the_last_count_that_fits_and_only_asks_near_it():
    tried = []

    def total_of(count: int) -> int:
        tried.append(count)
        return 1000 + 30 * count + count // 7  # nearly straight

    best, needed = largest(total_of, 4, 10_000)
    assert total_of(best) == needed <= 10_000 < total_of(best + 1)
    assert len(tried) <= 10
    assert largest(lambda count: 50 * count, 8, 10) == (0, 50)


HLO = """HloModule jit_f

FileNames
1 "/somewhere/jax_grpo/update.py"
2 "/elsewhere/flax/linear.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12}
2 {file_name_id=2 function_name_id=1 line=99 end_line=99}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%fused (p: f32[8]) -> f32[8] {
  ROOT %inner = f32[8]{0} add(%p, %p), metadata={op_name="jit(f)/add" stack_frame_id=2}
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %fusion = f32[8]{0} fusion(%a), kind=kLoop, calls=%fused
}
"""
ASSIGNMENT = """allocation 0: size 32, parameter 0, shape |f32[8]| at ShapeIndex {}:
 value: <1 a @0> (size=32,offset=0): f32[8]{0}
allocation 1: size 64, preallocated-temp:
 value: <2 fusion @0> (size=32,offset=0): f32[8]{0}
 value: <3 carried{1} (phi) @0> (size=32,offset=0): f32[8]{0}
 value: <4 later @0> (size=32,offset=32): f32[8]{0}
"""
LIVE = """  BufferLiveRange:
    later{}: 7-9
  Live ranges at 5 (peak):
    fusion{}: 32 bytes (cumulative: 32 bytes)
    carried{1}: 32 bytes (cumulative: 64 bytes)
    a{}: 32 bytes (cumulative: 96 bytes)
"""


def test_values_that_share_a_place_count_once_and_name_the_projects_line(tmp_path):
    for ending, text in (("", HLO), ("-buffer-assignment", ASSIGNMENT), ("-live-range", LIVE)):
        (tmp_path / f"m.after_optimizations{ending}.txt").write_text(text)
    argument, temporary = sorted(at_peak(tmp_path), key=lambda live: live.place)
    assert (argument.place, argument.size) == ("argument", 32)
    assert temporary == Live(32, "temporary", "f32[8]", "jit(f)/add", "jax_grpo/update.py:12")


def test_an_unknown_target_lists_those_there_are():
    with pytest.raises(UnknownTarget, match="target 'rtx5090': expected one of h200, rtx4090, cpu, local"):
        device("rtx5090")
    with pytest.raises(SystemExit, match="--target rtx4090 is not it: give cpu or local"):
        main(["--config", "x.yaml", "--measure"])


@pytest.mark.slow
def test_weights_that_are_not_here_are_planned_for_and_said():
    run = run_of(load_config(str(CONFIGS / "rookworld_4090.yaml")))
    assert (
        run.assumed is not None
        and "weights/RookWorld-LM-124M is not on this machine: assumed num_layers 12" in run.assumed
    )
    assert sum(leaf.size for leaf in jax.tree.leaves(run.programs[0].arguments[0])) == 124_475_904


@pytest.mark.parametrize(("name", "parameters"), [("qwen25_0.5b", 494_032_768), ("qwen3_0.6b", 596_049_920)])
def test_models_that_are_not_here_are_planned_for_by_their_architecture_and_all_its_tokens(name, parameters):
    """The numbers of parameters are those that Qwen's model cards and `transformers` have."""
    file = str(CONFIGS / "architectures" / f"{name}.json")
    config = load_config(str(CONFIGS / f"{name}_4090.yaml"), ["--model.architecture", file])
    tokenizer, sizes, assumed = _tokenizer_and_sizes(config.model)
    assert (sizes.vocab_size, tokenizer.vocab_size, assumed) == (151_936, 151_936, None)
    assert sum(leaf.size for leaf in jax.tree.leaves(abstract_params(sizes))) == parameters


def test_caches_of_fewer_heads_than_queries_are_counted_as_caches(tmp_path):
    """A Llama whose keys are of 2 heads of 16, where the residual stream is 64 wide."""
    sizes = {"vocab_size": 50257, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"model_type": "llama"}))
    run = run_of(tiny(model={"architecture": str(tmp_path), **dict.fromkeys(GPT2_SMALL)}))
    rollout = run.program("rollout")
    prompts, width = rollout.arguments[1].shape
    assert prompts * width * 2 * 16 in _cache_sizes(run, rollout)


def test_bfloat16_reference_and_moment_take_half():
    plain, small = (
        run_of(tiny(kl={"reference_dtype": dtype}, update={"first_moment_dtype": dtype})).resident
        for dtype in ("parameters", "bfloat16")
    )
    assert small["reference"] * 2 == plain["reference"]
    assert plain["moments"] - small["moments"] == plain["parameters"] / 2


# Over a billion parameters: many minutes of compiling each, so that what was compiled last is committed (docs/adapters.md).
LARGE = ("countdown_qwen25_1.5b_4090", "qwen3_4b_lora_4090", "llama31_8b_lora_4090", "qwen25_1.5b_lora_4090")
SMALLER = [path for path in sorted(CONFIGS.glob("*4090*.yaml")) if path.stem not in LARGE]


@pytest.mark.parametrize("name", LARGE[1:])  # the first has no report
def test_large_configs_fit_as_they_were_compiled_last(name):
    report = CONFIGS.parent / "docs" / "results" / "memory" / f"{name}_rtx4090.json"
    assert json.loads(report.read_text())["spare"] >= SPARE


@needs_plugin
@pytest.mark.parametrize("path", SMALLER, ids=lambda path: path.stem)
def test_configs_named_for_the_4090_fit_with_two_gigabytes_to_spare(path, tmp_path):
    spare = compiled_report(path, tmp_path)["spare"]
    print(f"{path.stem}: {spare / 1e9:.2f} GB to spare (at least {SPARE / 1e9:.0f})")
    assert spare >= SPARE


@needs_plugin
@pytest.mark.parametrize("attention", ["einsum", "pallas"])
def test_a_rollout_needs_its_caches_and_weights_and_a_seventh_more(attention, tmp_path):
    """Half of the prompts go on alone in caches of their own, which take the places of those that they are copied from."""
    sizes = {"model_type": "llama", "vocab_size": 50257, "hidden_size": 256, "intermediate_size": 768}
    sizes |= {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    sizes |= {"max_position_embeddings": 2112, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    settings = ["--model.architecture", str(tmp_path / "config.json"), "--model.decode_attention", attention]
    settings += ["--prompts.max_prompt_tokens", "64", "--rollout.max_new_tokens", "2048"]
    run = run_of(load_config(str(CONFIGS / "qwen3_0.6b_4090.yaml"), settings))
    rollout, of = run.program("rollout"), run.architecture
    prompts, width = rollout.arguments[1].shape
    caches = 2 * 2 * of.num_layers * of.kv_heads * of.head_dim * prompts * (width + 8 * 2047)
    weights = 2 * sum(leaf.size for leaf in jax.tree.leaves(rollout.arguments[0]))
    needed = compile_program("rtx4090", rollout).temporaries
    print(f"{needed / 1e6:.0f} MB for caches of {caches / 1e6:.0f} and weights of {weights / 1e6:.0f}")
    assert caches > 3 * weights and needed <= 1.15 * (caches + weights)


@needs_plugin
def test_offloaded_moments_are_not_on_the_card(tmp_path):
    config = CONFIGS / "bench_8x174.yaml"
    plain = compiled_report(config, tmp_path)
    actual = compiled_report(config, tmp_path, "--update.offload_optimizer", "true")
    moments = plain["resident"]["moments"]
    saved = plain["total"] - actual["total"]
    print(f"{saved / 1e6:.0f} MB less on the card; the moments are {moments / 1e6:.0f} MB")
    assert actual["in_host"]["moments"] + actual["resident"]["moments"] == moments
    # AdamW brings them over a tensor at a time: at the fullest moment at most the embedding's are there, 2 and 4 bytes each.
    assert moments - (2 + 4) * 50304 * 768 <= saved <= moments


@needs_plugin
def test_the_training_step_needs_less_with_a_head_in_tiles():
    sizes = ("--prompts.per_iteration", "4", "--rollout.group_size", "8", "--rollout.max_new_tokens", "96")

    def update(head):
        settings = [*sizes, "--model.compute_dtype", "bfloat16", "--lm_head.implementation", head]
        run = run_of(load_config(str(CONFIGS / "bench_124m_cpu.yaml"), settings))
        return compile_program("rtx4090", next(program for program in run.programs if program.name == "update"))

    whole, tiled = map(update, ("materialised", "chunked"))
    logits = 4 * 8 * 96 * 50304 * 4
    print(f"{whole.total / 1e9:.2f} GB with all logits ({logits / 1e9:.2f} GB), {tiled.total / 1e9:.2f} GB in tiles")
    assert whole.aliased == tiled.aliased > 12 * 124_000_000, "parameters and moments are donated"
    assert whole.total - tiled.total > logits / 4


@needs_plugin
def test_the_batch_that_an_earlier_system_could_not_train_needs_two_gigabytes(tmp_path):
    actual = compiled_report(CONFIGS / "bench_8x174.yaml", tmp_path)
    print(f"{actual['total'] / 1e9:.3f} GB (at most 2.2, with the reference resident)")
    assert actual["total"] <= 2.2e9 and actual["resident"]["reference"] > 0


@pytest.mark.skipif(PLUGIN, reason="the plugin is installed")
def test_without_the_compiler_the_error_says_what_to_install():
    with pytest.raises(SystemExit, match=r"no compiler for rtx4090 here .*pip install -e '\.\[aot\]'"):
        main(["--config", str(CONFIGS / "bench_8x174.yaml")])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="resident pages are read from /proc")
@pytest.mark.parametrize(
    ("name", "program"),
    [("legality", "rollout"), ("legality", "reference"), ("legality", "update"), ("bench_124m_cpu", "update")],
)
def test_the_compiled_bytes_are_the_measured_ones_where_xlas_own_kernels_do_the_work(name, program, monkeypatch):
    # Its matrix library packs operands into memory of its own, which XLA does not count: see docs/memory.md.
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_INVALID")
    # So does Eigen, in blocks that follow the caches' sizes: 11.5 MB beside 260 MB of third-level cache, when 64 prompts' peak is
    # in a matmul. Twice as many prompts hold them to less than the tolerance, on any machine.
    more = ["--prompts.per_iteration", "128"] if program == "rollout" else []
    actual = fresh(str(CONFIGS / f"{name}.yaml"), more, "cpu", program)
    compiled, measured = actual["compiled"], actual["peak"]
    print(f"{name}, {program}: compiled {compiled / 1e6:.1f} MB, measured {measured / 1e6:.1f} MB (tolerance 5 %)")
    assert compiled == pytest.approx(measured, rel=0.05)


FAULTS = """
import ctypes, resource, sys
from jax_grpo.system import memory

BLOCK, PAGE = 64 << 20, 4096
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        block = libc.malloc(BLOCK)
        ctypes.memset(block, 1, BLOCK)
        libc.free(block)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / (BLOCK / PAGE)

if sys.argv[1] == "others":
    libc.mallopt(-3, 2**23)  # a bound of its own, as `give_back_early` sets
else:
    memory.give_back_early()
given_back = faults()
if sys.argv[1] == "short":
    memory.available = lambda limit: 3 * memory.peak()
print(memory.keep_freed(), given_back, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize(
    ("room", "keeps", "most"), [("ample", "True", 1.5), ("short", "False", None), ("others", "False", None)]
)
def test_memory_that_is_kept_is_not_faulted_in_anew_and_none_is_kept_where_it_is_short_or_others_is(room, keeps, most):
    # Ten times the same block, as a program asks for its temporaries in each step; faults in blocks' pages. No huge pages for
    # malloc, unless the system gives them to all.
    done = subprocess.run([sys.executable, "-c", FAULTS, room], capture_output=True, text=True, check=True)
    retained, given_back, after = done.stdout.split()
    print(f"{float(given_back):.2f} blocks faulted in when given back, {float(after):.2f} after")
    assert retained == keeps
    if "[always]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        assert float(given_back) > 9
        assert float(after) <= most if most else float(after) > 9
