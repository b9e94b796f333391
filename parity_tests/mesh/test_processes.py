"""Runs of several processes over loopback: the numbers of one, and how all end when one does. Real processes, real signals."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pydantic
import pytest
from conftest import PATIENCE_S, config, relative_error
from processes_child import ROWS, STATE_AFTER, state
from short_runs import EPISODES, finish, lines, lines_without_times, signal_after, start

from jax_grpo.config import ConfigError, load_config
from jax_grpo.mesh import processes
from jax_grpo.run import files
from jax_grpo.run.checkpoints import content_hash, load

TOLERANCE = 1e-10  # float64: rounding of sums in another order
ITERATIONS = 6
RUN = [
    *("--model.param_dtype", "float64", "--model.compute_dtype", "float64", "--iterations", str(ITERATIONS)),
    *("--update.total_steps", "12", "--checkpoint.every", "2", "--prompts.split", "train", "--record_batches", "2"),
    *("--evaluation.positions", "3", "--evaluation.every", "3", "--checkpoint.keep_last", "9"),
    *("--task", "{name: length}", "--rollout.max_new_tokens", "8"),  # random weights are paid by this one
]
MESHES = {1: [], 2: ["--mesh.data", "2"], 4: ["--mesh.data", "2", "--mesh.fsdp", "2"]}
LOST = "another one has ended or does not answer"
HEARTBEAT = "Terminating process because the JAX distributed service detected fatal errors"  # JAX's own words


def free_address() -> str:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(autouse=True)
def in_float64(monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    # LLVM's optimisations take two thirds of a short run's time.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
    monkeypatch.setenv("XLA_FLAGS", flags)


def start_all(folder: Path, run: str, count: int, *arguments: str) -> list[subprocess.Popen]:
    """The processes of a run on the loopback interface; one of them is a run without any."""
    if count == 1:
        return [start(folder, run, *RUN, *arguments)]
    together = ["--mesh.coordinator", free_address(), *MESHES[count]]
    return [
        start(folder, run, *RUN, *arguments, *together, "--mesh.process", f"{number}/{count}")
        for number in range(count)
    ]


def whole(folder: Path, count: int) -> Path:
    """The folder of a run of so many processes that nothing happened to; made once."""
    run = folder / f"whole{count}"
    if not run.exists():
        for process in start_all(folder, run.name, count):
            finish(process)
    return run


def differences(run: Path, reference: Path) -> tuple[float, float]:
    """Largest of the parameters, moments and counters at the end, and of all metrics that are no times."""
    states = [load(path / "checkpoints" / files.folder_name(ITERATIONS)).arrays for path in (run, reference)]
    records = [lines_without_times(path) for path in (run, reference)]
    assert [sorted(record) for record in records[0]] == [sorted(record) for record in records[1]]
    assert len(records[0]) == ITERATIONS + 3, "and evaluations"
    assert max(record.get("grad_norm", 0) for record in records[1]) > 1e-2, "it learns"
    worst = max(abs(a[name] - b[name]) for a, b in zip(*records, strict=True) for name in a)
    return relative_error(*states), worst


def require_same(run: Path, reference: Path) -> None:
    """Bit for bit."""
    actual, expected = (load(path / "checkpoints" / files.folder_name(ITERATIONS)) for path in (run, reference))
    for name, array in expected.arrays.items():
        assert np.array_equal(actual.arrays[name], array), name
    assert lines_without_times(run) == lines_without_times(reference)
    weights = [(path / "weights" / "model.safetensors").read_bytes() for path in (run, reference)]
    assert weights[0] == weights[1]


def test_processes_exchange_save_and_end_together(tmp_path):
    """Two processes of two devices each, which train nothing: what training is made of, at a hundredth of its time."""
    address, child = free_address(), str(Path(__file__).parents[1] / "processes_child.py")
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2",
        "JAX_ENABLE_X64": "0",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    both = [subprocess.Popen([sys.executable, child, address, str(n), str(tmp_path)], **pipes) for n in range(2)]
    outputs = [process.communicate(timeout=PATIENCE_S) for process in both]
    records = [json.loads(out.splitlines()[-1]) if out.strip() else pytest.fail(error) for out, error in outputs]
    doubled = jax.tree.map(lambda x: x + x, state())
    for number, record in enumerate(records):
        assert (record["count"], record["index"]) == (2, number)
        assert record["exchanged"] == [{"of": "x"}, {"of": "x" * 301}]
        assert record["embedding"] == doubled["params"]["wte"]["embedding"].tolist()
        assert record["hash"] == record["hash_of_the_restored"] == content_hash(doubled)
        assert record["parts_after"] == [[8, 2]], "a quarter, of what was saved in halves"
        assert record["texts"] == ["a", "bb", "ccc", "dd", "e\udc80"]
        assert record["length"] == [1, None, 3, None, None]
        assert record["logged"] == [{"seen": [2, 3]}, {"text": ["a", "bb", None, None, None]}]
        assert record["agreed"] == [False, True]
    assert [record["own"] for record in records] == [[0, 2], [2, ROWS]]
    saved = load(tmp_path / "checkpoints" / files.folder_name(STATE_AFTER))
    assert saved.content["metrics"] == {"loss": 0.0, "eval/score": 0.5}, "process 0's"
    assert [path.name for path in files.complete(tmp_path / "checkpoints")] == [files.folder_name(STATE_AFTER)]
    parts = {name for name in saved.content["files"] if name.startswith("state/params/wte/embedding/")}
    assert len(parts) > 2, "an array is written in parts"
    for name, array in {"params/wte/embedding": doubled["params"]["wte"]["embedding"], "step": doubled["step"]}.items():
        assert np.array_equal(saved.arrays[name], array) and saved.arrays[name].dtype == array.dtype
    assert [process.returncode for process in both] == [1, 1]
    assert "RuntimeError: its own reason" in outputs[1][1]
    assert LOST in outputs[0][1] or HEARTBEAT in outputs[0][1], outputs[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_train_to_the_metrics_of_one(count, folder):
    parameters, metrics = differences(whole(folder, count), whole(folder, 1))
    print(f"{count} processes: parameters {parameters:.1e}, metrics {metrics:.1e} (tolerance {TOLERANCE:.0e})")
    assert parameters < TOLERANCE and metrics < TOLERANCE
    for number in range(2):  # what `replay` reads
        arrays = [dict(np.load(whole(folder, n) / "batches" / f"{number:06d}.npz")) for n in (count, 1)]
        for name in arrays[1]:
            np.testing.assert_allclose(arrays[0][name], arrays[1][name], rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_two_processes_draw_further_prompts_and_move_the_reference_as_one_does(folder):
    meets = [
        "--rollout.refill",
        "{rounds: 2, ahead: true}",
        "--kl.reference_every",
        "3",
        "--rollout.max_new_tokens",
        "2",
    ]
    meets += ["--prompts.curriculum", "{passed: 0.1, again: 0.7}", "--rollout.group_size", "2"]
    for count in (1, 2):
        for process in start_all(folder, f"meets{count}", count, *meets):
            finish(process)
    parameters, metrics = differences(folder / "meets2", folder / "meets1")
    print(f"2 processes: parameters {parameters:.1e}, metrics {metrics:.1e} (tolerance {TOLERANCE:.0e})")
    assert parameters < TOLERANCE and metrics < TOLERANCE
    records = lines_without_times(folder / "meets1")
    assert sum(record.get("refill/rounds", 0) for record in records) > 0, "something was drawn"
    assert any(record.get("kl/after_move") == 0 for record in records), "and the reference moved"
    assert max(record["curriculum/again"] for record in records if "curriculum/again" in record) > 0, (
        "and prompts came again"
    )
    saved = [load(files.complete(folder / f"meets{count}" / "checkpoints")[-1]).arrays for count in (1, 2)]
    for name in ("curriculum/rate_N", "curriculum/next", "curriculum/draws"):
        np.testing.assert_array_equal(saved[0][name], saved[1][name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("task", EPISODES)
def test_two_processes_play_the_episodes_of_one(task, folder):
    """Each answers its share of the guesses and is told the others' answers; games against the policy are answered by both."""
    options = [*EPISODES[task], "--logging.samples_every", "2"]
    for count in (1, 2):
        for process in start_all(folder, f"{task}{count}", count, *options):
            finish(process)
    parameters, metrics = differences(folder / f"{task}2", folder / f"{task}1")
    print(f"2 processes: parameters {parameters:.1e}, metrics {metrics:.1e} (tolerance {TOLERANCE:.0e})")
    assert parameters < TOLERANCE and metrics < TOLERANCE
    printed = [(folder / f"{task}{count}" / "samples.jsonl").read_text() for count in (1, 2)]
    assert printed[0] == printed[1] and printed[0].count("\n") >= 2, "and every turn of the samples is the same"


