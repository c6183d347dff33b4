"""The plan: what the runner is told to do, from a harness spec, a task and the limits in force. Pure."""

import base64

import msgspec

from forge_server.harness.spec import Spec

WORKDIR = "/workspace"
VERIFY_ARGV = ("bash", "/tests/test.sh")


class TaskFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that lies in the work folder when the harness starts; ``path`` is relative to it."""

    path: str
    content: bytes
    mode: int = 0o644


class TaskInput(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt needs to know of its task. Limits of None: the task states none. ``image``: the container
    image of its environment, for backends that have images; empty: it states none.
    """

    instruction: str
    files: tuple[TaskFile, ...] = ()
    workdir: str = WORKDIR
    agent_s: float | None = None
    verify_s: float | None = None
    memory_mb: int | None = None
    image: str = ""


class PlanLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the run and of the server, in seconds, processes and MiB."""

    model: str
    heartbeat_s: float
    agent_s: float
    verify_s: float
    grace_s: float
    pids: int
    memory_mb: int
    window: int  # tokens of prompt and completion of one call
    output: int  # tokens of the completion of one call


class PlanFile(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    content: str
    mode: int


class PlanTaskFile(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    content_b64: str
    mode: int


class PlanCaps(msgspec.Struct, frozen=True, kw_only=True):
    pids: int
    memory_mb: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to the runner's ``start``, as it goes over the wire. ``image`` is not for the runner, which is in it
    already, but for who launches it.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    files: tuple[PlanFile, ...]
    workdir: str
    task_files: tuple[PlanTaskFile, ...]
    stdin: str | None
    instruction: str
    model: str
    heartbeat_s: float
    agent_s: float
    verify_s: float
    grace_s: float
    verify_argv: tuple[str, ...]
    limits: PlanCaps
    image: str = ""


def build_plan(spec: Spec, task: TaskInput, limits: PlanLimits) -> Plan:
    """The plan of an attempt: of two time limits the shorter counts, of two size limits the task's.

    ``{window}``, ``{output}`` and ``{prompt}`` are filled in here, the other placeholders by the runner.
    """
    window = max(limits.window - spec.window_margin, 1)
    output = min(limits.output, window)
    tokens = {"{window}": window, "{output}": output, "{prompt}": max(window - output, 1)}

    def fill(text: str) -> str:
        for placeholder, value in tokens.items():
            text = text.replace(placeholder, str(value))
        return text

    return Plan(
        argv=tuple(fill(part) for part in spec.argv),
        env={name: fill(value) for name, value in spec.env.items()},
        files=tuple(PlanFile(path=f.path, content=fill(f.content), mode=int(f.mode, 8)) for f in spec.files),
        workdir=task.workdir,
        task_files=tuple(
            PlanTaskFile(path=f.path, content_b64=base64.b64encode(f.content).decode(), mode=f.mode)
            for f in task.files
        ),
        stdin=None if spec.stdin is None else fill(spec.stdin),
        instruction=task.instruction,
        model=limits.model,
        heartbeat_s=limits.heartbeat_s,
        agent_s=min(limits.agent_s, task.agent_s or limits.agent_s),
        verify_s=task.verify_s or limits.verify_s,
        grace_s=limits.grace_s,
        verify_argv=VERIFY_ARGV,
        limits=PlanCaps(
            pids=spec.limits.pids or limits.pids,
            memory_mb=task.memory_mb or spec.limits.memory_mb or limits.memory_mb,
        ),
        image=task.image,
    )
