"""The schema. Rows that lists read are narrow; blobs live in tables of their own.

Times are float seconds since the Unix epoch by the server's clock. JSON columns hold what is shown, never
what is joined on. The migrations in ``migrations/`` create exactly this metadata (a test compares them).
"""

import sqlalchemy as sa

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

BigInt = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def _id(name: str = "id") -> sa.Column[str]:
    return sa.Column(name, sa.String(64), primary_key=True)


def _ref(name: str, target: str, *, null: bool = False, index: bool = True) -> sa.Column[str]:
    return sa.Column(name, sa.String(64), sa.ForeignKey(target), nullable=null, index=index)


instance = sa.Table(
    "instance",
    metadata,
    _id(),  # this server's instance id: every pod label and selector carries it
    sa.Column("secret", sa.LargeBinary, nullable=False),  # 32 bytes; attempt and trainer keys are HMACs of it
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("alive_at", sa.Double, nullable=False),  # liveness row: downtime is added to deadlines
    sa.Column("in_flight", sa.Integer),  # N as a person set it,
    sa.Column("in_flight_instead_of", sa.Integer),  # while the settings say this
)

holds = sa.Table(  # intervals in which calls were held or the server was down: they charge no clock
    "holds",
    metadata,
    sa.Column("id", BigInt, primary_key=True, autoincrement=True),
    sa.Column("reason", sa.String(32), nullable=False),  # weight_update | server_down
    sa.Column("begin_at", sa.Double, nullable=False),
    sa.Column("end_at", sa.Double, index=True),  # NULL while the hold lasts
)

runs = sa.Table(
    "runs",
    metadata,
    _id(),
    sa.Column("name", sa.String(128), nullable=False, unique=True),
    sa.Column("kind", sa.String(16), nullable=False),  # train | eval | record
    sa.Column("state", sa.String(16), nullable=False, index=True),
    sa.Column("reason", sa.Text, nullable=False, server_default=""),  # why paused or failed
    sa.Column("settings", sa.JSON, nullable=False),  # the [[run]] table as it was given, defaults filled in
    sa.Column("step", sa.Integer, nullable=False, server_default="0"),  # batches assembled so far
    sa.Column(
        "infra_streak", sa.Integer, nullable=False, server_default="0"
    ),  # infra failures in a row: breaker
    sa.Column("infra_since", sa.Double),  # when the first of them was seen
    sa.Column("base_version", sa.Integer),  # the policy version that training started from
    sa.Column("mixture", sa.JSON),  # weights of the harnesses as a person set them, instead of the settings',
    sa.Column("mixture_at", sa.Double),  # since when
    sa.Column("evaluation_asked", sa.Boolean, nullable=False, server_default=sa.false()),  # by a person
    sa.Column("save_asked", sa.String(32)),  # nonce of the save a person asked for; NULL: none is wanted
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("ended_at", sa.Double),
)

tasks = sa.Table(
    "tasks",
    metadata,
    _id(),
    sa.Column("name", sa.String(256), nullable=False, index=True),
    sa.Column("taskset", sa.String(128), nullable=False, index=True),
    sa.Column("split", sa.String(32), nullable=False, server_default="train"),
    sa.Column("digest", sa.String(64), nullable=False),  # sha256 of everything in the task
    sa.Column("instruction", sa.Text, nullable=False),
    sa.Column("path", sa.Text),  # Harbor folder; NULL for a JSONL line
    sa.Column("definition", sa.JSON, nullable=False),  # the JSONL line, or the parsed task.toml
    sa.Column("min_reward", sa.Double, nullable=False, server_default="0"),
    sa.Column("state", sa.String(16), nullable=False, server_default="ready"),  # ready | failed
    sa.Column("reason", sa.Text, nullable=False, server_default=""),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.UniqueConstraint("taskset", "name"),
)

groups = sa.Table(
    "groups",
    metadata,
    _id(),
    _ref("run_id", "runs.id"),
    _ref("task_id", "tasks.id", index=False),
    sa.Column(
        "step", sa.Integer, nullable=False
    ),  # the run step it was drawn for (1-based); eval round for evals
    sa.Column("round", sa.Integer, nullable=False, server_default="0"),  # generation round within the step
    sa.Column("mode", sa.String(8), nullable=False),  # train | eval | record
    sa.Column("size", sa.Integer, nullable=False),
    sa.Column("batch_k", sa.Integer),  # the batch it was trained in
    sa.Column(
        "dropped", sa.String(32), nullable=False, server_default=""
    ),  # equal_rewards | too_few_valid | stale
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Index("ix_groups_run_id_step", "run_id", "step"),
)

