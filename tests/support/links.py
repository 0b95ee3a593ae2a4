"""The prefix links that a registry has, held to those that it should have."""

from __future__ import annotations

import sqlalchemy as sa

from llama_ckpt.checkpoints.search import token_ids_of
from llama_ckpt.db import prefixes
from llama_ckpt.db.tables import checkpoint_prefix
from llama_ckpt.fingerprint import links_of
from llama_ckpt.values import PrefixLink, Status


def wrong_links(registry) -> list[str]:
    """What links are missing or too many, in words: they must be exactly those of the ACTIVE rows, by their files' token ids."""
    with registry.database.read() as db:
        block_size = prefixes.block_size(db)
        found = {PrefixLink(**dict(row._mapping)) for row in db.execute(sa.select(checkpoint_prefix))}
    expected = {
        link
        for row in registry.list(status=Status.ACTIVE)
        for link in links_of(row, token_ids_of(registry.context, row), block_size)
    }

    def told(links):
        return sorted(f"row {x.ckpt_no} at token {x.n_tokens}" for x in links)

    missing = [f"{what} has no link" for what in told(expected - found)]
    return missing + [f"{what} has a link too many" for what in told(found - expected)]
