"""The first tables: models, checkpoints, runs of the collector, leases, facts about the registry; and the view for people.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

from importlib.resources import files

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import oracle

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def digest() -> sa.types.TypeEngine[bytes]:
    """Raw bytes that can be a key: RAW(32) on Oracle."""
    return sa.LargeBinary(32).with_variant(oracle.RAW(32), "oracle")


def serial() -> sa.types.TypeEngine[int]:
    """The type of a primary key that the database numbers."""
    return sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    _create_models()
    _create_checkpoints()
    _create_runs()
    _create_registry()
    name = f"llama_checkpoint_v_{revision}.sql"
    view = files("llama_ckpt.sql") / op.get_context().dialect.name / name
    op.execute(sa.DDL(view.read_text(encoding="utf-8")))


def downgrade() -> None:
    op.execute(sa.DDL("DROP VIEW llama_checkpoint_v"))
    for table in (
        "registry_info",
        "registry_lease",
        "gc_run_item",
        "gc_run",
        "llama_checkpoint_meta",
        "llama_model",
    ):
        op.drop_table(table)


def _create_models() -> None:
    op.create_table(
        "llama_model",
        sa.Column("fingerprint", digest(), nullable=False),
        sa.Column("model_name", sa.String(200), nullable=False),
        sa.Column("weights_sha256", digest(), nullable=False),
        sa.Column("n_layer", sa.Integer(), nullable=False),
        sa.Column("n_kv_head", sa.Integer(), nullable=False),
        sa.Column("kv_token_bytes", sa.BigInteger(), nullable=False),
        sa.Column("fields_json", sa.Text(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("fingerprint", name="pk_llama_model"),
    )
    op.create_index("ix_llama_model_weights", "llama_model", ["weights_sha256"])
    op.create_index("ix_llama_model_name", "llama_model", ["model_name"])


def _create_checkpoints() -> None:
    op.create_table(
        "llama_checkpoint_meta",
        sa.Column("ckpt_no", serial(), sa.Identity(always=False), nullable=False),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("model_name", sa.String(200), nullable=False),
        sa.Column("input_hash", digest(), nullable=False),
        sa.Column("file_path", sa.String(80), nullable=False),
        sa.Column("status", sa.String(8), server_default="ACTIVE", nullable=False),
        sa.Column("active_key", digest(), nullable=True),
        sa.Column("fingerprint", digest(), nullable=False),
        sa.Column("tokens_hash", digest(), nullable=False),
        sa.Column("n_tokens", sa.Integer(), nullable=False),
        sa.Column("memory_kind", sa.String(16), nullable=False),
        sa.Column("file_size", sa.BigInteger(), nullable=False),
        sa.Column("payload_crc32", sa.BigInteger(), nullable=False),
        sa.Column("stale_reason", sa.String(16), nullable=True),
        sa.Column("stale_us", sa.BigInteger(), nullable=True),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("last_used_us", sa.BigInteger(), nullable=False),
        sa.Column("hit_count", sa.BigInteger(), nullable=False),
        sa.Column("prefill_ms", sa.BigInteger(), nullable=True),
        sa.Column("expires_us", sa.BigInteger(), nullable=True),
        sa.Column("lease_until_us", sa.BigInteger(), nullable=True),
        sa.Column("verified_us", sa.BigInteger(), nullable=True),
        sa.Column("pinned", sa.SmallInteger(), nullable=False),
        sa.Column("label", sa.String(200), nullable=True),
        sa.CheckConstraint("status IN ('ACTIVE', 'STALE')", name=op.f("ck_llama_ckpt_meta_status")),
        sa.CheckConstraint("pinned IN (0, 1)", name=op.f("ck_llama_ckpt_meta_pinned")),
        sa.CheckConstraint(
            "(status = 'ACTIVE' AND active_key IS NOT NULL AND stale_reason IS NULL)"
            " OR (status = 'STALE' AND active_key IS NULL AND stale_reason IS NOT NULL)",
            name=op.f("ck_llama_ckpt_meta_active"),
        ),
        sa.ForeignKeyConstraint(["fingerprint"], ["llama_model.fingerprint"], name="fk_llama_ckpt_meta_model"),
        sa.PrimaryKeyConstraint("ckpt_no", name="pk_llama_checkpoint_meta"),
        sqlite_autoincrement=True,
    )
    _index_checkpoints()


def _index_checkpoints() -> None:
    op.create_index("uq_llama_ckpt_meta_id", "llama_checkpoint_meta", ["id"], unique=True)
    op.create_index("uq_llama_ckpt_meta_active", "llama_checkpoint_meta", ["active_key"], unique=True)
    op.create_index("uq_llama_ckpt_meta_path", "llama_checkpoint_meta", ["file_path"], unique=True)
    op.create_index("ix_llama_ckpt_meta_input", "llama_checkpoint_meta", ["input_hash"])
    op.create_index("ix_llama_ckpt_meta_model", "llama_checkpoint_meta", ["fingerprint"])
    op.create_index("ix_llama_ckpt_meta_gc", "llama_checkpoint_meta", ["status", "last_used_us"])


def _create_runs() -> None:
    op.create_table(
        "gc_run",
        sa.Column("run_no", serial(), sa.Identity(always=False), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("host", sa.String(120), nullable=False),
        sa.Column("started_us", sa.BigInteger(), nullable=False),
        sa.Column("ended_us", sa.BigInteger(), nullable=True),
        sa.Column("n_items", sa.BigInteger(), nullable=False),
        sa.Column("n_failed", sa.BigInteger(), nullable=False),
        sa.Column("freed_bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_no", name="pk_gc_run"),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "gc_run_item",
        sa.Column("run_no", serial(), nullable=False),
        sa.Column("item_no", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("file_path", sa.String(400), nullable=False),
        sa.Column("reason", sa.String(400), nullable=False),
        sa.Column("result", sa.String(400), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["run_no"], ["gc_run.run_no"], name="fk_gc_run_item_run", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_no", "item_no", name="pk_gc_run_item"),
    )


def _create_registry() -> None:
    op.create_table(
        "registry_lease",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("holder", sa.String(120), nullable=True),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("expires_us", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_registry_lease"),
    )
    op.create_table(
        "registry_info",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("value", sa.String(400), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_registry_info"),
    )
    op.execute(sa.DDL("INSERT INTO registry_lease (name, fence, expires_us) VALUES ('gc', 0, 0)"))
    # The database draws the registry's id, so that a DBA's script and this program create the same registry.
    drawn = {
        "sqlite": "SELECT 'registry_id', lower(hex(randomblob(16)))",
        "postgresql": "SELECT 'registry_id', replace(gen_random_uuid()::text, '-', '')",
        "oracle": "SELECT 'registry_id', LOWER(RAWTOHEX(SYS_GUID())) FROM DUAL",
    }[op.get_context().dialect.name]
    op.execute(sa.DDL(f"INSERT INTO registry_info (name, value) {drawn}"))
