"""A database as new, without making its schema again."""

from __future__ import annotations

import uuid

import sqlalchemy as sa

from llama_ckpt.db.connect import Database
from llama_ckpt.db.tables import llama_checkpoint_meta, metadata, registry_info, registry_lease, save_claim


def empty(url: str) -> None:
    """Deletes every row of ours and draws a new registry id."""
    database = Database(url)
    with database.write() as db:
        db.execute(sa.update(llama_checkpoint_meta).values(parent_no=None, start_token=0))
        for table in reversed(metadata.sorted_tables):
            if table not in (registry_lease, save_claim):
                db.execute(sa.delete(table))
        db.execute(sa.delete(save_claim).where(save_claim.c.holder != "budget"))
        db.execute(sa.update(registry_lease).values(holder=None, fence=0, expires_us=0))
        db.execute(sa.insert(registry_info).values(name="registry_id", value=uuid.uuid4().hex))
    database.close()
