"""Advantages per rollout of batches, and why a batch is refused; runs in the trainer's environment.

python trainer_advantages.py K BATCH_FILE... < ESTIMATORS_JSON > RESULTS_JSON
"""

import json
import sys
from pathlib import Path

from forge_server.trainer import config, platform
from forge_server.trainer.batch import read
from forge_server.trainer.errors import BatchInvalid

if __name__ == "__main__":
    platform.start("cpu")
    from forge_server.trainer import advantage

    sections = {}
    for name in json.load(sys.stdin):
        estimator, *more = name.split()  # an estimator, and overrides that go with it
        overrides = [f"algorithm.adv_estimator={estimator}", *more]
        sections[name] = config.check(overrides, device="cpu").algorithm
    results: list[dict[str, list[float]] | str] = []
    for path in sys.argv[2:]:
        try:
            batch = read(Path(path).read_bytes(), k=int(sys.argv[1]))
        except BatchInvalid as error:
            results.append(str(error))
            continue
        results.append(
            {name: advantage.per_rollout(batch, section).tolist() for name, section in sections.items()}
        )
    json.dump(results, sys.stdout)
