"""Image volumes are used where the API server keeps them. The cluster of the tests is too old to mount one: the
question and the manifest are tested, not the mount.
"""

import json
from typing import Any

import pytest

from forge_server.scheduler.kubernetes.client import ApiError, Pods
from forge_server.scheduler.kubernetes.volumes import ImageVolumes

MANIFEST = {"spec": {"volumes": [{"name": "forge", "image": {"reference": "x", "pullPolicy": "Never"}}]}}
DROPPED = {"spec": {"volumes": [{"name": "forge", "emptyDir": {}}]}}


class Answers(Pods):
    """An API server that gives one answer after the other."""

    def __init__(self, *answers: object) -> None:
        self.api, self.namespace, self.answers = None, "forge", list(answers)

    async def ask(self, call: Any, *words: Any, **options: Any) -> bytes:
        assert options == {"dry_run": "All"}
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return json.dumps(answer).encode()


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ([MANIFEST], [True, True]),
        ([DROPPED], [False, False]),
        ([ApiError(422, "Invalid", "subPath: Forbidden")], [False, False]),
        ([ApiError(0, "", "away"), MANIFEST], [False, True]),
        ([ApiError(403, "Forbidden", "exceeded quota: q"), DROPPED], [False, False]),
    ],
)
async def test_the_api_server_is_asked_until_it_has_answered(
    answers: list[object], found: list[bool]
) -> None:
    volumes = ImageVolumes(Answers(*answers), wanted=True)
    assert [await volumes.usable(lambda: MANIFEST) for _ in found] == found


async def test_it_is_not_asked_when_they_are_not_wanted() -> None:
    assert not await ImageVolumes(Answers(), wanted=False).usable(lambda: MANIFEST)
