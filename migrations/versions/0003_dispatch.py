"""N as a person set it, and when a run's infra failures in a row began.

Revision: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("instance", sa.Column("in_flight", sa.Integer(), nullable=True))
    op.add_column("instance", sa.Column("in_flight_instead_of", sa.Integer(), nullable=True))
    op.add_column("runs", sa.Column("infra_since", sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column("runs", "infra_since")
    op.drop_column("instance", "in_flight_instead_of")
    op.drop_column("instance", "in_flight")
