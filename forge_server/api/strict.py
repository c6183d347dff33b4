"""Unknown query parameters are errors: a filter with a typo must not answer with everything."""

import difflib
import inspect
from functools import lru_cache
from typing import Any

from litestar import Request
from litestar.handlers import HTTPRouteHandler
from litestar.params import ParameterKwarg

from forge_server.domain.errors import InvalidRequest


def refuse_unknown_parameters(request: Request[Any, Any, Any]) -> None:
    """A ``before_request`` hook. Raises InvalidRequest naming the nearest parameter."""
    known = _known(request.route_handler)
    for given in request.query_params:
        if given not in known:
            near = difflib.get_close_matches(given, known, n=1, cutoff=0.4)
            mend = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known) or 'none'}"
            raise InvalidRequest(f"unknown parameter {given!r}", where="query", mend=mend)


@lru_cache
def _known(handler: HTTPRouteHandler) -> tuple[str, ...]:
    names = []
    for name in inspect.signature(handler.fn).parameters:
        kwarg = handler.parsed_fn_signature.parameters[name].kwarg_definition
        named = kwarg if isinstance(kwarg, ParameterKwarg) else None
        if name not in ("data", "request") and not (named and named.header):
            names.append((named and (named.name or named.query)) or name)
    return tuple(names)
