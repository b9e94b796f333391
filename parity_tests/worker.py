"""What a test process keeps: compiled programs go when memory runs up, and the suite holds itself to a limit.

An operation that is compiled alone takes over a megabyte of the process (an uncompiled update's 420 took 0.7 GB), so that a worker
that keeps all programs reached five gigabytes. Those that come back are read from the disk: the session has a folder of its own
(or JAX_COMPILATION_CACHE_DIR) for its workers and for the processes that they start.
"""

import gc
import os
import shutil
import tempfile

import pytest

# Threads of PyTorch's that wait spin, which with a worker on each core took thirty times the CPU time of a small step.
os.environ.setdefault("OMP_NUM_THREADS", "1")
AIM_BYTES = 2_000_000_000  # of a worker: two, and what they start, are to run in 8 GB
LIMIT_BYTES = 3_000_000_000  # above which a default run fails: another machine's allocator and threads may take more
AMPLE_BYTES = (
    1_200_000_000  # with more than this resident, programs are dropped at a file's end, and for other shapes';
)
FULL_BYTES = 1_800_000_000  # with more than this, a test does too,
GROWTH_BYTES = 200_000_000  # but only when so much has come since the last time: the next test makes its programs again
BOUNDS = f"aim {AIM_BYTES / 1e9:.0f}, limit {LIMIT_BYTES / 1e9:.0f}"
CACHE = "JAX_COMPILATION_CACHE_DIR"
LEAST = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0"}
PEAK = pytest.StashKey[tuple[int, str]]()  # bytes, and the test that reached them
PEAKS = pytest.StashKey[dict[str, tuple[int, str]]]()
KEPT = pytest.StashKey[int]()  # least resident since programs were last dropped


def share_compiled_programs() -> str | None:
    """A folder for this session's compiled programs, which its workers inherit; None where there is one already."""
    if CACHE in os.environ or "PYTEST_XDIST_WORKER" in os.environ:
        return None
    os.environ[CACHE] = tempfile.mkdtemp(prefix="jax_grpo_tests_")
    os.environ.update({name: os.environ.get(name, value) for name, value in LEAST.items()})
    return os.environ[CACHE]


_made = share_compiled_programs()

# isort: split
import jax  # noqa: E402 (reads the variables)

from jax_grpo.system import memory  # noqa: E402


def release() -> None:
    """Drops every compiled program, and has freed memory go back to the system."""
    jax.clear_caches()
    gc.collect()
    memory.trim()


def make_room() -> None:
    """Drops compiled programs where many are held."""
    if memory.counts_pages() and memory.resident() > AMPLE_BYTES:
        release()


@pytest.fixture(autouse=True, scope="module")
def caches_end_with_their_file(request):
    """What a file's own caches hold keeps programs alive; the next file has few of them in common."""
    yield
    for value in vars(request.module).values():
        if getattr(value, "__module__", None) == request.module.__name__ and hasattr(value, "cache_clear"):
            value.cache_clear()
    make_room()


def asks_for_gpu(config) -> bool:
    """Whether the tests of the `gpu` mark were asked for."""
    expression = config.option.markexpr
    return "gpu" in expression and "not gpu" not in expression


def choose_device(config) -> None:
    """Tests run on the CPU, but for those of the `gpu` mark, which take the default device: an accelerator if there is one.

    There two workers, and what they start, share the memory: none may take three quarters of it at its start.
    """
    if asks_for_gpu(config):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    else:
        jax.config.update("jax_platforms", os.environ.setdefault("JAX_PLATFORMS", "cpu"))


def compile_quickly(config) -> None:
    """A default run has its programs compiled without what takes two thirds of a short run's time.

    That is LLVM's optimisations, and the newer of XLA:CPU's two emitters of fused loops, which JAX 0.12 cannot do without.
    XLA's own passes, fusion and buffers are what they are; the slow tests have it all. The flags are read when JAX first
    compiles, and one that XLA does not know ends the process. So has one of the `gpu` tests on a CPU, where they only show that
    they work.
    """
    on_cpu = asks_for_gpu(config) and os.environ.get("JAX_PLATFORMS") == "cpu"
    if default_run(config) or on_cpu:
        quick = ["--xla_backend_optimization_level=0"]
        quick += ["--xla_cpu_use_fusion_emitters=false"] if jax.__version__.startswith("0.10.") else []
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *quick]).strip()


def pytest_configure(config):
    choose_device(config)
    compile_quickly(config)
    config.stash[PEAK], config.stash[PEAKS], config.stash[KEPT] = (0, "no test"), {}, FULL_BYTES


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Looks after each test: a test of the measurements themselves makes the count begin anew."""
    done = yield
    stash = item.config.stash
    if (actual := memory.peak()) > stash[PEAK][0]:
        stash[PEAK] = actual, item.nodeid
    if memory.counts_pages():
        now = memory.resident()
        stash[KEPT] = min(stash[KEPT], now)
        if now > max(FULL_BYTES, stash[KEPT] + GROWTH_BYTES):
            release()
            stash[KEPT] = memory.resident()
    return done


def pytest_testnodedown(node, error):
    """A worker tells its peak with its last message; one that crashed has none."""
    if (reported := getattr(node, "workeroutput", {}).get("peak")) is not None:
        node.config.stash[PEAKS][node.gateway.id] = tuple(reported)


def default_run(config) -> bool:
    """Whether slow tests are left out, which hold models of 124M parameters and ask what only optimised programs do."""
    return "not slow" in config.option.markexpr


def pytest_sessionfinish(session):
    config = session.config
    if hasattr(config, "workeroutput"):
        config.workeroutput["peak"] = config.stash[PEAK]
        return
    if config.stash[PEAK][0]:
        config.stash[PEAKS]["this process"] = config.stash[PEAK]
    too_much = any(size > LIMIT_BYTES for size, _ in config.stash[PEAKS].values())
    if default_run(config) and too_much and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    for name, (size, test) in sorted(config.stash[PEAKS].items()):
        line = f"{name}: at most {size / 1e9:.2f} GB resident ({BOUNDS}), first in {test}"
        if default_run(config) and size > LIMIT_BYTES:
            line += ": FAILED; what a test holds on to, or needs by nature (then it is a slow test), is in its process's memory"
        terminalreporter.write_line(line)


def pytest_unconfigure(config):
    if _made is not None:
        shutil.rmtree(_made, ignore_errors=True)