rollouts = sa.Table(
    "rollouts",
    metadata,
    _id(),
    _ref("run_id", "runs.id"),
    _ref("group_id", "groups.id", null=True),
    _ref("task_id", "tasks.id", null=True, index=False),
    sa.Column("slot", sa.Integer, nullable=False, server_default="0"),
    sa.Column("harness", sa.String(64), nullable=False),
    sa.Column("mode", sa.String(8), nullable=False),  # train | eval | record
    sa.Column(
        "external", sa.Boolean, nullable=False, server_default=sa.false()
    ),  # registered by a harness itself
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("epoch", sa.Integer, nullable=False, server_default="0"),
    sa.Column("attempts", sa.Integer, nullable=False, server_default="0"),  # made so far
    sa.Column("max_attempts", sa.Integer, nullable=False, server_default="3"),
    sa.Column("not_before", sa.Double, nullable=False, server_default="0"),  # back-off of the next attempt
    sa.Column("outcome", sa.String(16)),
    sa.Column("kind", sa.String(32)),
    sa.Column("reward", sa.Double),
    sa.Column("final_attempt_id", sa.String(64)),  # the attempt whose calls count
    sa.Column("policy_version", sa.Integer, nullable=False, server_default="0"),  # live when it was created
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("ended_at", sa.Double),
    sa.Index("ix_rollouts_run_id_state", "run_id", "state"),
    sa.Index("ix_rollouts_run_id_id", "run_id", "id"),
)

attempts = sa.Table(
    "attempts",
    metadata,
    _id(),
    _ref("rollout_id", "rollouts.id"),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("state", sa.String(16), nullable=False, index=True),
    sa.Column("epoch", sa.Integer, nullable=False, server_default="0"),
    sa.Column("backend", sa.String(16), nullable=False),  # local | kubernetes | external
    sa.Column(
        "handle", sa.JSON
    ),  # what the backend needs to find it again (pid + start time, pod name + uid)
    sa.Column("start_nonce", sa.String(64)),  # nonce of the runner that joined
    sa.Column("startup_deadline", sa.Double),
    sa.Column("agent_deadline", sa.Double),
    sa.Column("verify_deadline", sa.Double),
    sa.Column("heartbeat_at", sa.Double),
    sa.Column(
        "stop_reason", sa.String(32), nullable=False, server_default=""
    ),  # why the runner is told to stop
    sa.Column("exit_code", sa.Integer),  # of the harness, as the runner reported it
    sa.Column("outcome", sa.String(16)),
    sa.Column("kind", sa.String(32)),
    sa.Column("reward", sa.Double),
    sa.Column("evidence", sa.JSON),  # facts that decided the outcome
    sa.Column(
        "not_trained", sa.String(64), nullable=False, server_default=""
    ),  # I4: reason, "" when trainable
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("launched_at", sa.Double),
    sa.Column("started_at", sa.Double),  # the runner joined
    sa.Column("running_at", sa.Double),  # the harness started
    sa.Column("sealed_at", sa.Double),
    sa.Column("ended_at", sa.Double, index=True),
    sa.UniqueConstraint("rollout_id", "number"),
)

attempt_logs = sa.Table(  # last lines of the runner and the harness
    "attempt_logs",
    metadata,
    _ref("attempt_id", "attempts.id"),
    sa.Column("stream", sa.String(16), nullable=False),  # runner | harness | verifier
    sa.Column("tail", sa.LargeBinary, nullable=False),  # zstd, at most 64 KiB before compression
    sa.PrimaryKeyConstraint("attempt_id", "stream"),
)

rewards = sa.Table(
    "rewards",
    metadata,
    sa.Column("id", BigInt, primary_key=True, autoincrement=True),
    _ref("attempt_id", "attempts.id"),
    sa.Column("source", sa.String(32), nullable=False),  # verifier | external | minimum
    sa.Column("value", sa.Double, nullable=False),
    sa.Column("call_id", BigInt),
    sa.Column("detail", sa.JSON),
    sa.Column("at", sa.Double, nullable=False),
    sa.UniqueConstraint("attempt_id", "source", "call_id"),
)

