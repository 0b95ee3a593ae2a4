"""Adds ghosts that gc saw, schedules, and the row at which saves queue under a byte budget.

Revision ID: 0003
Revises: 0002
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

BUDGET_KEY = "00" * 32


def upgrade() -> None:
    op.create_table(
        "ghost_seen",
        sa.Column("file_path", sa.String(120), nullable=False),
        sa.Column("mtime_ns", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("seen_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("file_path", name="pk_ghost_seen"),
    )
    op.create_table(
        "gc_schedule",
        sa.Column("holder", sa.String(120), nullable=False),
        sa.Column("spec", sa.String(200), nullable=False),
        sa.Column("started_us", sa.BigInteger(), nullable=False),
        sa.Column("next_us", sa.BigInteger(), nullable=True),
        sa.Column("last_us", sa.BigInteger(), nullable=True),
        sa.Column("last_result", sa.String(400), nullable=True),
        sa.PrimaryKeyConstraint("holder", name="pk_gc_schedule"),
    )
    literal = {"sqlite": f"X'{BUDGET_KEY}'", "postgresql": f"decode('{BUDGET_KEY}', 'hex')"}
    key = literal.get(op.get_context().dialect.name, f"HEXTORAW('{BUDGET_KEY}')")
    op.execute(
        f"INSERT INTO save_claim (claim_key, holder, reserved_bytes, expires_us) VALUES ({key}, 'budget', 0, 0)"  # noqa: S608
    )


def downgrade() -> None:
    op.execute("DELETE FROM save_claim WHERE holder = 'budget'")
    op.drop_table("gc_schedule")
    op.drop_table("ghost_seen")
