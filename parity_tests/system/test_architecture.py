"""The house is as its pages say: the drawing is of these imports, and few modules stand at the door."""

import subprocess
import sys

from architecture import PAGE, ROOT, page, reduced

from jax_grpo.names import COMMANDS


def test_the_drawing_is_of_the_imports_as_they_are():
    assert PAGE.read_text() == page(), "run `python parity_tests/architecture.py`"


def test_an_arrow_that_a_longer_way_stands_for_is_left_out():
    actual = {"train": {"trainer", "update", "config"}, "trainer": {"update", "config"}, "update": {"config"}}
    assert reduced(actual) == {"train": {"trainer"}, "trainer": {"update"}, "update": {"config"}}


def test_every_module_but_the_iterations_own_is_in_a_room_that_says_what_it_owns():
    house = ROOT / "jax_grpo"
    own = {file.stem for file in house.glob("*.py") if not file.name.startswith("__")} - COMMANDS.keys()
    assert len(own) <= 12, own
    for room in (path for path in house.iterdir() if path.is_dir() and any(path.glob("*.py"))):
        text = (room / "__init__.py").read_text()
        assert text.startswith('"""') and "now" in text.split('"""')[1], f"{room.name}: what it owns and does not know"


def test_the_trainer_is_imported_without_python_chess():
    code = "import jax_grpo.train, sys; sys.exit('chess' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
