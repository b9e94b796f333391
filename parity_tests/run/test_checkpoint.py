"""Saved state comes back bit for bit or not at all: whatever happens to the files, with a message that names the file."""

import dataclasses
import gc
import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from conftest import PATIENCE_S, TINY, config
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jax_grpo.chess.evaluate.tables import read_report
from jax_grpo.chess.positions.sources import read_set
from jax_grpo.config.sections import CheckpointConfig, PromptsConfig
from jax_grpo.model.weights import abstract_params, read_config
from jax_grpo.policy.named import load_checkpoint
from jax_grpo.prompts.rows import load_prompts
from jax_grpo.run import files
from jax_grpo.run.checkpoints import Checkpoints, abstract, content_hash, load, named, newest_sound, restore
from jax_grpo.run.files import CheckpointError
from jax_grpo.run.folder import read_record
from jax_grpo.run.resume import find_origin
from jax_grpo.tasks.instructions import read_rows
from jax_grpo.update import init_state


def state(seed: int = 0):
    rng = np.random.default_rng(seed)
    return {
        "params": {"w": jnp.asarray(rng.normal(size=(8, 6)), jnp.float32), "half": jnp.asarray(rng.normal(size=5), jnp.bfloat16)},
        "beta": jnp.float32(0.1 + seed),
        "step": jnp.int32(seed),
    }  # fmt: skip


def saved(folder: Path, count: int = 3, **settings) -> Checkpoints:
    """Checkpoints 1 to `count` of `state(1)`, `state(2)`, ..."""
    checkpoints = Checkpoints(folder, CheckpointConfig(**({"keep_last": count, "keep_best": 0} | settings)))
    with checkpoints:
        for number in range(1, count + 1):
            checkpoints.save(
                number, state(number), {"note": f"number {number}"}, {"reward": [3, 9, 5, 7, 1][number - 1]}
            )
    return checkpoints


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def bits(tree) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_state_comes_back_bit_for_bit_with_its_dtypes_and_without_pickles(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, lambda *_: pytest.fail("unpickled"))
    origin = newest_sound(checkpoints.folder, pytest.fail) or pytest.fail("no checkpoint")
    assert origin.path.name == "000003" and origin.content["note"] == "number 3" and origin.iteration == 3
    assert origin.content["metrics"] == {"reward": 5}
    actual = restore(origin, abstract(state()))
    assert bits(actual) == bits(state(3))
    assert [x.dtype for x in jax.tree.leaves(actual)] == [x.dtype for x in jax.tree.leaves(state())]
    assert content_hash(actual) == content_hash(state(3)) != content_hash(state(2))


@pytest.mark.parametrize("then", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_moments_come_back_where_this_run_keeps_them(tmp_path, first, then):
    params = {"w": jnp.arange(12.0).reshape(3, 4)}
    before, like = (
        init_state(params, config(update={"offload_optimizer": offload}).learning()) for offload in (first, then)
    )
    with Checkpoints(tmp_path, CheckpointConfig(keep_best=0)) as checkpoints:
        checkpoints.save(1, before, {}, {})
    actual = restore(load(tmp_path / "000001"), abstract(like))
    assert bits(actual) == bits(before)
    assert {x.sharding.memory_kind for x in (actual.opt_state[0].mu["w"], actual.opt_state[0].nu["w"])} == {
        "pinned_host" if then else "device"
    }


def test_values_are_those_at_the_call_though_the_next_update_reuses_the_buffers(tmp_path):
    live = state(1)
    # compiled beforehand, so that the next update comes at once
    bump = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0).lower(live).compile()
    with Checkpoints(tmp_path, CheckpointConfig(keep_best=0)) as checkpoints:
        checkpoints.save(1, live, {}, {})
        for _ in range(20):
            live = bump(live)
    path = tmp_path / "000001"
    assert bits(restore(load(path), abstract(state()))) == bits(state(1))


