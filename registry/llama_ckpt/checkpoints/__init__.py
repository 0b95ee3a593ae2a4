"""One checkpoint: match, search, read, save, restore, flatten and register it.

Owns the order that keeps data safe: the file is durable before its row is written.
It imports the context and the pillars below, never a wing (catalogue, warm, exchange, integrity, collector, doctor).
"""
