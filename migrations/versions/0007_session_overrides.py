"""What each trainer session was given of the server's own overrides: they do not change within a run.

Revision: 0007
Revises: 0006
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("trainer_sessions", sa.Column("overrides", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("trainer_sessions", "overrides")
