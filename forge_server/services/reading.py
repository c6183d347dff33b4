"""What the read-only commands show, read from the database when no server runs: the methods of
``client.http.ForgeClient``, with the same answers."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

import msgspec
import sqlalchemy as sa

from forge_server.api import cost, views
from forge_server.api.compare import compared
from forge_server.api.events import kept
from forge_server.api.paging import decode_cursor
from forge_server.client import schemas as s
from forge_server.client.cost import Cost
from forge_server.evaluation.cost import Prices
from forge_server.services.conversations import conversations, log_tails
from forge_server.store.database import Store

T = TypeVar("T")
PAGE = 500


class StoreReader:
    """Reads ``store``, which was opened for reading only. Raises NotFound and StoreError."""

    def __init__(self, store: Store, prices: Prices) -> None:
        self._store, self._prices = store, prices

    def runs(self) -> list[s.RunView]:
        return list(self._pages(views.runs, s.RunView, None))

    def run(self, id_or_name: str) -> s.RunView:
        return self._store.read_now(lambda c: views.run_view(c, views.run_row(c, id_or_name)))

    def metrics(self, run: str) -> list[s.StepMetrics]:
        return self._store.read_now(lambda c: views.step_metrics(c, run))

    def cost(self, run: str) -> Cost:
        return self._store.read_now(lambda c: cost.read(c, run, self._prices))

    def compare(
        self, run: str, by: Literal["task", "harness"], mode: str | None = None, k: int | None = None
    ) -> list[s.Comparison]:
        return self._store.read_now(lambda c: compared(c, run, by, mode, k))

    def tasks(self, taskset: str | None = None, limit: int | None = None) -> Iterator[s.TaskView]:
        return self._pages(views.tasks, s.TaskView, limit, taskset)

    def rollouts(
        self, run: str | None = None, state: str | None = None, limit: int | None = None
    ) -> Iterator[s.RolloutView]:
        return self._pages(views.rollouts, s.RolloutView, limit, views.RolloutFilter(run=run, state=state))

    def rollout(self, rollout_id: str) -> s.RolloutDetail:
        return self._store.read_now(lambda c: views.rollout_detail(c, rollout_id))

    def calls(self, rollout_id: str, messages: bool = False) -> list[s.CallView]:
        return self._store.read_now(lambda c: views.calls(c, rollout_id, conversations if messages else None))

    def samples(self, rollout_id: str) -> list[s.SampleView]:
        return self._store.read_now(lambda c: views.samples(c, rollout_id))

    def logs(self, rollout_id: str) -> list[s.LogView]:
        def read(connection: sa.Connection) -> list[s.LogView]:
            views.rollout_detail(connection, rollout_id)
            return log_tails(connection, rollout_id)

        return self._store.read_now(read)

    def all_events(self, run: str, kinds: str) -> Iterator[s.EventView]:
        return self._pages(kept, s.EventView, None, run, None, kinds)

    def policies(self) -> list[s.PolicyView]:
        return self._store.read_now(views.policies)

    def _pages(
        self, view: Callable[..., s.Page], kind: type[T], limit: int | None, *where: Any
    ) -> Iterator[T]:
        cursor: str | None = None
        left = limit
        while left is None or left > 0:
            size = PAGE if left is None else min(left, PAGE)
            page = self._read_page(view, (*where, decode_cursor(cursor), size))
            yield from (msgspec.convert(item, kind) for item in page.items)
            cursor = page.next_cursor
            if left is not None:
                left -= len(page.items)
            if cursor is None:
                return

    def _read_page(self, view: Callable[..., s.Page], arguments: tuple[Any, ...]) -> s.Page:
        return self._store.read_now(lambda c: view(c, *arguments))
