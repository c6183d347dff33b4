"""Why the trainer stops. Each error says what is wrong, where, and what would mend it; none is wrapped."""


class TrainerError(Exception):
    """Base of everything this package raises on purpose."""

    exit_code = 1


class OverrideRefused(TrainerError):
    """A veRL override that would be ignored, or would be wrong with several samples per rollout."""

    exit_code = 2


class BatchInvalid(TrainerError):
    """A batch whose bytes or content break its contract; training it would train something else."""


class CheckpointInvalid(TrainerError):
    """A checkpoint folder that is not what its manifest says, or does not fit this job."""


class LinkFailed(TrainerError):
    """The server answered with an error that retrying cannot mend, or stayed away for too long."""


class Fenced(TrainerError):
    """Another session has taken over this run (409): this process must not write any more."""

    exit_code = 3


class RunEnded(Exception):
    """The run is over (410); the normal way out."""
