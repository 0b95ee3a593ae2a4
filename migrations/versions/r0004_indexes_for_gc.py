"""Adds indexes for prune, gc and the byte budget, so that they need not read all of a million rows.

No index begins with the status. Without statistics SQLite would use such an index to find a few rows by their keys, and so read
half of the table for each batch.

Revision ID: 0004
Revises: 0003
"""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("ix_llama_ckpt_meta_gc", table_name="llama_checkpoint_meta")
    op.create_index("ix_llama_ckpt_meta_used", "llama_checkpoint_meta", ["last_used_us", "status"])
    op.create_index("ix_llama_ckpt_meta_stale", "llama_checkpoint_meta", ["stale_us"])
    op.create_index("ix_llama_ckpt_meta_size", "llama_checkpoint_meta", ["file_size"])


def downgrade() -> None:
    op.drop_index("ix_llama_ckpt_meta_size", table_name="llama_checkpoint_meta")
    op.drop_index("ix_llama_ckpt_meta_stale", table_name="llama_checkpoint_meta")
    op.drop_index("ix_llama_ckpt_meta_used", table_name="llama_checkpoint_meta")
    op.create_index("ix_llama_ckpt_meta_gc", "llama_checkpoint_meta", ["status", "last_used_us"])
