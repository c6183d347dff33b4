"""Rows of other trainers, one module per target: pure functions from a trained rollout to rows as it reads
them.

Every mapping keeps the same promises. Ids, mask and logprobs are those of the sample, unchanged; a logprob is
0 where the mask is 0. The rows of a rollout follow each other, in the order of their last trained call, and
each has a trained token. What is split into prompt and response is split at ``prompt_len``, the first trained
token. What a row does not hold was not recorded: nothing is made up.
"""

from collections.abc import Callable, Iterator

from forge_server.export.mappings import areal, prime_rl, skyrl, slime, tinker, trl, verl, verl_v1
from forge_server.export.mappings.source import Row, TrainedRollout

MAPPINGS: dict[str, Callable[[TrainedRollout], Iterator[Row]]] = {
    "verl": verl.rows,
    "verl-v1": verl_v1.rows,
    "prime-rl": prime_rl.rows,
    "skyrl": skyrl.rows,
    "slime": slime.rows,
    "trl": trl.rows,
    "tinker": tinker.rows,
    "areal": areal.rows,
}
"""By the name of the export format."""
