"""The demo's tasks: reproducible, disjoint between splits, valid in the local task format."""

from collections import Counter

import pytest

from forge_server.demo.tasks import SHARES, VALUES, draw, values_of
from forge_server.tasks.lines import read_line


def test_the_same_seed_draws_the_same_tasks() -> None:
    assert draw("train", 20, 7) == draw("train", 20, 7)
    assert draw("train", 20, 7)[:10] == draw("train", 10, 7)
    assert draw("train", 20, 7) != draw("train", 20, 8)


def test_no_number_occurs_in_two_splits() -> None:
    seen = Counter(value for split in SHARES for value in values_of(split))
    assert set(seen) == set(VALUES)
    assert max(seen.values()) == 1
    for split in SHARES:
        own = set(values_of(split))
        assert all(set(task.files.values()) <= own for task in draw(split, 200, 3))


def test_every_split_shows_every_digit_in_every_place() -> None:
    """What is learned on one split can be known on another."""
    for split in SHARES:
        for place in range(3):
            assert {value[place] for value in values_of(split)} == set("0123456789")


def test_a_task_can_only_be_solved_by_reading_the_file_that_it_names() -> None:
    for task in draw("heldout", 200, 1):
        assert task.files[task.path] == task.answer
        assert list(task.files.values()).count(task.answer) == 1
        name = task.path.partition("/")[2]
        assert sum(path.endswith(f"/{name}") for path in task.files) == 2  # the folder counts too
        assert task.answer not in task.instruction


def test_a_task_is_a_line_of_the_local_format() -> None:
    task = draw("train", 1, 1)[0]
    read = read_line(task.line(), "here")
    assert read.instruction == task.instruction
    assert {file.path: file.content.decode() for file in read.files} == task.files
    assert read.gold
    with pytest.raises(ValueError, match="no split"):
        draw("other", 1, 1)
