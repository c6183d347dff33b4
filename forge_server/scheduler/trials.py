"""Attempts without model and without rows, in the local sandbox: how tasks are validated
(``tasks.validate``)."""

import json

import msgspec

from forge_server.domain.errors import SandboxError, TaskError
from forge_server.domain.events import Fact
from forge_server.harness.plan import PlanLimits, build_plan
from forge_server.harness.spec import Spec
from forge_server.runner.control import TRIAL_MARK
from forge_server.scheduler.backend import LaunchFailed
from forge_server.scheduler.local import LocalBackend
from forge_server.tasks.task import Task
from forge_server.tasks.validate import Trial


class LocalTrials:
    """Runs them on a started local backend; satisfies ``tasks.validate.Trials``."""

    def __init__(self, backend: LocalBackend, limits: PlanLimits) -> None:
        self._backend, self._limits = backend, limits

    async def run(self, task: Task, script: str) -> Trial:
        """One attempt: the task's files, ``script`` by bash in the work folder, then the verifier.

        Raises TaskError when the task cannot be run here, SandboxError when nothing can or the runner stumbled.
        """
        spec = Spec(name="trial", summary="", api="chat", argv=("bash", "-s"), stdin="{instruction}")
        given = msgspec.structs.replace(task.input, instruction=script)
        plan = build_plan(spec, given, self._limits)
        try:
            printed = await self._backend.trial(plan, task.verifier_tar)
        except LaunchFailed as error:
            if error.fact is Fact.BAD_SPEC:
                raise TaskError(error.evidence["error"], where=task.name) from None
            raise SandboxError(f"a trial could not be run ({error})", where=task.name) from None
        for line in reversed(printed.splitlines()):
            if line.startswith(TRIAL_MARK):
                said = json.loads(line.removeprefix(TRIAL_MARK))
                verifier = said["finish"]["verifier"]
                reward = said.get("reward", {}).get("value")
                if trouble := said["finish"]["runner_error"].strip():  # ours: it says nothing of the task
                    raise SandboxError(
                        f"a trial could not be run ({trouble.splitlines()[-1]})", where=task.name
                    )
                return Trial(verifier=verifier["status"], reward=reward, error=verifier["error"])
        return Trial(verifier="crash", error=f"the runner did not finish: {printed[-2000:]}")
