"""Adds the number of the checkpoint that a checkpoint extends, so that prune knows which ones are superseded.

Revision ID: 0006
Revises: 0005
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("llama_checkpoint_meta", sa.Column("extends_no", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("llama_checkpoint_meta", "extends_no")