calls = sa.Table(
    "calls",
    metadata,
    sa.Column("id", BigInt, primary_key=True, autoincrement=False),
    _ref("attempt_id", "attempts.id", index=False),
    sa.Column("seq", sa.Integer, nullable=False),  # order of admission within the attempt, from 0
    sa.Column("dialect", sa.String(16), nullable=False),  # chat | completions | responses | messages | gemini
    sa.Column("mode", sa.String(8), nullable=False),  # record | splice
    sa.Column("retry_of", BigInt),  # an earlier call whose answer this replays
    sa.Column("request_digest", sa.LargeBinary, nullable=False),  # 16 bytes of the canonical request
    sa.Column("began_at", sa.Double, nullable=False),
    # the end
    sa.Column("ended_at", sa.Double),
    sa.Column("end", sa.String(16)),  # CallEnd; NULL while in flight
    sa.Column("status", sa.Integer),  # HTTP status the harness got
    sa.Column("error", sa.Text),
    sa.Column("delivered", sa.String(8), nullable=False, server_default="unknown"),
    sa.Column("untrainable", sa.String(24)),  # Untrainable; NULL = trainable, meaningful once ended
    sa.Column("flags", sa.JSON),  # what was clamped, lifted, dropped or labelled
    sa.Column(
        "label", sa.String(32), nullable=False, server_default=""
    ),  # side call label of the harness spec
    sa.Column("forest_key", sa.String(64), nullable=False, server_default=""),
    sa.Column("parent_id", BigInt),  # logical parent: the longest delivered call that is an exact prefix
    sa.Column("prefix_len", sa.Integer),  # prompt tokens shared with the storage parent
    sa.Column("storage_parent_id", BigInt),
    sa.Column("prompt_len", sa.Integer),
    sa.Column("completion_len", sa.Integer),
    sa.Column("finish_reason", sa.String(24)),
    sa.Column("policy_version", sa.Integer),
    sa.Column("temperature", sa.Double),
    sa.Column("engine_ms", sa.Double),
    sa.Column("held_ms", sa.Double),
    sa.UniqueConstraint("attempt_id", "seq"),
)

call_tokens = sa.Table(
    "call_tokens",
    metadata,
    sa.Column("call_id", BigInt, primary_key=True, autoincrement=False),
    sa.Column(
        "data", sa.LargeBinary, nullable=False
    ),  # trajectory.codec: prompt delta, completion, logprobs, spans
    sa.Column("prompt_digest", sa.LargeBinary, nullable=False),  # 16 bytes over the full prompt
    sa.Column("media", sa.LargeBinary),  # trajectory.media: which tokens stand for which image; NULL: none
)

media = sa.Table(  # content-addressed: one row per distinct image; messages say sha256:HEX in its place
    "media",
    metadata,
    sa.Column("sha256", sa.LargeBinary, primary_key=True),  # 32 bytes
    sa.Column("media_type", sa.String(32), nullable=False),  # image/png and the like, as it was sent
    sa.Column("size", sa.Integer, nullable=False),  # bytes
    sa.Column("data", sa.LargeBinary, nullable=False),  # the file as the harness sent it
)

messages = sa.Table(  # content-addressed: one row per distinct message, tool list or response
    "messages",
    metadata,
    sa.Column("digest", sa.LargeBinary, primary_key=True),  # 16 bytes
    sa.Column("body", sa.LargeBinary, nullable=False),  # zstd of JSON
)

call_messages = sa.Table(  # which messages made up the request, and the response
    "call_messages",
    metadata,
    sa.Column("call_id", BigInt, primary_key=True, autoincrement=False),
    sa.Column("request", sa.LargeBinary, nullable=False),  # packed: storage parent id, shared count, digests
    sa.Column("response", sa.LargeBinary),  # digest of the response message
)

samples = sa.Table(  # what an ended attempt was cut into; tokens are rebuilt from calls
    "samples",
    metadata,
    _ref("rollout_id", "rollouts.id"),
    sa.Column("index", sa.Integer, nullable=False),
    _ref("attempt_id", "attempts.id", index=False),
    sa.Column("length", sa.Integer, nullable=False),
    sa.Column("trained", sa.Integer, nullable=False),  # tokens with mask 1
    sa.Column("prompt_len", sa.Integer, nullable=False),
    sa.Column("break_reason", sa.String(24), nullable=False),
    sa.Column("min_version", sa.Integer, nullable=False),
    sa.Column("max_version", sa.Integer, nullable=False),
    sa.Column("call_ids", sa.JSON, nullable=False),
    sa.PrimaryKeyConstraint("rollout_id", "index"),
)

