"""Lists of a run's rollouts are read in their order instead of being sorted.

Revision: 0004
Revises: 0003
"""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_rollouts_run_id_id", "rollouts", ["run_id", "id"])


def downgrade() -> None:
    op.drop_index("ix_rollouts_run_id_id", "rollouts")
