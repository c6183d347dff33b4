"""Where an attempt's things are put in a pod."""

import pytest

from forge_server.runner.confine import in_the_way
from forge_server.runner.place import refuse_system


@pytest.mark.parametrize(
    "work", ["/", "/usr", "/etc/", "/tests", "/logs/x", "/proc/1", "/forge/env", "//", "/usr/.."]
)
def test_a_work_folder_is_not_the_systems_nor_ours(work):
    with pytest.raises(ValueError, match="holds more than the task"):
        refuse_system(work)


@pytest.mark.parametrize(
    "work", ["/workspace", "/app", "/root", "/home/me", "/usr/src/app", "/testsuite", "/srv"]
)
def test_any_other_is_the_tasks(work):
    refuse_system(work)


PYTHON = "/opt/python/3.12"


@pytest.mark.parametrize(
    ("work", "place"),
    [
        ("/usr/games/x", "/usr"),
        ("/lib/x", "/lib"),
        ("/etc/ssl/x", "/etc/ssl"),
        ("/etc/passwd", "/etc/passwd"),
        ("/opt/python", PYTHON),
        ("/opt/python/3.12/app", PYTHON),
        ("/usr/src/kept", "/usr/src/kept/data"),
        ("/usr/src/app", "/usr/src/kept/data"),
    ],
)
def test_what_a_sandbox_shows_is_in_the_way_of_a_work_folder(work, place):
    assert in_the_way(work, [PYTHON, "/usr/src/kept/data"]) == place


@pytest.mark.parametrize(
    "work", ["/usr/src/app", "/home/agent", "/opt/app", "/opt/python/3.12.1", "/etc/app", "/root"]
)
@pytest.mark.parametrize("prefix", ["/usr", "/usr/local", PYTHON])
def test_nothing_is_in_the_way_of_others(work, prefix):
    assert in_the_way(work, [prefix]) == ""
