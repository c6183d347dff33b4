"""What a person asks of a run that goes on: another mixture, an evaluation, a save of the trainer's state.

Revision: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("mixture", sa.JSON(), nullable=True))
    op.add_column("runs", sa.Column("mixture_at", sa.Double(), nullable=True))
    asked = sa.Column("evaluation_asked", sa.Boolean(), nullable=False, server_default=sa.false())
    op.add_column("runs", asked)
    op.add_column("runs", sa.Column("save_asked", sa.String(32), nullable=True))


def downgrade() -> None:
    for name in ("save_asked", "evaluation_asked", "mixture_at", "mixture"):
        op.drop_column("runs", name)
