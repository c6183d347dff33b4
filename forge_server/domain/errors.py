"""Errors that a person or a program reads.

Each says *what* is wrong, *where*, and the *mend*, in one sentence each, and carries a stable ``type`` (the
RFC 9457 problem type of the API) and the HTTP status it maps to. They are raised at the boundary where the
fault is seen and passed on unchanged.
"""


class ForgeError(Exception):
    """Base of every expected error.

    ``type`` is a stable slug, ``status`` the HTTP status of the control API, ``exit_code`` that of the CLI.
    """

    type = "error"
    status = 500
    exit_code = 1

    def __init__(self, what: str, *, where: str = "", mend: str = "") -> None:
        self.what, self.where, self.mend = what, where, mend
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}; {self.mend}" if self.mend else text


class ConfigError(ForgeError):
    """A setting is unknown, missing or wrong."""

    type, status, exit_code = "config-invalid", 400, 2


class InvalidRequest(ForgeError):
    """The body or a parameter of a control API request is wrong."""

    type, status, exit_code = "invalid-request", 400, 2


class Unauthorized(ForgeError):
    """The key is missing or wrong."""

    type, status = "unauthorized", 401


class NotFound(ForgeError):
    """There is no such entity."""

    type, status = "not-found", 404


class Conflict(ForgeError):
    """The entity is in a state that does not allow this."""

    type, status = "conflict", 409


class Gone(ForgeError):
    """What was asked for has been and is no more (an event cursor that is too old, an ended run)."""

    type, status = "gone", 410


class SpecError(ForgeError):
    """A harness spec is wrong."""

    type, status, exit_code = "bad-spec", 400, 2


class TaskError(ForgeError):
    """A task folder or line is wrong."""

    type, status, exit_code = "bad-task", 400, 2


class TaskUnreadable(TaskError):
    """The files of a registered task are not there, or cannot be read, at the moment: that is no fault of the task."""


class StoreError(ForgeError):
    """The database cannot be used (missing, locked, read-only, full, wrong revision)."""

    type, status = "store", 503


class EngineError(ForgeError):
    """The inference engine failed or does not offer what is needed."""

    type, status = "engine", 503


class CheckpointError(ForgeError):
    """A checkpoint is incomplete, corrupt or of another model."""

    type, status = "bad-checkpoint", 422


class TrainerError(ForgeError):
    """The trainer failed or sent something impossible."""

    type, status = "trainer", 503


class SandboxError(ForgeError):
    """The local sandbox cannot reach the level asked for."""

    type, status = "sandbox", 503


class ClusterError(ForgeError):
    """The Kubernetes cluster does not answer, or does not let us do what we must."""

    type, status = "cluster", 503


class EnvironmentMissing(ForgeError):
    """A program or virtual environment that is needed is not installed."""

    type, status = "environment-missing", 503
