"""The first schema.

Revision: 0001
Revises: nothing
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "batch_bodies",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("k", sa.Integer(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "k", name=op.f("pk_batch_bodies")),
    )
    op.create_table(
        "call_messages",
        sa.Column(
            "call_id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=False,
            nullable=False,
        ),
        sa.Column("request", sa.LargeBinary(), nullable=False),
        sa.Column("response", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("call_id", name=op.f("pk_call_messages")),
    )
    op.create_table(
        "call_tokens",
        sa.Column(
            "call_id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=False,
            nullable=False,
        ),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.Column("prompt_digest", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("call_id", name=op.f("pk_call_tokens")),
    )
    op.create_table(
        "events",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.String(length=48), nullable=False),
        sa.Column("run_id", sa.String(length=64), nullable=True),
        sa.Column("rollout_id", sa.String(length=64), nullable=True),
        sa.Column("attempt_id", sa.String(length=64), nullable=True),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "holds",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("reason", sa.String(length=32), nullable=False),
        sa.Column("begin_at", sa.Double(), nullable=False),
        sa.Column("end_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_holds")),
    )
    with op.batch_alter_table("holds", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_holds_end_at"), ["end_at"], unique=False)

    op.create_table(
        "idempotency",
        sa.Column("key", sa.String(length=128), nullable=False),
        sa.Column("route", sa.String(length=128), nullable=False),
        sa.Column("body_digest", sa.LargeBinary(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("response", sa.LargeBinary(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("key", "route", name=op.f("pk_idempotency")),
    )
    op.create_table(
        "instance",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("secret", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("alive_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_instance")),
    )
    op.create_table(
        "messages",
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_messages")),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=128), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("step", sa.Integer(), server_default="0", nullable=False),
        sa.Column("infra_streak", sa.Integer(), server_default="0", nullable=False),
        sa.Column("base_version", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.UniqueConstraint("name", name=op.f("uq_runs_name")),
    )
    with op.batch_alter_table("runs", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_runs_state"), ["state"], unique=False)

    op.create_table(
        "tasks",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("taskset", sa.String(length=128), nullable=False),
        sa.Column("split", sa.String(length=32), server_default="train", nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("instruction", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=True),
        sa.Column("definition", sa.JSON(), nullable=False),
        sa.Column("min_reward", sa.Double(), server_default="0", nullable=False),
        sa.Column("state", sa.String(length=16), server_default="ready", nullable=False),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tasks")),
        sa.UniqueConstraint("taskset", "name", name=op.f("uq_tasks_taskset_name")),
    )
    with op.batch_alter_table("tasks", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_tasks_name"), ["name"], unique=False)
        batch_op.create_index(batch_op.f("ix_tasks_taskset"), ["taskset"], unique=False)

    op.create_table(
        "batches",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("k", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("rollout_ids", sa.JSON(), nullable=False),
        sa.Column("stats", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("fetched_at", sa.Double(), nullable=True),
        sa.Column("trained_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_batches_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "k", name=op.f("pk_batches")),
    )
    op.create_table(
        "groups",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("task_id", sa.String(length=64), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), server_default="0", nullable=False),
        sa.Column("mode", sa.String(length=8), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("batch_k", sa.Integer(), nullable=True),
        sa.Column("dropped", sa.String(length=32), server_default="", nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_groups_run_id_runs")),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name=op.f("fk_groups_task_id_tasks")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_groups")),
    )
    with op.batch_alter_table("groups", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_groups_run_id"), ["run_id"], unique=False)
        batch_op.create_index("ix_groups_run_id_step", ["run_id", "step"], unique=False)

    op.create_table(
        "policies",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(length=64), nullable=True),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("parent_version", sa.Integer(), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("manifest_sha256", sa.String(length=64), server_default="", nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("live_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_policies_run_id_runs")),
        sa.PrimaryKeyConstraint("name", "version", name=op.f("pk_policies")),
    )
    with op.batch_alter_table("policies", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_policies_run_id"), ["run_id"], unique=False)

    op.create_table(
        "step_metrics",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("source", sa.String(length=16), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_step_metrics_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "step", "source", name=op.f("pk_step_metrics")),
    )
    op.create_table(
        "trainer_sessions",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("fence", sa.Integer(), nullable=False),
        sa.Column("token", sa.String(length=64), nullable=False),
        sa.Column("world_size", sa.Integer(), nullable=False),
        sa.Column("resume_step", sa.Integer(), nullable=False),
        sa.Column("phase", sa.String(length=16), server_default="", nullable=False),
        sa.Column("lease_until", sa.Double(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_trainer_sessions_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "fence", name=op.f("pk_trainer_sessions")),
    )
    op.create_table(
        "rollouts",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("group_id", sa.String(length=64), nullable=True),
        sa.Column("task_id", sa.String(length=64), nullable=True),
        sa.Column("slot", sa.Integer(), server_default="0", nullable=False),
        sa.Column("harness", sa.String(length=64), nullable=False),
        sa.Column("mode", sa.String(length=8), nullable=False),
        sa.Column("external", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("epoch", sa.Integer(), server_default="0", nullable=False),
        sa.Column("attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column("max_attempts", sa.Integer(), server_default="3", nullable=False),
        sa.Column("not_before", sa.Double(), server_default="0", nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.Column("kind", sa.String(length=32), nullable=True),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("final_attempt_id", sa.String(length=64), nullable=True),
        sa.Column("policy_version", sa.Integer(), server_default="0", nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["group_id"], ["groups.id"], name=op.f("fk_rollouts_group_id_groups")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_rollouts_run_id_runs")),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name=op.f("fk_rollouts_task_id_tasks")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollouts")),
    )
    with op.batch_alter_table("rollouts", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_rollouts_group_id"), ["group_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_rollouts_run_id"), ["run_id"], unique=False)
        batch_op.create_index("ix_rollouts_run_id_state", ["run_id", "state"], unique=False)

    op.create_table(
        "attempts",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("rollout_id", sa.String(length=64), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("epoch", sa.Integer(), server_default="0", nullable=False),
        sa.Column("backend", sa.String(length=16), nullable=False),
        sa.Column("handle", sa.JSON(), nullable=True),
        sa.Column("start_nonce", sa.String(length=64), nullable=True),
        sa.Column("startup_deadline", sa.Double(), nullable=True),
        sa.Column("agent_deadline", sa.Double(), nullable=True),
        sa.Column("verify_deadline", sa.Double(), nullable=True),
        sa.Column("heartbeat_at", sa.Double(), nullable=True),
        sa.Column("stop_reason", sa.String(length=32), server_default="", nullable=False),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.Column("kind", sa.String(length=32), nullable=True),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("evidence", sa.JSON(), nullable=True),
        sa.Column("not_trained", sa.String(length=64), server_default="", nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("launched_at", sa.Double(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("running_at", sa.Double(), nullable=True),
        sa.Column("sealed_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["rollout_id"], ["rollouts.id"], name=op.f("fk_attempts_rollout_id_rollouts")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempts")),
        sa.UniqueConstraint("rollout_id", "number", name=op.f("uq_attempts_rollout_id_number")),
    )
    with op.batch_alter_table("attempts", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_attempts_rollout_id"), ["rollout_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_attempts_state"), ["state"], unique=False)

    op.create_table(
        "attempt_logs",
        sa.Column("attempt_id", sa.String(length=64), nullable=False),
        sa.Column("stream", sa.String(length=16), nullable=False),
        sa.Column("tail", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempts.id"], name=op.f("fk_attempt_logs_attempt_id_attempts")
        ),
        sa.PrimaryKeyConstraint("attempt_id", "stream", name=op.f("pk_attempt_logs")),
    )
    with op.batch_alter_table("attempt_logs", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_attempt_logs_attempt_id"), ["attempt_id"], unique=False)

    op.create_table(
        "calls",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=False, nullable=False
        ),
        sa.Column("attempt_id", sa.String(length=64), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("dialect", sa.String(length=16), nullable=False),
        sa.Column("mode", sa.String(length=8), nullable=False),
        sa.Column("retry_of", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("request_digest", sa.LargeBinary(), nullable=False),
        sa.Column("began_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("end", sa.String(length=16), nullable=True),
        sa.Column("status", sa.Integer(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("delivered", sa.String(length=8), server_default="unknown", nullable=False),
        sa.Column("untrainable", sa.String(length=24), nullable=True),
        sa.Column("flags", sa.JSON(), nullable=True),
        sa.Column("label", sa.String(length=32), server_default="", nullable=False),
        sa.Column("forest_key", sa.String(length=64), server_default="", nullable=False),
        sa.Column("parent_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("prefix_len", sa.Integer(), nullable=True),
        sa.Column("storage_parent_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("prompt_len", sa.Integer(), nullable=True),
        sa.Column("completion_len", sa.Integer(), nullable=True),
        sa.Column("finish_reason", sa.String(length=24), nullable=True),
        sa.Column("policy_version", sa.Integer(), nullable=True),
        sa.Column("temperature", sa.Double(), nullable=True),
        sa.Column("engine_ms", sa.Double(), nullable=True),
        sa.Column("held_ms", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_calls_attempt_id_attempts")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_calls")),
        sa.UniqueConstraint("attempt_id", "seq", name=op.f("uq_calls_attempt_id_seq")),
    )
    op.create_table(
        "rewards",
        sa.Column(
            "id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False
        ),
        sa.Column("attempt_id", sa.String(length=64), nullable=False),
        sa.Column("source", sa.String(length=32), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("call_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("detail", sa.JSON(), nullable=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_rewards_attempt_id_attempts")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rewards")),
        sa.UniqueConstraint(
            "attempt_id", "source", "call_id", name=op.f("uq_rewards_attempt_id_source_call_id")
        ),
    )
    with op.batch_alter_table("rewards", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_rewards_attempt_id"), ["attempt_id"], unique=False)

    op.create_table(
        "samples",
        sa.Column("rollout_id", sa.String(length=64), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.String(length=64), nullable=False),
        sa.Column("length", sa.Integer(), nullable=False),
        sa.Column("trained", sa.Integer(), nullable=False),
        sa.Column("prompt_len", sa.Integer(), nullable=False),
        sa.Column("break_reason", sa.String(length=24), nullable=False),
        sa.Column("min_version", sa.Integer(), nullable=False),
        sa.Column("max_version", sa.Integer(), nullable=False),
        sa.Column("call_ids", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_samples_attempt_id_attempts")),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name=op.f("fk_samples_rollout_id_rollouts")),
        sa.PrimaryKeyConstraint("rollout_id", "index", name=op.f("pk_samples")),
    )
    with op.batch_alter_table("samples", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_samples_rollout_id"), ["rollout_id"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("samples", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_samples_rollout_id"))

    op.drop_table("samples")
    with op.batch_alter_table("rewards", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_rewards_attempt_id"))

    op.drop_table("rewards")
    op.drop_table("calls")
    with op.batch_alter_table("attempt_logs", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_attempt_logs_attempt_id"))

    op.drop_table("attempt_logs")
    with op.batch_alter_table("attempts", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_attempts_state"))
        batch_op.drop_index(batch_op.f("ix_attempts_rollout_id"))

    op.drop_table("attempts")
    with op.batch_alter_table("rollouts", schema=None) as batch_op:
        batch_op.drop_index("ix_rollouts_run_id_state")
        batch_op.drop_index(batch_op.f("ix_rollouts_run_id"))
        batch_op.drop_index(batch_op.f("ix_rollouts_group_id"))

    op.drop_table("rollouts")
    op.drop_table("trainer_sessions")
    op.drop_table("step_metrics")
    with op.batch_alter_table("policies", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_policies_run_id"))

    op.drop_table("policies")
    with op.batch_alter_table("groups", schema=None) as batch_op:
        batch_op.drop_index("ix_groups_run_id_step")
        batch_op.drop_index(batch_op.f("ix_groups_run_id"))

    op.drop_table("groups")
    op.drop_table("batches")
    with op.batch_alter_table("tasks", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_tasks_taskset"))
        batch_op.drop_index(batch_op.f("ix_tasks_name"))

    op.drop_table("tasks")
    with op.batch_alter_table("runs", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_runs_state"))

    op.drop_table("runs")
    op.drop_table("messages")
    op.drop_table("instance")
    op.drop_table("idempotency")
    with op.batch_alter_table("holds", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_holds_end_at"))

    op.drop_table("holds")
    op.drop_table("events")
    op.drop_table("call_tokens")
    op.drop_table("call_messages")
    op.drop_table("batch_bodies")