@pytest.mark.slow
def test_when_one_is_killed_the_others_end_and_the_run_continues_on_any_number(folder):
    processes_of_run, run = start_all(folder, "killed", 2), folder / "killed"
    signal_after(processes_of_run[1], run, 4, signal.SIGKILL)
    since = time.monotonic()
    output = processes_of_run[0].communicate(timeout=PATIENCE_S)[0]
    print(f"process 0 ended {time.monotonic() - since:.1f} s after SIGKILL of process 1:\n{output[-1500:]}")
    assert processes_of_run[0].returncode and (LOST in output or HEARTBEAT in output)
    assert lines(run) < ITERATIONS + 3 and files.complete(run / "checkpoints")
    processes_of_run[1].communicate()
    for count in (1, 4):
        shutil.copytree(run, folder / f"killed{count}")
    for count, name in ((2, "killed"), (1, "killed1"), (4, "killed4")):
        outputs = [finish(process) for process in start_all(folder, name, count, "--resume", "auto")]
        assert "continuing after iteration" in outputs[0] and not any("continuing" in each for each in outputs[1:])
        parameters, metrics = differences(folder / name, whole(folder, 2))
        print(f"continued by {count}: parameters {parameters:.1e}, metrics {metrics:.1e}")
        assert parameters < TOLERANCE and metrics < TOLERANCE
    require_same(run, whole(folder, 2))