def test_a_restored_state_is_updated_in_place_though_its_memory_was_the_reader_s(tmp_path):
    """The CPU device takes the arrays that were read as they are; the update donates them, and their owner is long gone."""
    start = {"w": jnp.arange(1_000_000, dtype=jnp.float32), "step": jnp.int32(0)}
    with Checkpoints(tmp_path, CheckpointConfig(keep_best=0)) as checkpoints:
        checkpoints.save(1, start, {}, {})
    origin = load(tmp_path / "000001")
    address = origin.arrays["w"].ctypes.data
    live = restore(origin, abstract(start))
    assert origin.arrays == {}
    assert live["w"].unsafe_buffer_pointer() == address, "no copy"
    bump = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    for _ in range(3):
        gc.collect()
        np.full(1_000_000, 7, np.float32)  # takes memory that was freed too early
        live = bump(live)
    assert bits(live) == bits({"w": start["w"] + 3, "step": jnp.int32(3)})


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is that of the whole process")
def test_the_writer_gives_way_to_the_training(tmp_path, monkeypatch):
    real, nice = files.to_disk, set()

    def noted(*arguments):
        nice.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return real(*arguments)

    monkeypatch.setattr(files, "to_disk", noted)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    saved(tmp_path, 1)
    assert nice == {min(19, own + 10)} and os.getpriority(os.PRIO_PROCESS, 0) == own


def test_the_last_and_the_best_are_kept(tmp_path):
    saved(tmp_path / "large", 5, keep_last=1, keep_best=2, best_metric="reward")
    assert names(tmp_path / "large") == ["000002", "000004", "000005"], "9 and 7 are the largest of 3 9 5 7 1"
    saved(tmp_path / "small", 5, keep_last=2, keep_best=1, best_metric="-reward")
    assert names(tmp_path / "small") == ["000004", "000005"]
    saved(tmp_path / "none", 5, keep_last=2)
    assert names(tmp_path / "none") == ["000004", "000005"]
    with pytest.raises(
        CheckpointError, match=r"checkpoint.best_metric is 'rewrad', which this run does not measure; it has reward"
    ):
        saved(tmp_path / "wrong", 1, keep_best=1, best_metric="rewrad")


def test_the_abandoned_future_goes_and_its_origin_stays(tmp_path):
    checkpoints = saved(tmp_path, 4, keep_last=4)
    assert [path.name for path in checkpoints.drop_after(2)] == ["000003", "000004"]
    assert names(tmp_path) == ["000001", "000002"]


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x10
    file.write_bytes(content)


FAULTS = {"truncated": truncate, "flipped": flip, "missing": Path.unlink}
MESSAGES = {"truncated": "bytes; expected", "flipped": "has other bytes than were written", "missing": "is missing"}
VICTIMS = ["state/params/w/0.0", "state/params/w/.zarray", "state/_METADATA", "state/beta/0"]


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_file_is_named_and_the_checkpoint_before_it_is_used(tmp_path, fault, victim):
    checkpoints, warnings = saved(tmp_path), []
    FAULTS[fault](tmp_path / "000003" / victim)
    origin = newest_sound(checkpoints.folder, warnings.append) or pytest.fail("no checkpoint")
    assert len(warnings) == 1 and str(tmp_path / "000003" / victim) in warnings[0] and MESSAGES[fault] in warnings[0], (
        warnings
    )
    assert warnings[0].startswith("warning: ") and warnings[0].endswith("; trying the one before it")
    assert origin.path.name == "000002" and bits(restore(origin, abstract(state()))) == bits(state(2))


@pytest.mark.parametrize(
    ("fault", "message"), [("truncated", "not a readable manifest"), ("flipped", r"manifest.json is damaged")]
)
def test_a_damaged_manifest_is_noticed_too(tmp_path, fault, message):
    saved(tmp_path)
    FAULTS[fault](tmp_path / "000003" / "manifest.json")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "000003")
    (tmp_path / "000002" / "manifest.json").unlink()
    assert [path.name for path in files.complete(tmp_path)] == ["000001", "000003"]


