"""Adds prefixes, deltas and claims: start_token and parent_no, checkpoint_prefix, save_claim.

Revision ID: 0002
Revises: 0001
"""

from __future__ import annotations

from importlib.resources import files

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import oracle

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

DELTA = "(parent_no IS NULL AND start_token = 0) OR (parent_no IS NOT NULL AND start_token > 0)"


def digest(length: int) -> sa.types.TypeEngine[bytes]:
    """Raw bytes that can be a key: RAW on Oracle."""
    return sa.LargeBinary(length).with_variant(oracle.RAW(length), "oracle")


def serial() -> sa.types.TypeEngine[int]:
    """The type of the primary key that the column refers to."""
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    # SQLite changes a constraint by copying the table, which a view on it prevents.
    op.execute(sa.DDL("DROP VIEW llama_checkpoint_v"))
    with op.batch_alter_table("llama_checkpoint_meta", table_kwargs={"sqlite_autoincrement": True}) as table:
        table.add_column(sa.Column("start_token", sa.Integer(), server_default=sa.text("0"), nullable=False))
        table.add_column(sa.Column("parent_no", serial(), nullable=True))
        table.create_foreign_key("fk_llama_ckpt_meta_parent", "llama_checkpoint_meta", ["parent_no"], ["ckpt_no"])
        table.create_check_constraint(op.f("ck_llama_ckpt_meta_delta"), DELTA)
    _create_view("0002")
    op.create_index("ix_llama_ckpt_meta_parent", "llama_checkpoint_meta", ["parent_no"])
    op.create_table(
        "checkpoint_prefix",
        sa.Column("prefix_hash", digest(16), nullable=False),
        sa.Column("file_tokens", sa.Integer(), nullable=False),
        sa.Column("ckpt_no", sa.BigInteger(), nullable=False),
        sa.Column("n_tokens", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("prefix_hash", "file_tokens", "ckpt_no", name="pk_checkpoint_prefix"),
        sa.ForeignKeyConstraint(
            ["ckpt_no"], ["llama_checkpoint_meta.ckpt_no"], name="fk_checkpoint_prefix_ckpt", ondelete="CASCADE"
        ),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_checkpoint_prefix_ckpt", "checkpoint_prefix", ["ckpt_no"])
    op.create_table(
        "save_claim",
        sa.Column("claim_key", digest(32), nullable=False),
        sa.Column("holder", sa.String(120), nullable=False),
        sa.Column("reserved_bytes", sa.BigInteger(), nullable=False),
        sa.Column("expires_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("claim_key", name="pk_save_claim"),
    )


def downgrade() -> None:
    op.drop_table("save_claim")
    op.drop_table("checkpoint_prefix")
    op.execute(sa.DDL("DROP VIEW llama_checkpoint_v"))
    # The older version would take a delta's file for a complete one.
    op.execute(
        "UPDATE llama_checkpoint_meta SET status = 'STALE', active_key = NULL, stale_reason = 'incompatible',"
        " stale_us = last_used_us WHERE start_token > 0 AND status = 'ACTIVE'"
    )
    op.drop_index("ix_llama_ckpt_meta_parent", "llama_checkpoint_meta")
    with op.batch_alter_table("llama_checkpoint_meta", table_kwargs={"sqlite_autoincrement": True}) as table:
        table.drop_constraint(op.f("ck_llama_ckpt_meta_delta"), type_="check")
        table.drop_constraint("fk_llama_ckpt_meta_parent", type_="foreignkey")
        table.drop_column("parent_no")
        table.drop_column("start_token")
    _create_view("0001")


def _create_view(version: str) -> None:
    view = files("llama_ckpt.sql") / op.get_context().dialect.name / f"llama_checkpoint_v_{version}.sql"
    op.execute(sa.DDL(view.read_text(encoding="utf-8")))
