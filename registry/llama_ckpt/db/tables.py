"""The tables. Names have at most 30 bytes and are no reserved words. Times are BIGINT microseconds UTC, flags are SMALLINT."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Identity,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    text,
)

from llama_ckpt.db.types import Digest, PrefixHash, Serial

VERSION_TABLE = "llama_ckpt_schema"

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
    }
)

llama_model = Table(
    "llama_model",
    metadata,
    Column("fingerprint", Digest, primary_key=True),
    Column("model_name", String(200), nullable=False),
    Column("weights_sha256", Digest, nullable=False),
    Column("n_layer", Integer, nullable=False),
    Column("n_kv_head", Integer, nullable=False),
    Column("kv_token_bytes", BigInteger, nullable=False),
    Column("fields_json", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    Index("ix_llama_model_weights", "weights_sha256"),
    Index("ix_llama_model_name", "model_name"),
)

llama_checkpoint_meta = Table(
    "llama_checkpoint_meta",
    metadata,
    Column("ckpt_no", Serial, Identity(always=False, oracle_order=True), primary_key=True),
    Column("id", String(32), nullable=False),
    Column("model_name", String(200), nullable=False),
    Column("input_hash", Digest, nullable=False),
    Column("file_path", String(80), nullable=False),
    Column("status", String(8), nullable=False, server_default="ACTIVE"),
    Column("active_key", Digest, nullable=True),
    Column(
        "fingerprint",
        Digest,
        ForeignKey("llama_model.fingerprint", name="fk_llama_ckpt_meta_model"),
        nullable=False,
    ),
    Column("tokens_hash", Digest, nullable=False),
    Column("n_tokens", Integer, nullable=False),
    Column("memory_kind", String(16), nullable=False),
    Column("file_size", BigInteger, nullable=False),
    Column("payload_crc32", BigInteger, nullable=False),
    Column("stale_reason", String(16), nullable=True),
    Column("stale_us", BigInteger, nullable=True),
    Column("created_us", BigInteger, nullable=False),
    Column("last_used_us", BigInteger, nullable=False),
    Column("hit_count", BigInteger, nullable=False),
    Column("prefill_ms", BigInteger, nullable=True),
    Column("expires_us", BigInteger, nullable=True),
    Column("lease_until_us", BigInteger, nullable=True),
    Column("verified_us", BigInteger, nullable=True),
    Column("pinned", SmallInteger, nullable=False),
    Column("label", String(200), nullable=True),
    Column("start_token", Integer, nullable=False, server_default=text("0")),
    # No ON DELETE: the database refuses to delete the parent of a row.
    Column(
        "parent_no",
        Serial,
        ForeignKey("llama_checkpoint_meta.ckpt_no", name="fk_llama_ckpt_meta_parent"),
        nullable=True,
    ),
    # The longest checkpoint that this one extends, as of the save. It may be deleted since, so it is no foreign key.
    Column("extends_no", BigInteger, nullable=True),
    CheckConstraint("status IN ('ACTIVE', 'STALE')", name="llama_ckpt_meta_status"),
    CheckConstraint("pinned IN (0, 1)", name="llama_ckpt_meta_pinned"),
    # At most one ACTIVE row per (fingerprint, input hash), in a form that all three databases and batch migrations support.
    CheckConstraint(
        "(status = 'ACTIVE' AND active_key IS NOT NULL AND stale_reason IS NULL)"
        " OR (status = 'STALE' AND active_key IS NULL AND stale_reason IS NOT NULL)",
        name="llama_ckpt_meta_active",
    ),
    CheckConstraint(
        "(parent_no IS NULL AND start_token = 0) OR (parent_no IS NOT NULL AND start_token > 0)",
        name="llama_ckpt_meta_delta",
    ),
    Index("uq_llama_ckpt_meta_id", "id", unique=True),
    Index("uq_llama_ckpt_meta_active", "active_key", unique=True),
    Index("uq_llama_ckpt_meta_path", "file_path", unique=True),
    Index("ix_llama_ckpt_meta_input", "input_hash"),
    Index("ix_llama_ckpt_meta_model", "fingerprint"),
    # No index begins with the status: r0004_indexes_for_gc.py says why.
    Index("ix_llama_ckpt_meta_used", "last_used_us", "status"),
    Index("ix_llama_ckpt_meta_stale", "stale_us"),
    Index("ix_llama_ckpt_meta_size", "file_size"),
    Index("ix_llama_ckpt_meta_parent", "parent_no"),
    sqlite_autoincrement=True,  # a number is never used again: a process that holds an old row must not refer to a new one
)

# One row per block of token ids that a checkpoint's own file covers, while it is ACTIVE. By the order of the key's columns the
# smallest file with a prefix comes first in the index. The chain is seeded with the fingerprint, so there is no model column.
checkpoint_prefix = Table(
    "checkpoint_prefix",
    metadata,
    Column("prefix_hash", PrefixHash, primary_key=True),
    Column("file_tokens", Integer, primary_key=True, autoincrement=False),
    Column(
        "ckpt_no",
        BigInteger,
        ForeignKey("llama_checkpoint_meta.ckpt_no", name="fk_checkpoint_prefix_ckpt", ondelete="CASCADE"),
        primary_key=True,
        autoincrement=False,
    ),
    Column("n_tokens", Integer, nullable=False),
    Index("ix_checkpoint_prefix_ckpt", "ckpt_no"),
    sqlite_with_rowid=False,
)

# The process that computes an input, so that others wait for it instead of computing it too, and the bytes it will take. Saves
# under a byte budget queue at the row of 32 zero bytes.
save_claim = Table(
    "save_claim",
    metadata,
    Column("claim_key", Digest, primary_key=True),
    Column("holder", String(120), nullable=False),
    Column("reserved_bytes", BigInteger, nullable=False),
    Column("expires_us", BigInteger, nullable=False),
)

gc_run = Table(
    "gc_run",
    metadata,
    Column("run_no", Serial, Identity(always=False), primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("host", String(120), nullable=False),
    Column("started_us", BigInteger, nullable=False),
    Column("ended_us", BigInteger, nullable=True),
    Column("n_items", BigInteger, nullable=False),
    Column("n_failed", BigInteger, nullable=False),
    Column("freed_bytes", BigInteger, nullable=False),
    sqlite_autoincrement=True,
)

gc_run_item = Table(
    "gc_run_item",
    metadata,
    Column(
        "run_no",
        Serial,
        ForeignKey("gc_run.run_no", name="fk_gc_run_item_run", ondelete="CASCADE"),
        primary_key=True,
    ),
    Column("item_no", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", String(16), nullable=False),
    Column("file_path", String(400), nullable=False),
    Column("reason", String(400), nullable=False),
    Column("result", String(400), nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
)

# Files without a row, as the last runs of gc saw them: gc deletes only files that an earlier run saw.
ghost_seen = Table(
    "ghost_seen",
    metadata,
    Column("file_path", String(120), primary_key=True),
    Column("mtime_ns", BigInteger, nullable=False),
    Column("size_bytes", BigInteger, nullable=False),
    Column("seen_us", BigInteger, nullable=False),
)

# One row per process that runs a schedule. The next run is stored before the current one begins.
gc_schedule = Table(
    "gc_schedule",
    metadata,
    Column("holder", String(120), primary_key=True),
    Column("spec", String(200), nullable=False),
    Column("started_us", BigInteger, nullable=False),
    Column("next_us", BigInteger, nullable=True),
    Column("last_us", BigInteger, nullable=True),
    Column("last_result", String(400), nullable=True),
)

# Counts of rare events per day since 1970 (UTC, by the database's clock).
usage_day = Table(
    "usage_day",
    metadata,
    Column("day_no", BigInteger, primary_key=True, autoincrement=False),
    Column("event_name", String(30), primary_key=True),
    Column("n_times", BigInteger, nullable=False),
)

registry_lease = Table(
    "registry_lease",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("holder", String(120), nullable=True),
    Column("fence", BigInteger, nullable=False),
    Column("expires_us", BigInteger, nullable=False),
)

registry_info = Table(
    "registry_info",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("value", String(400), nullable=False),
)