def rewritten(path: Path, change) -> None:
    """The manifest with its content changed, and the hash of what it says now."""
    content = files.read_manifest(path)
    changed = change(content) or content
    files.write_manifest(path, changed)


def put(*keys, value):
    """Changes one value of a manifest's content; `...` removes it."""

    def change(content):
        inner = content
        for key in keys[:-1]:
            inner = inner[key]
        if value is ...:
            del inner[keys[-1]]
        else:
            inner[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("files", value=...), "its files is None; expected a mapping"),
        (put("format", value=...), "its format is None; expected a whole number"),
        (put("iteration", value="3"), "its iteration is '3'; expected a whole number"),
        (put("arrays", value=[]), r"its arrays is \[\]; expected a mapping"),
        (put("metrics", value=None), "its metrics is None"),
        (lambda content: [1], r"its format is \[1\]"),
        (put("files", "state/beta/0", value=7), "it lists 'state/beta/0' as 7; expected bytes and sha256"),
        (put("files", "state/beta/0", "bytes", value=-4), "it lists 'state/beta/0'"),
        (put("files", "../../elsewhere", value={"bytes": 1, "sha256": ""}), "it lists '../../elsewhere'"),
        (put("files", "state/beta/0", value=...), r"tensor 'beta' is not float32 \[\]"),
        (put("arrays", "params/w", value=[[8, -6], "float32"]), r"tensor 'params/w' is \[\[8, -6\]"),
        (put("arrays", "params/w", value=[[10**9, 10**9], "float32"]), r"tensor 'params/w' is"),
        (put("arrays", "params/w", value=[[8, "6"], "float32"]), r"tensor 'params/w' is"),
        (put("arrays", "params/w", value=[8, "float32"]), r"tensor 'params/w' is"),
        (put("arrays", "params/w", value=[[8, 6], "float33"]), r"tensor 'params/w' is"),
        (put("arrays", "params/w", value=[[8, 6], "object"]), r"tensor 'params/w' is"),
        (put("arrays", "params/w", value=[[48], "float32"]), r"tensor 'params/w' is not float32 \[48\]"),
    ],
)
def test_a_manifest_that_states_what_cannot_be_is_one_error(tmp_path, change, message):
    """Written by another program, or by hand: its own hash is right."""
    saved(tmp_path, 1)
    rewritten(tmp_path / "000001", change)
    with pytest.raises(CheckpointError, match=rf"damaged: .*{message}"):
        load(tmp_path / "000001")


@pytest.mark.parametrize("part", ["config", "identity", "next_prompt", "metrics_bytes"])
def test_a_checkpoint_that_is_none_of_a_run_is_not_continued(tmp_path, part):
    checkpoints = saved(tmp_path / "checkpoints", 1)
    parts = {"config": {}, "identity": {"positions": ""}, "next_prompt": 0, "metrics_bytes": 0}
    rewritten(tmp_path / "checkpoints" / "000001", lambda content: content | parts)
    assert find_origin("auto", False, tmp_path, checkpoints, print)
    rewritten(tmp_path / "checkpoints" / "000001", put(part, value=...))
    with pytest.raises(CheckpointError, match=rf"manifest.json is damaged: its {part} is None; expected a"):
        find_origin("auto", False, tmp_path, checkpoints, print)


DEEP = "[" * 100_000 + "]" * 100_000


def test_what_resume_cannot_be_is_named(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"^resume is True; expected 'auto', or the folder of a run or a checkpoint"
    ):
        find_origin(True, False, tmp_path, Checkpoints(tmp_path, CheckpointConfig()), print)  # pyright: ignore[reportArgumentType] (as in transformers)


