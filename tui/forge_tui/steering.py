"""What steers from the dashboard: ask first, do it, show what came of it."""

from collections.abc import Callable
from typing import Literal, TypeVar

from textual import work
from textual.app import App

from forge_server.client.http import ForgeClient
from forge_server.client.schemas import RunPatch, RunView
from forge_server.domain import mixture
from forge_server.domain.errors import ForgeError
from forge_tui.dialogs import Ask, Confirm
from forge_tui.feed import Asker
from forge_tui.model import Model
from forge_tui.views.rollout import RolloutScreen

T = TypeVar("T")


class Steering(App[None]):
    """The acts; who is one of these has the keys."""

    client: ForgeClient
    model: Model
    ask: Asker

    def changed(self) -> None:
        """Something was done: what is shown must be read again."""
        raise NotImplementedError

    async def _sure(self, title: str, detail: str) -> bool:
        yes: bool = await self.push_screen_wait(Confirm(title, detail))
        return yes

    async def _do(self, what: str, act: Callable[[], T]) -> T | None:
        try:
            result = await self.ask(act)
        except ForgeError as error:
            self.notify(str(error), title=f"{what}: refused", severity="error", markup=False)
            return None
        self.changed()
        return result

    def _told(self, title: str, text: str) -> None:
        self.notify(text, title=title, markup=False)

    def _going(self) -> RunView | None:
        """The run that is looked at, if it has not ended; else a person is told."""
        run = self.model.overview.run if self.model.overview is not None else None
        if run is None or run.state not in ("active", "paused"):
            self.notify("There is no run that goes on.", severity="warning")
            return None
        return run

    @work(group="steer", exclusive=True)
    async def action_pause(self) -> None:
        run = self._going()
        if run is None:
            return
        action: Literal["pause", "resume"] = "pause" if run.state == "active" else "resume"
        detail = (
            "Nothing more is launched; what is in flight goes on to its end."
            if action == "pause"
            else f"Launching goes on. It was paused: {run.reason or '-'}"
        )
        if await self._sure(f"{action.capitalize()} run {run.name}?", detail):
            found = await self._do(action, lambda: self.client.patch_run(run.id, RunPatch(action=action)))
            if found is not None:
                self._told(action.capitalize(), f"{found.name} is {found.state}")

    @work(group="steer", exclusive=True)
    async def action_cancel_run(self) -> None:
        run = self._going()
        if run is None:
            return
        if await self._sure(f"End run {run.name}?", "All its rollouts are cancelled. It cannot be resumed."):
            found = await self._do("End", lambda: self.client.patch_run(run.id, RunPatch(action="cancel")))
            if found is not None:
                self._told("End", f"{found.name} is {found.state}")

    @work(group="steer", exclusive=True)
    async def action_in_flight(self) -> None:
        overview = self.model.overview
        if overview is None or overview.run is None:
            self.notify("There is no run.", severity="warning")
            return
        run, now = overview.run, overview.in_flight
        text = await self.push_screen_wait(
            Ask(
                "Attempts in flight",
                "N of the whole server, for its later starts too.",
                str(now),
                number=True,
            )
        )
        if text is None or not text.isdecimal() or int(text) == now:
            return
        n = int(text)
        if await self._sure(
            f"Keep {n} attempts in flight instead of {now}?", "Those above it run to their end."
        ):
            done = await self._do("In flight", lambda: self.client.patch_run(run.id, RunPatch(in_flight=n)))
            if done is not None:
                self._told("In flight", f"{n} attempts in flight from now on")

    @work(group="steer", exclusive=True)
    async def action_mixture(self) -> None:
        run = self._going()
        if run is None:
            return
        text = await self.push_screen_wait(
            Ask(
                f"Mixture of run {run.name}",
                "Harnesses to draw groups in, as NAME=WEIGHT.",
                mixture.written(run.harnesses),
            )
        )
        if text is None:
            return
        try:
            weights = mixture.read(text.split())
        except ForgeError as error:
            self.notify(str(error), title="Mixture: refused", severity="error", markup=False)
            return
        if weights == run.harnesses:
            return
        if await self._sure(
            f"Draw groups in {mixture.shares(weights)}?",
            f"Instead of {mixture.shares(run.harnesses)}. Those drawn already go on.",
        ):
            done = await self._do(
                "Mixture", lambda: self.client.patch_run(run.id, RunPatch(harnesses=weights))
            )
            if done is not None:
                self._told("Mixture", f"{mixture.shares(done.harnesses)} from now on")

    @work(group="steer", exclusive=True)
    async def action_evaluate(self) -> None:
        run = self._going()
        if run is None:
            return
        if await self._sure(
            f"Evaluate run {run.name} now?", "Nothing more is drawn until its live policy is measured."
        ):
            found = await self._do("Evaluate", lambda: self.client.evaluate_run(run.id))
            if found is not None:
                size = f"{found.tasks} tasks of split {found.split}, {found.k} rollouts each"
                self._told("Evaluate", f"v{found.version} of step {found.step}: {size}")

    @work(group="steer", exclusive=True)
    async def action_checkpoint(self) -> None:
        run = self._going()
        if run is None:
            return
        if await self._sure(
            f"Save the trainer of run {run.name} now?",
            "Its full state, with its next step: started again, it goes on from there.",
        ):
            found = await self._do("Save", lambda: self.client.checkpoint_run(run.id))
            if found is not None:
                self._told("Save", found.detail)

    @work(group="steer", exclusive=True)
    async def steer_rollout(self, rollout_id: str, action: Literal["cancel", "retry"]) -> None:
        title, detail = {
            "cancel": ("Cancel rollout", "It ends now and is not trained."),
            "retry": ("Retry rollout", "Its attempt in flight is given up and a new one is made."),
        }[action]
        if await self._sure(f"{title} {rollout_id}?", detail):
            found = await self._do(title, lambda: self.client.rollout_action(rollout_id, action))
            if found is not None:
                row = found.rollout
                self._told(title, f"{row.id} is {row.outcome or row.state}")
                for screen in self.screen_stack:
                    if isinstance(screen, RolloutScreen):
                        screen._stale = True
