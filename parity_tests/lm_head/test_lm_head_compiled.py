"""The heads compiled for an RTX 4090 that is not there: memory, largest arrays, matmuls, registers and shared memory.

Skipped without JAX's CUDA plugin, which holds the compiler; no GPU is used.
"""

import json
import os
import re
import subprocess
import sys

import pytest
from compiled_reports import PLUGIN, needs_plugin

from jax_grpo.bench import runner
from jax_grpo.bench.lm_head import BENCH
from jax_grpo.memory.compile import CannotCompile, jax_devices
from jax_grpo.memory.dumps import wide_dots
from jax_grpo.system import devices

SHARED = 101376  # bytes of shared memory that a block may have on sm_89

# Megabytes of arguments, results and temporaries; more than 2 % above is a failure.
S2 = {"best": 1854, "materialised": 5150, "chunked": 671, "chunked-bf16": 466, "pallas-bf16": 465, "pallas-small": 309}
S1 = {"pallas-small": 2893}

# Several programs in one process: JAX starts once. Its platform is chosen before it is imported.
SCRIPT = """
import json, sys
import jax
from jax_grpo.bench.lm_head import SHAPES, abstract, step_of
from jax_grpo.memory.compile import compile_program
from jax_grpo.memory.dumps import wide_dots
from jax_grpo.memory.programs import Program
shape, found = SHAPES[sys.argv[1]], {}
for name in sys.argv[2:]:
    program = Program(name, jax.jit(step_of(name, shape)), abstract(shape))
    compiled = compile_program("rtx4090", program, kernels="lm_head")
    found[name] = {
        "megabytes": compiled.total / 1e6,
        "wide_dots": wide_dots(compiled.hlo),
        "all_logits": f"[{shape.tokens},{shape.rows}]" in compiled.hlo,
        "largest": compiled.live[0].size,
        "kernels": [[k.name, k.spilled, k.shared] for k in compiled.kernels],
    }
print(json.dumps(found))
"""


def compiled(shape: str, names) -> dict:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, shape, *names], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(found: dict, expected: dict[str, int]) -> None:
    for name, megabytes in expected.items():
        print(f"{name}: {found[name]['megabytes']:.1f} MB (expected {megabytes}, at most 2 % more)")
        assert found[name]["megabytes"] < 1.02 * megabytes
        assert found[name]["wide_dots"] == []
        for kernel, spilled, shared in found[name]["kernels"]:
            assert spilled == 0 and shared <= SHARED, kernel
        if "pallas" in name:
            assert found[name]["kernels"], "the kernels were looked into"


@needs_plugin
def test_s2_needs_a_quarter_of_the_best_baseline_and_no_head_of_ours_holds_all_logits():
    found = compiled("s2", S2)
    check(found, S2)
    assert {name: found[name]["all_logits"] for name in S2} == {
        name: name in ("best", "materialised") for name in S2
    }, "a [T, V] array"
    # The metric sees the logits: float32 for bfloat16 is two more bytes for each of them and for their gradients.
    assert found["materialised"]["megabytes"] - found["best"]["megabytes"] > 2 * 16384 * 50304 * 1e-6
    assert min(found[name]["megabytes"] for name in ("chunked-bf16", "pallas-bf16")) <= 470
    assert found["pallas-small"]["megabytes"] <= 470, "with float32 logits"


@needs_plugin
@pytest.mark.slow
def test_s1_in_the_minimum_memory_mode_needs_less_than_three_gigabytes():
    found = compiled("s1", S1)
    check(found, S1)
    assert max(found[name]["megabytes"] for name in S1) <= 3000


HLO = """
%fused (p0: f32[8,4], p1: bf16[8,4]) -> f32[8,8] {
  %p0 = f32[8,4]{1,0} parameter(0)
  %p1 = bf16[8,4]{1,0} parameter(1)
  %p2 = f32[8,4]{1,0} parameter(2)
  %narrow = f32[8,8]{1,0} dot(%p1, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %mixed = f32[8,8]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  ROOT %wide = f32[8,8]{1,0} dot(%p0, %p2), lhs_contracting_dims={1}, rhs_contracting_dims={1}, metadata={op_name="x"}
}
"""


def test_matmuls_with_two_float32_operands_are_found():
    assert [re.match(r"ROOT %(\w+)", line).group(1) for line in wide_dots(HLO)] == ["wide"]


def test_an_unknown_target_says_which_there_are():
    with pytest.raises(devices.UnknownTarget, match="target 'rtx5090': expected one of h200, rtx4090"):
        jax_devices("rtx5090")


@pytest.mark.skipif(PLUGIN, reason="the plugin is installed")
def test_without_the_plugin_the_error_says_what_to_install():
    with pytest.raises(CannotCompile, match=r"no compiler for rtx4090 here .*pip install -e '.\[aot\]' here"):
        jax_devices("rtx4090")


@pytest.mark.parametrize("target", ["local", "rtx4090"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "big"], "--shape 'big': expected s2, s1, tiny or T,H,V"),
        (["--shape", "1,2,0"], "T, H and V must be at least 1"),
        (["--implementation", "fast"], "--variants 'fast': expected some of materialised"),
    ],
)
def test_the_benchmark_refuses_what_it_does_not_know(arguments, words, target, capsys):
    with pytest.raises(SystemExit) as refusal:
        runner.main(BENCH, [*arguments, "--target", target])
    assert words in f"{refusal.value} {capsys.readouterr().err}"


@pytest.mark.slow
def test_the_benchmark_gives_every_variant_the_same_problem():
    shape = BENCH.problem("256,64,256")._replace(param_dtype="float32")
    names = ("materialised", "best", "chunked", "chunked-two-passes", "torch-compile")
    records = {name: BENCH.variants[name](shape) for name in names}
    first = runner.measure(records["materialised"], 3)
    for name in names:
        record = runner.measure(records[name], 3, expected=first)
        numbers = {key: record[key] for key in runner.AGREEMENT}
        print(f"{name}: {numbers} (tolerance 2 % and 5 %: the baselines' logits are rounded to bfloat16)")
        assert record["median_ms"] > 0 and record["half_masked_ms"] > 0


@pytest.mark.slow
def test_the_benchmark_writes_what_it_prints(capsys, tmp_path):
    file = tmp_path / "r.json"
    runner.main(BENCH, ["--shape", "256,64,256", "--implementation", "chunked", "--steps", "3", "--json", str(file)])
    record = json.loads(file.read_text())
    assert f"{record['variants']['chunked']['half_masked_ms']:.1f} ms with half" in capsys.readouterr().out
