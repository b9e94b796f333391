"""What recomputing blocks costs in time: the optimiser step with nothing, matmuls' results, or blocks' inputs alone kept."""

from jax_grpo.bench.harness import main
from jax_grpo.bench.problems import bench_of
from jax_grpo.bench.update import CHUNKED, jax_step

NONE, FULL = {"remat": False, "remat_keeps": "nothing"}, {"remat": True, "remat_keeps": "nothing"}
DOTS = {"remat": True, "remat_keeps": "matmuls"}
BENCH = bench_of(
    "jax_grpo.bench.remat",
    __doc__,
    {
        "none": lambda name: jax_step(name, model=NONE),
        "dots": lambda name: jax_step(name, model=DOTS),
        "full": lambda name: jax_step(name, model=FULL),
        "full-chunked-head": lambda name: jax_step(name, model=FULL, lm_head=CHUNKED),
    },
)

if __name__ == "__main__":
    main(BENCH)
