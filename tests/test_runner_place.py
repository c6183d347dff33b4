"""Where an attempt's things are put in a pod."""

import pytest

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