def test_json_nested_too_deeply_is_one_error_wherever_it_stands(tmp_path):
    saved(tmp_path, 1)
    (tmp_path / "000001" / "manifest.json").write_text(f'{{"sha256": "", "content": {DEEP}}}')
    with pytest.raises(CheckpointError, match=r"not a readable manifest \(ValueError: nested too deeply\)"):
        load(tmp_path / "000001")
    for name in ("config.json", "evaluation.json", "provenance.json", "state.json", "run.json", "rows.jsonl"):
        (tmp_path / name).write_text(DEEP)
    reads = {
        "config.json": lambda: read_config(tmp_path),
        "evaluation.json": lambda: read_report(tmp_path),
        "provenance.json": lambda: read_set(tmp_path, "train"),
        "state.json": lambda: load_prompts(PromptsConfig(source=str(tmp_path))),
        "rows.jsonl": lambda: read_rows(tmp_path / "rows.jsonl"),
    }
    for name, read in reads.items():
        with pytest.raises(ValueError, match="nested too deeply"):
            print(name, read())
    assert read_record(tmp_path)["finished"] is None


def test_when_none_is_sound_the_run_does_not_begin_again_by_itself(tmp_path):
    checkpoints, warnings = saved(tmp_path), []
    for path in tmp_path.iterdir():
        flip(path / "state/beta/0")
    for _ in range(2):  # a job script tries again
        with pytest.raises(
            CheckpointError, match=r"none of the 3 checkpoints in .* is sound; start again with --restart"
        ):
            newest_sound(checkpoints.folder, warnings.append)
    assert len(warnings) == 6


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_any_bytes_in_any_file_are_noticed(tmp_path, data):
    folder = tmp_path / "once"
    path = folder / "000001"
    if not folder.exists():
        saved(folder, 1)
    every = [*files.read_manifest(path)["files"], "manifest.json"]
    file = path / data.draw(st.sampled_from(every))
    original = file.read_bytes()
    changed = data.draw(st.one_of(st.binary(max_size=300), st.just(original[:-1]), st.just(original + b" \n")))
    try:
        file.write_bytes(changed)
        if changed in (original, original + b" \n") and (file.name == "manifest.json" or changed == original):
            load(path)
        else:
            with pytest.raises(CheckpointError, match="damaged"):
                load(path)
    finally:
        file.write_bytes(original)


def test_a_write_that_fails_leaves_the_checkpoints_before_it_and_no_trace(tmp_path, monkeypatch):
    checkpoints = saved(tmp_path, 2)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(
            CheckpointError, match=r"iteration 3 could not be written to .*No space left on device.*MB free"
        ) as caught,
        Checkpoints(tmp_path, CheckpointConfig(keep_best=0)) as writing,
    ):
        writing.save(3, state(3), {}, {})
    assert caught.value.__notes__ == [
        f"the newest complete checkpoint is {tmp_path / '000002'}: continue with --resume auto"
    ]
    assert names(tmp_path) == ["000001", "000002"]
    assert (newest_sound(checkpoints.folder, pytest.fail) or pytest.fail("none"))[0].name == "000002"


def test_orbax_alone_reads_a_checkpoint_and_writes_the_same_files(tmp_path):
    saved(tmp_path, 1)
    arrays = {name: np.asarray(leaf) for name, leaf in named(state(1)).items()}
    with ocp.PyTreeCheckpointer(use_ocdbt=False) as plain:
        actual = plain.restore(tmp_path / "000001" / "state")
    assert sorted(actual) == sorted(arrays)
    for name, array in arrays.items():
        assert actual[name].dtype == array.dtype and np.array_equal(actual[name], array), name
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False)
    with ocp.Checkpointer(handler) as plain:
        plain.save(tmp_path / "plain", args=ocp.args.PyTreeSave(arrays))
    ours, theirs = (
        {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "000001" / "state", tmp_path / "plain")
    )
    assert theirs.keys() == ours.keys()
    of_a_moment = {"_CHECKPOINT_METADATA", "commit_success.txt"}  # times and paths
    assert all(ours[name].read_bytes() == theirs[name].read_bytes() for name in ours if name.name not in of_a_moment)


