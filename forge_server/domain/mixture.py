"""A mixture of harnesses as people write it: ``NAME=WEIGHT`` each, and the shares that the weights come to. Pure."""

import math
from collections.abc import Iterable, Mapping

from forge_server.domain.errors import InvalidRequest


def read(words: Iterable[str]) -> dict[str, float]:
    """Weights by harness. Raises InvalidRequest naming the word that is none."""
    weights: dict[str, float] = {}
    for word in words:
        name, _, text = word.rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            name, weight = "", 0.0
        if not name:
            raise InvalidRequest(f"{word!r} is not NAME=WEIGHT", mend="write react=2, for example")
        if not 0 < weight < math.inf:
            raise InvalidRequest(
                f"the weight of {name!r} must be above 0", mend="leave it out to draw none in it"
            )
        if name in weights:
            raise InvalidRequest(f"the harness {name!r} is given twice", mend="give each once")
        weights[name] = weight
    return weights


def written(weights: Mapping[str, float]) -> str:
    """What ``read`` would give these weights for, in words."""
    return " ".join(f"{name}={weights[name]:g}" for name in sorted(weights))


def shares(weights: Mapping[str, float]) -> str:
    """``codex 25%, react 75%``."""
    total = sum(weights.values())
    return ", ".join(f"{name} {weights[name] / total:.0%}" for name in sorted(weights))
