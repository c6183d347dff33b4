"""A mixture of harnesses as people write it: ``NAME=WEIGHT`` each, and the shares that the weights come to. Pure."""

from collections.abc import Iterable, Mapping

from forge_server.domain.errors import InvalidRequest


def read(words: Iterable[str]) -> dict[str, float]:
    """Weights by harness. Raises InvalidRequest naming the word that is none; whether weights are above 0 is checked
    where they are used."""
    weights: dict[str, float] = {}
    for word in words:
        name, _, text = word.rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            name, weight = "", 0.0
        if not name:
            raise InvalidRequest(f"{word!r} is not NAME=WEIGHT", mend="write react=2, for example")
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