def test_a_half_written_checkpoint_is_never_picked_and_is_cleared(tmp_path):
    checkpoints = saved(tmp_path, 1)
    (tmp_path / "000001").rename(tmp_path / ".unfinished-000002")
    assert newest_sound(checkpoints.folder, pytest.fail) is None
    files.clear_leftovers(tmp_path)
    assert names(tmp_path) == []


def test_a_state_of_another_shape_is_refused_by_the_tensor_s_name(tmp_path):
    saved(tmp_path, 1)
    path, other = tmp_path / "000001", state()
    other["params"]["w"] = jnp.zeros((8, 7))
    with pytest.raises(
        CheckpointError, match=r"'params/w' has shape \[8, 6\] and dtype float32; this run needs shape \[8, 7\]"
    ):
        restore(load(path), abstract(other))
    del other["params"]["w"]
    with pytest.raises(CheckpointError, match=r"'params/w' .* this run needs nothing of this name"):
        restore(load(path), abstract(other))
    with pytest.raises(CheckpointError, match=r"'more' is not in the checkpoint"):
        restore(load(path), abstract(state() | {"more": jnp.zeros(2)}))


def test_parameters_alone_load_as_weights(tmp_path):
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), abstract_params(TINY))
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(keep_best=0))
    with checkpoints:
        checkpoints.save(7, init_state(params, config().learning()), {"architecture": dataclasses.asdict(TINY)}, {})
    architecture, actual = load_checkpoint(tmp_path / "000007", jnp.float32)
    assert (
        architecture == TINY
        and jax.tree.structure(actual) == jax.tree.structure(params)
        and bits(actual) == bits(params)
    )
    moments = next(tmp_path.glob("000007/state/opt_state/**/mu/wte/embedding/0.0"))
    flip(moments)
    load_checkpoint(tmp_path / "000007", jnp.float32)  # they are not read
    half = load_checkpoint(tmp_path / "000007", jnp.bfloat16)[1]
    assert bits(half) == bits(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    flip(tmp_path / "000007/state/params/wte/embedding/0.0")
    with pytest.raises(CheckpointError, match=r"params/wte/embedding/0\.0 has other bytes than were written"):
        load_checkpoint(tmp_path / "000007", jnp.float32)


def test_state_saved_on_one_device_is_restored_onto_four_and_back(tmp_path):
    saved(tmp_path, 1)
    program = textwrap.dedent("""
        import sys, jax, numpy as np, jax.numpy as jnp
        from pathlib import Path
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        from jax_grpo.run.checkpoints import Checkpoints, content_hash, load, restore
        from jax_grpo.config.sections import CheckpointConfig
        folder = Path(sys.argv[1])
        mesh = Mesh(np.array(jax.devices()), ("data",))
        rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
        like = {"params": {"w": jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=rows),
                           "half": jax.ShapeDtypeStruct((5,), jnp.bfloat16, sharding=whole)},
                "beta": jax.ShapeDtypeStruct((), jnp.float32, sharding=whole),
                "step": jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)}
        state = restore(load(folder / "000001"), like)
        assert len(jax.devices()) == 4 and state["params"]["w"].sharding == rows
        with Checkpoints(folder, CheckpointConfig(keep_best=0)) as checkpoints:
            checkpoints.save(2, state, {}, {})
        print(content_hash(state))
    """)
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", program, str(tmp_path)]
    out = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=PATIENCE_S, check=False)
    assert out.returncode == 0, out.stderr
    assert out.stdout.strip() == content_hash(state(1))
    back = restore(load(tmp_path / "000002"), abstract(state()))
    assert bits(back) == bits(state(1))


def test_the_manifest_lists_every_file(tmp_path):
    saved(tmp_path, 1)
    path = tmp_path / "000001"
    present = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert present == {*json.loads((path / "manifest.json").read_text())["content"]["files"], "manifest.json"}
