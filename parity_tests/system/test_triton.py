"""Where Pallas' Triton backend is gone, everything but its kernels runs, and who asks for them reads what to ask for instead."""

import subprocess
import sys

import jax

HIDDEN = """
import sys
sys.modules["jax.experimental.pallas.triton"] = sys.modules["jax_triton"] = None  # as if they were not there
import jax.experimental.pallas
vars(jax.experimental.pallas).pop("triton", None)
"""
CODE = """
import jax_grpo.train
from jax_grpo.config import Config, ConfigError
from jax_grpo.config.model import ModelConfig
from jax_grpo.model.architecture import Architecture
from jax_grpo.policy.named import build_model
from jax_grpo.update import make_gradient, make_score

def build(**settings):
    return build_model(ModelConfig(weights="unused", **settings), Architecture(64, 1, 2, 32, 16), seed=0, vocabulary=None)

def head(make, name):
    sections = {"model": {"weights": "packaged:rook-small"}, "lm_head": {"implementation": name}}
    return make(None, Config.model_validate({"iterations": 1, "run_dir": "unused", **sections}).learning())

cases = [lambda: build(attention="pallas"), lambda: build(decode_attention="pallas")]
cases += [lambda make=make: head(make, "pallas") for make in (make_score, make_gradient)]
for case in cases:
    try:
        case()
        print("no error")
    except ConfigError as error:
        print(error)
build()
head(make_score, "chunked")
"""


def test_kernels_that_jax_has_no_backend_for_are_refused_in_a_line_that_names_the_setting():
    done = subprocess.run([sys.executable, "-c", HIDDEN + CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    reason = f"needs Pallas' Triton backend, which JAX {jax.__version__} does not have"
    either = f"{reason}, or jax_triton (pip install 'jax_grpo[jax-triton]')"
    head = f"lm_head.implementation pallas {either}: expected chunked, which does the same without kernels"
    assert done.stdout.splitlines() == [
        f"model.attention pallas {reason}: leave it at auto",
        f"model.decode_attention pallas {either}: leave it at einsum",
        head,
        head,
    ]
