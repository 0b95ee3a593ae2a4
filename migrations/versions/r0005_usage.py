"""Adds counts of rare events per day.

Revision ID: 0005
Revises: 0004
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "usage_day",
        sa.Column("day_no", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("event_name", sa.String(30), nullable=False),
        sa.Column("n_times", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("day_no", "event_name", name="pk_usage_day"),
    )


def downgrade() -> None:
    op.drop_table("usage_day")
