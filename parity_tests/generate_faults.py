"""What share of faults that nobody chose do the tests see? Draws them from a table of operators, room by room, and tries each.

    python parity_tests/generate_faults.py --out docs/results/faults --count 6          # six a room, in a copy of this tree
    python parity_tests/generate_faults.py --out docs/results/faults --again            # those that survived, in the code as it is

A fault is one small change of one expression in the rooms where numbers are made (`ROOMS`). It is drawn by a hash of the seed, the
file, the function and the change, so that code that changes elsewhere draws the same faults. It counts as seen when one of its
room's tests is red (default tests, `pytest -x`, one process), or takes so long that it hangs. Faults of the same bytecode are
none. `faults.json` holds what was tried; `equivalent` of a fault is written by hand: why no test can see it. `README.md` is its
table. Not collected by pytest: it runs pytest. `mutations.py` is the list of faults that people thought of.
"""

import argparse
import ast
import copy
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", tempfile.mkdtemp(prefix="jax_grpo_faults_"))  # shared by all faults
for _name in ("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"):
    os.environ.setdefault(_name, "0")

# Most are not used here: beside those of `mutations`, the tests' slowest imports, made once for all children.
import chess.svg  # noqa: E402, F401
import hypothesis  # noqa: E402, F401
import pydantic  # noqa: E402, F401
import scipy.stats  # noqa: E402, F401
import transformers  # noqa: E402
from mutations import start_pytest  # noqa: E402
from rich import progress  # noqa: E402, F401

_ = transformers.PreTrainedTokenizerFast, transformers.GPT2LMHeadModel  # imported when they are named

ROOT = Path(__file__).resolve().parent.parent

OPTIONS = "parity::test_float64_every_option_of_the_loss"
# Files of a room, and the test files that look at it, those first that soon see most; of a slow one some test before the others.
ROOMS: dict[str, tuple[str, str]] = {
    "advantages": ("advantages.py", f"twins advantages advantage_methods {OPTIONS} settings_act"),
    "objective": (
        "objective/__init__.py objective/masking.py objective/covariance.py objective/surrogates.py",
        f"objective kl_control surrogates covariance {OPTIONS} entropy_target settings_act",
    ),
    "loss": (
        "loss.py",
        f"covariance flops empty_steps {OPTIONS} entropy_target moving_reference minibatches",
    ),
    "optimiser": ("optimiser.py", "twins update empty_steps parity_steps moving_reference"),
    "batch": ("batch.py", f"minibatches update {OPTIONS} micro_batches refill train"),
    "sampling": ("rollout/sampling.py", "random_numbers rollout stop_tokens torch_ref_transformers mixed"),
    "decoding": (
        "rollout/decoding.py rollout/generate.py",
        "random_numbers rollout stop_tokens stop_rules own_prompts mixed episodes",
    ),
    "episodes": ("rollout/episodes.py rollout/turns.py rollout/texts.py", "episodes own_episodes episode_runs evaluation game"),
    "curriculum": ("prompts/curriculum.py iteration/draw.py", "curriculum refill parity_draws train"),
    "rewards": (
        "tasks/rewards.py tasks/base.py tasks/shared.py",
        "own_rewards tasks messages own_prompts own_rewards_trl mixed guards",
    ),
    "iteration": (
        "iteration/metrics.py iteration/refill.py iteration/reward.py",
        "minibatches flops refill empty_steps parity_draws train own_rewards episode_runs",
    ),
    "lm_head": (
        "lm_head/loops.py lm_head/chunked.py lm_head/materialised.py lm_head/tiles.py",
        f"lm_head lm_head_fused soft_moves {OPTIONS} lm_head_compiled",
    ),
    "model": (
        "model/decoder.py model/attention.py model/layers.py model/families.py model/flops.py",
        f"model flops families rollout parity_families weights {OPTIONS} torch_ref_families gguf guards episodes",
    ),
    "statistics": ("evaluate/statistics.py", "match arena evaluation strength"),
}  # fmt: skip

COMPARED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
            ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip
COMBINED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
            ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift}  # fmt: skip
NAMES = {"minimum": "maximum", "min": "max", "any": "all", "sum": "mean", "floor": "ceil", "zeros": "ones", "zeros_like":
         "ones_like", "argmax": "argmin", "cumsum": "cumprod", "expm1": "exp", "log1p": "log", "nanmedian": "nanmean"}  # fmt: skip