@pytest.mark.slow
def test_when_the_first_is_killed_or_one_hangs_the_others_end(folder):
    """Process 0 has JAX's coordination service; a stopped process answers nobody, and keeps its connections."""
    for number, sent in ((0, signal.SIGKILL), (1, signal.SIGSTOP)):
        run = folder / f"signal{sent}"
        both = start_all(folder, run.name, 2)
        signal_after(both[number], run, 3, sent)
        since = time.monotonic()
        output = both[1 - number].communicate(timeout=PATIENCE_S)[0]
        print(
            f"process {1 - number} ended {time.monotonic() - since:.1f} s after {sent!r} of {number}:\n{output[-1500:]}"
        )
        assert both[1 - number].returncode and (LOST in output or HEARTBEAT in output)
        both[number].kill()
        both[number].communicate()


@pytest.mark.slow
def test_a_stop_signal_to_one_stops_all_after_the_same_iteration(folder):
    both, run = start_all(folder, "stopped", 2), folder / "stopped"
    signal_after(both[1], run, 3, signal.SIGTERM)
    outputs = [finish(process) for process in both]
    assert "SIGTERM: finishing this iteration" in outputs[1] and "stopped after iteration" in outputs[0]
    assert int(files.complete(run / "checkpoints")[-1].name) < ITERATIONS
    for process in start_all(folder, "stopped", 2, "--resume", "auto"):
        finish(process)
    require_same(run, whole(folder, 2))


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_several_processes_train_the_quickstart_to_the_metrics_of_one(count, tmp_path):
    """Its model, positions and settings, in float64, so that draws are the same; two iterations and the evaluation before."""
    small = [
        *("--model.param_dtype", "float64", "--model.compute_dtype", "float64", "--iterations", "2"),
        *("--update.total_steps", "450", "--evaluation.positions", "64", "--logging.tensorboard", "false"),
    ]
    quickstart = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")
    command = [sys.executable, "-m", "jax_grpo.train", "--config", quickstart, *small]
    environment = os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": str(Path(__file__).parents[2])}

    def trained(name: str, *arguments: list[str]) -> list[dict]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
        run = str(tmp_path / name)
        for process in [subprocess.Popen([*command, "--run_dir", run, *words], **pipes) for words in arguments]:
            finish(process)
        return lines_without_times(tmp_path / name)

    together = ["--mesh.coordinator", free_address(), *MESHES[count]]
    actual = trained("several", *([*together, "--mesh.process", f"{number}/{count}"] for number in range(count)))
    expected = trained("one", [])
    worst, name = max((abs(a[name] - b[name]), name) for a, b in zip(actual, expected, strict=True) for name in b)
    print(f"{count} processes, {len(expected)} records of the quickstart: {worst:.1e} ({name})")
    assert worst < 1e-9, "a thousand times the tiny model's sums"


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"process": "0/2"}, "mesh.process 0/2 needs mesh.coordinator"),
        ({"coordinator": "node1"}, "mesh.coordinator 'node1' must be HOST:PORT of process 0, such as 10.0.0.1:1234, or auto"),
        ({"coordinator": "node1:http"}, "must be HOST:PORT"),
        ({"coordinator": "a:1", "process": "2/2", "data": 2}, "mesh.process 2/2: the number must be below the count"),
        ({"coordinator": "a:1", "process": "2/3", "data": 2}, "mesh.process 2/3: the count must divide the mesh's 2 devices"),
    ],
)  # fmt: skip
def test_processes_that_cannot_be_are_refused_with_one_sentence(mesh, words):
    with pytest.raises(pydantic.ValidationError, match=words):
        config(mesh=mesh)


