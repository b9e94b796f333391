"""The house is as its pages say: the drawing is of these imports, and few modules stand at the door."""

from architecture import PAGE, ROOT, page, reduced


def test_the_drawing_is_of_the_imports_as_they_are():
    assert PAGE.read_text() == page(), "run `python parity_tests/architecture.py`"


def test_an_arrow_that_a_longer_way_stands_for_is_left_out():
    found = {"train": {"trainer", "update", "config"}, "trainer": {"update", "config"}, "update": {"config"}}
    assert reduced(found) == {"train": {"trainer"}, "trainer": {"update"}, "update": {"config"}}


def test_every_module_but_the_iterations_own_is_in_a_room_that_says_what_it_owns():
    house = ROOT / "jax_grpo"
    assert len([file for file in house.glob("*.py") if file.name != "__init__.py"]) <= 12
    for room in (path for path in house.iterdir() if path.is_dir() and any(path.glob("*.py"))):
        text = (room / "__init__.py").read_text()
        assert text.startswith('"""') and "now" in text.split('"""')[1], f"{room.name}: what it owns and does not know"
