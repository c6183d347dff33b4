"""Images: stored once each by content, and which tokens of a prompt stand for which.

Revision: 0002
Revises: 0001
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "media",
        sa.Column("sha256", sa.LargeBinary(), nullable=False),
        sa.Column("media_type", sa.String(length=32), nullable=False),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_media")),
    )
    op.add_column("call_tokens", sa.Column("media", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    op.drop_column("call_tokens", "media")
    op.drop_table("media")