NAMES |= {value: key for key, value in NAMES.items()}
LEFT_OUT = {"stop_gradient", "abs", "square", "sqrt", "exp", "log", "clip", "astype", "where", "masked", "flip", "sort"}


def _comparison(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            yield _changed(node, ops=[*node.ops[:i], COMPARED[type(operator)](), *node.ops[i + 1 :]])


def _arithmetic(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in COMBINED:
        yield _changed(node, op=COMBINED[type(node.op)]())


def _scale_left_out(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Div):
        yield node.left


def _negation_left_out(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.UnaryOp) and not isinstance(node.operand, ast.Constant):
        yield node.operand


def _and_or(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.BoolOp):
        yield _changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())


def _constant(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        value = node.value
        yield ast.Constant(
            not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value * 2 or 1.0
        )


def _other_function(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and (name := _called(node)) in NAMES:
        other = NAMES[name]
        yield _changed(
            node, func=ast.Name(other) if isinstance(node.func, ast.Name) else _changed(node.func, attr=other)
        )


def _function_left_out(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and _called(node) in LEFT_OUT:
        if _called(node) == "where" and len(node.args) == 3:
            yield node.args[1]
        elif _called(node) == "astype" and isinstance(node.func, ast.Attribute):
            yield node.func.value
        elif node.args and _called(node) != "astype":
            yield node.args[0]


def _branches_swapped(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and _called(node) in ("where", "select") and len(node.args) == 3:
        yield _changed(node, args=[node.args[0], node.args[2], node.args[1]])
    if isinstance(node, ast.IfExp):
        yield _changed(node, body=node.orelse, orelse=node.body)


def _argument_left_out(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call):
        for i in range(len(node.keywords)):
            yield _changed(node, keywords=[*node.keywords[:i], *node.keywords[i + 1 :]])


def _axis(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call):
        for i, keyword in enumerate(node.keywords):
            if keyword.arg == "axis":
                other = ast.Constant(0 if ast.unparse(keyword.value) != "0" else -1)
                yield _changed(node, keywords=[*node.keywords[:i], ast.keyword("axis", other), *node.keywords[i + 1 :]])


def _bound_left_out(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Slice):
        for bound in ("lower", "upper"):
            if getattr(node, bound) is not None:
                yield _changed(node, **{bound: None})


def _condition_turned(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield _changed(node, test=ast.UnaryOp(ast.Not(), node.test))


OPERATORS: dict[str, Callable[[ast.AST], Iterator[ast.AST]]] = {
    "comparison": _comparison,
    "arithmetic": _arithmetic,
    "factor left out": _scale_left_out,
    "negation left out": _negation_left_out,
    "and for or": _and_or,
    "constant": _constant,
    "other function": _other_function,
    "function left out": _function_left_out,
    "branches swapped": _branches_swapped,
    "argument left out": _argument_left_out,
    "axis": _axis,
    "bound left out": _bound_left_out,
    "condition turned": _condition_turned,
}


def _changed(node: Any, **fields: Any) -> Any:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


class Fault(NamedTuple):
    """One change of one expression in a file of `jax_grpo`."""

    room: str
    file: str
    function: str
    operator: str
    line: str  # of the code where the expression begins
    column: int  # in it
    right: str
    wrong: str
    number: int  # of the line in its file
    source: str  # of the whole file with the fault in it

    @property
    def key(self) -> str:
        """The same wherever the line stands in its file."""
        return hashlib.sha256("\0".join(map(str, self[:8])).encode()).hexdigest()[:12]


def _nodes(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Every node where a fault may be, with its function: not of texts, annotations, decorators, imports, errors, asserts."""

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, Any]]:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Raise | ast.Assert | ast.JoinedStr):
            return
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
        yield function, node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, function)

    yield from walk(tree, "")


def faults_of(room: str, root: Path) -> list[Fault]:
    """Every fault of a room whose bytecode differs from the code's, each once."""
    actual: dict[str, Fault] = {}
    for file in ROOMS[room][0].split():
        if not (path := root / "jax_grpo" / file).exists():
            continue
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines(keepends=True)
        starts = [0]
        for line in lines:
            starts.append(starts[-1] + len(line.encode()))
        code, text = _bytecode(source), source.encode()
        for function, node in _nodes(ast.parse(source)):
            for operator, apply in OPERATORS.items():
                for new in apply(node):
                    faulty, shown = _spliced(text, starts, node, new)
                    try:
                        same = _bytecode(faulty) == code
                    except SyntaxError:
                        continue
                    if not same:
                        line = lines[node.lineno - 1]
                        place = line.strip(), node.col_offset - (len(line) - len(line.lstrip()))
                        fault = Fault(room, file, function, operator, *place, *shown, node.lineno, faulty)
                        actual.setdefault(fault.key, fault)
    return list(actual.values())


def _spliced(text: bytes, starts: list[int], node: Any, new: ast.AST) -> tuple[str, tuple[str, str]]:
    """The source with another node in the place of one, and both in a line each. A statement's head alone is replaced."""
    if isinstance(node, ast.If | ast.While):
        node, new = node.test, new.test  # pyright: ignore[reportAttributeAccessIssue]
    begin = starts[node.lineno - 1] + node.col_offset
    end = starts[node.end_lineno - 1] + node.end_col_offset
    right = text[begin:end].decode()
    wrong = ast.unparse(ast.fix_missing_locations(new))
    placed = wrong if isinstance(node, ast.AugAssign | ast.Slice | ast.Constant) else f"({wrong})"
    faulty = (text[:begin] + placed.encode() + text[end:]).decode()
    return faulty, (" ".join(right.split()), wrong)


def _bytecode(source: str) -> list[Any]:
    """What is run, without line numbers and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for field in ("annotation", "returns"):
            if getattr(node, field, None) is not None and not isinstance(node, ast.AnnAssign):
                setattr(node, field, None)

    def plain(code: Any) -> list[Any]:
        constants = [plain(c) if hasattr(c, "co_code") else repr(c) for c in code.co_consts]
        return [code.co_code, constants, code.co_names, code.co_varnames]

    return plain(compile(tree, "faulty", "exec", optimize=2))


def drawn(room: str, root: Path, count: int, seed: int) -> list[Fault]:
    """Some of a room's faults: those whose hashes with the seed are least."""
    order = sorted(faults_of(room, root), key=lambda fault: hashlib.sha256(f"{seed} {fault.key}".encode()).digest())
    return order[:count]


def tests_of(room: str) -> list[str]:
    """The room's tests, as pytest names them in `parity_tests`."""
    files = {path.stem: path.relative_to(ROOT / "parity_tests") for path in (ROOT / "parity_tests").glob("*/test_*.py")}
    named = [name.partition("::") for name in ROOMS[room][1].split()]
    return [f"{files[f'test_{file}']}{mark}{test}" for file, mark, test in named]


def run_tests(tests: Sequence[str], tree: Path, limit_s: float) -> tuple[str | None, float]:
    """The first red test, `it hangs`, or None where all are green; and the seconds that they took."""
    started = time.monotonic()
    child = start_pytest(tests, tree, own_group=True)
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() - started > limit_s:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "it hangs", time.monotonic() - started
        time.sleep(0.1)
    output, seconds = (tree / "pytest.log").read_text(errors="replace"), time.monotonic() - started
    red = re.search(r"^(?:FAILED|ERROR) (?:parity_tests/)?(.+?)(?: - .*)?$", output, re.MULTILINE)
    if red is None and os.waitstatus_to_exitcode(ended[1]) != 0:
        return f"the process ended ({os.waitstatus_to_exitcode(ended[1])})", seconds
    return (red[1] if red else None), seconds


def attempt(fault: Fault, tree: Path, limit_s: float) -> tuple[str | None, float]:
    """`run_tests` with the fault in its file."""
    file = tree / "jax_grpo" / fault.file
    sound = file.read_text(encoding="utf-8")
    file.write_text(fault.source, encoding="utf-8")
    try:
        return run_tests(tests_of(fault.room), tree, limit_s)
    finally:
        file.write_text(sound, encoding="utf-8")


def page(records: dict[str, dict]) -> str:
    """The table by room, and the survivors."""
    names = ["room", "faults", "of them equivalent", "seen before", "survived before", "seen now", "survive now"]
    head = f"| {' | '.join(names)} |\n|{'---|' * len(names)}\n"
    rows, totals = [], [0] * 6
    for room in ROOMS:
        own = [r for r in records.values() if r["room"] == room]
        if own:
            real = [r for r in own if not r.get("equivalent")]
            before, now = (sum(r[when] is not None for r in real) for when in ("before", "now"))
            counts = [len(own), len(own) - len(real), before, len(real) - before, now, len(real) - now]
            totals = [a + b for a, b in zip(totals, counts, strict=True)]
            rows.append(f"| {room} | {' | '.join(map(str, counts))} |")
    rows.append(f"| **all** | {' | '.join(map(str, totals))} |")
    reported = "Before: in the code as it was when the fault was drawn (`at`). Now: those that were seen are not tried again.\n"
    parts = [__doc__ or "", "## By room\n", reported, head + "\n".join(rows) + "\n"]
    for title, shown in (
        ("Survive", [r for r in records.values() if r["now"] is None and not r.get("equivalent")]),
        ("Seen since", [r for r in records.values() if r["before"] is None and r["now"] is not None]),
        ("Equivalent", [r for r in records.values() if r.get("equivalent")]),
    ):
        lines = []
        for r in shown:
            what = f"- `{r['file']}`, `{r['function']}`, `{r['line']}`: `{r['right']}` became `{r['wrong']}`."
            lines.append(f"{what} {r.get('equivalent') or r['now'] or ''}".rstrip())
        parts += [f"## {title}\n", "\n".join(lines or ["None."]) + "\n"]
    return "# Faults that nobody chose\n\n" + "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True, type=Path, help="folder of faults.json and README.md")
    parser.add_argument("--rooms", default=",".join(ROOMS), help="with commas between (default: all)")
    parser.add_argument("--count", type=int, default=6, help="faults a room (default: 6)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=900, metavar="S", help="seconds after which a fault hangs (900)")
    parser.add_argument(
        "--again", action="store_true", help="try those of faults.json that survived and are not equivalent"
    )
    parser.add_argument("--list", action="store_true", help="only say which faults would be tried")
    arguments = parser.parse_args()
    store = arguments.out / "faults.json"
    records: dict[str, dict] = json.loads(store.read_text()) if store.exists() else {}
    arguments.out.mkdir(parents=True, exist_ok=True)

    def save() -> None:  # after each: an interrupted run keeps what it saw
        store.write_text(json.dumps(records, indent=1) + "\n")
        (arguments.out / "README.md").write_text(page(records))

    requested = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(requested, capture_output=True, text=True, check=True).stdout.strip()
    sound: set[str] = set()  # tests that were seen green without a fault
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "copy"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__"))
        for room in arguments.rooms.split(","):
            if arguments.again:
                left = [
                    k for k, r in records.items() if r["room"] == room and r["now"] is None and not r.get("equivalent")
                ]
                by_key = {fault.key: fault for fault in faults_of(room, tree)}
                for key in left:
                    if key not in by_key:
                        print(f"{room}: the line of {records[key]['line']!r} has changed; draw it anew", flush=True)
                todo = [by_key[key] for key in left if key in by_key]
            else:
                todo = [
                    fault for fault in drawn(room, tree, arguments.count, arguments.seed) if fault.key not in records
                ]
            if arguments.list:
                print(f"{room}: {len(faults_of(room, tree))} faults")
                for fault in todo:
                    print(f"  {fault.file}:{fault.number} {fault.operator}: {fault.right}  ->  {fault.wrong}")
            if not todo or arguments.list:
                continue
            for fault in todo:
                red, seconds = attempt(fault, tree, arguments.limit)
                if red and "test_" in red and red not in sound:
                    if run_tests([red], tree, arguments.limit)[0]:
                        raise SystemExit(f"{red} is red without any fault")
                    sound.add(red)
                print(
                    f"{fault.file}:{fault.number} {fault.right} -> {fault.wrong}: {red or 'SURVIVES'} ({seconds:.0f} s)",
                    flush=True,
                )
                fields = {
                    name: getattr(fault, name)
                    for name in ("room", "file", "function", "operator", "line", "right", "wrong")
                }
                tried = {"before": red, "at": commit, **fields}
                records[fault.key] = tried | records.get(fault.key, {}) | {"now": red}
                save()
    if not arguments.list:
        save()


if __name__ == "__main__":
    main()