def test_the_command_line_sets_them(tmp_path):
    (tmp_path / "c.yaml").write_text(Path(__file__).parents[2].joinpath("configs", "length_toy.yaml").read_text())
    words = ["--mesh.data", "2", "--mesh.coordinator", "10.0.0.1:1234", "--mesh.process", "1/2"]
    mesh = load_config(str(tmp_path / "c.yaml"), words).mesh
    assert (mesh.coordinator, mesh.place, mesh.devices) == ("10.0.0.1:1234", (1, 2), 2)


def test_a_machine_that_says_nothing_of_processes_is_one_sentence():
    """This one is no node of Slurm's: JAX looks at the environment, in a process of its own."""
    code = (
        "from jax_grpo.config.sections import MeshConfig; from jax_grpo.mesh import processes\n"
        "with processes.connected(MeshConfig(data=2, coordinator='auto')): pass"
    )
    foreign = ("SLURM_", "OMPI_", "KUBERNETES_", "JAX_COORDINATOR")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    child = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "mesh.coordinator auto: JAX finds no Slurm, Kubernetes or Open MPI here" in child.stderr, child.stderr


def test_alone_nothing_is_exchanged():
    assert processes.count() == 1 and processes.is_first() and processes.index() == 0
    assert processes.own(7) == slice(0, 7)
    tree = {"a": jax.numpy.zeros(3)}
    assert processes.gathered(tree) is tree and processes.exchanged(tree)[0] is tree
    with processes.connected(config().mesh), processes.ending_at_once():
        pass
    with pytest.raises(ConfigError, match="a Gloo of my own"), processes.connected(config().mesh):
        raise ConfigError("a Gloo of my own")