policies = sa.Table(
    "policies",
    metadata,
    sa.Column("name", sa.String(64), nullable=False),  # the policy; one engine pool serves one policy
    sa.Column("version", sa.Integer, nullable=False),  # never reused
    _ref("run_id", "runs.id", null=True),
    sa.Column("step", sa.Integer),  # batch k it was trained on; NULL for the initial weights
    sa.Column("parent_version", sa.Integer),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("reason", sa.Text, nullable=False, server_default=""),
    sa.Column("path", sa.Text, nullable=False),
    sa.Column("manifest_sha256", sa.String(64), nullable=False, server_default=""),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("live_at", sa.Double),
    sa.PrimaryKeyConstraint("name", "version"),
)

batches = sa.Table(
    "batches",
    metadata,
    _ref("run_id", "runs.id", index=False),
    sa.Column("k", sa.Integer, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),  # assembled | fetched | trained
    sa.Column("sha256", sa.String(64), nullable=False),
    sa.Column("size", sa.Integer, nullable=False),  # bytes
    sa.Column("rollout_ids", sa.JSON, nullable=False),
    sa.Column("stats", sa.JSON, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("fetched_at", sa.Double),
    sa.Column("trained_at", sa.Double),
    sa.PrimaryKeyConstraint("run_id", "k"),
)

batch_parts = sa.Table(
    "batch_parts",
    metadata,
    sa.Column("run_id", sa.String(64), nullable=False),
    sa.Column("k", sa.Integer, nullable=False),
    sa.Column("part", sa.Integer, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),  # a part of the safetensors
    sa.PrimaryKeyConstraint("run_id", "k", "part"),
)

step_metrics = sa.Table(
    "step_metrics",
    metadata,
    _ref("run_id", "runs.id", index=False),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("source", sa.String(16), nullable=False),  # controller | trainer | engine | eval
    sa.Column("metrics", sa.JSON, nullable=False),  # flat: name -> number
    sa.Column("at", sa.Double, nullable=False),
    sa.PrimaryKeyConstraint("run_id", "step", "source"),
)

trainer_sessions = sa.Table(
    "trainer_sessions",
    metadata,
    _ref("run_id", "runs.id", index=False),
    sa.Column("fence", sa.Integer, nullable=False),  # a newer session makes every older one a 409
    sa.Column("token", sa.String(64), nullable=False),
    sa.Column("world_size", sa.Integer, nullable=False),
    sa.Column("resume_step", sa.Integer, nullable=False),
    sa.Column("phase", sa.String(16), nullable=False, server_default=""),
    sa.Column("lease_until", sa.Double, nullable=False),
    sa.Column("created_at", sa.Double, nullable=False),
    sa.Column("overrides", sa.JSON),  # the server's own, before the run's; NULL: no trainer had it
    sa.PrimaryKeyConstraint("run_id", "fence"),
)

events = sa.Table(  # every state change, in commit order; the event stream replays it
    "events",
    metadata,
    sa.Column("id", BigInt, primary_key=True, autoincrement=True),
    sa.Column("at", sa.Double, nullable=False),
    sa.Column("kind", sa.String(48), nullable=False),
    sa.Column("run_id", sa.String(64)),
    sa.Column("rollout_id", sa.String(64)),
    sa.Column("attempt_id", sa.String(64)),
    sa.Column("data", sa.JSON, nullable=False),
    sqlite_autoincrement=True,
)

idempotency = sa.Table(
    "idempotency",
    metadata,
    sa.Column("key", sa.String(128), nullable=False),
    sa.Column("route", sa.String(128), nullable=False),
    sa.Column("body_digest", sa.LargeBinary, nullable=False),
    sa.Column("status", sa.Integer, nullable=False),
    sa.Column("response", sa.LargeBinary, nullable=False),
    sa.Column("at", sa.Double, nullable=False),
    sa.PrimaryKeyConstraint("key", "route"),
)
