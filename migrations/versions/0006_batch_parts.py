"""A batch is stored in parts: databases take no value of a gigabyte.

Revision: 0006
Revises: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "batch_parts",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("k", sa.Integer(), nullable=False),
        sa.Column("part", sa.Integer(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "k", "part", name=op.f("pk_batch_parts")),
    )
    op.execute("INSERT INTO batch_parts (run_id, k, part, body) SELECT run_id, k, 0, body FROM batch_bodies")
    op.drop_table("batch_bodies")


def downgrade() -> None:
    bodies = op.create_table(
        "batch_bodies",
        sa.Column("run_id", sa.String(length=64), nullable=False),
        sa.Column("k", sa.Integer(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "k", name=op.f("pk_batch_bodies")),
    )
    connection = op.get_bind()
    parts = sa.table("batch_parts", sa.column("run_id"), sa.column("k"), sa.column("part"), sa.column("body"))
    c = parts.c
    for run_id, k in connection.execute(sa.select(c.run_id, c.k).distinct()).all():
        query = sa.select(c.body).where(c.run_id == run_id, c.k == k).order_by(c.part)
        body = b"".join(bytes(part) for part in connection.execute(query).scalars())
        connection.execute(sa.insert(bodies).values(run_id=run_id, k=k, body=body))
    op.drop_table("batch_parts")
