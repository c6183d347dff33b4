"""The short half of the table of faults; the long half is ``make prove-3``."""

import asyncio
from pathlib import Path

import kube_faults
import pytest
from kube.cluster import Cluster

pytestmark = pytest.mark.kubernetes


async def test_faults_of_attempts(cluster: Cluster, tmp_path: Path) -> None:
    """All at the same time."""

    async def one(number: int, name: str) -> None:
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            async with asyncio.timeout(500):
                print(f"{name}: {await kube_faults.APART[name](cluster, folder)}")
        except Exception as error:
            error.add_note(name)
            raise

    done = await asyncio.gather(
        *(one(number, name) for number, name in enumerate(kube_faults.APART)), return_exceptions=True
    )
    if failed := [error for error in done if isinstance(error, Exception)]:
        raise ExceptionGroup("faults", failed)


@pytest.mark.parametrize("name", kube_faults.WHOLE)
async def test_faults_of_the_cluster(cluster: Cluster, tmp_path: Path, name: str) -> None:
    print(f"{name}: {await kube_faults.WHOLE[name](cluster, tmp_path)}")
