"""One checkpoint: match, search, read, save, restore, flatten and register it.

Owns the order that keeps data safe: the file is durable before its row is written. `search` asks the database for candidates
and `match` decides among them; `deltas` chooses a new checkpoint's parent, `budget` whether it may be written; `orphans` are
files without a row, `inputs` and `captured` what a call is given and what a save has in memory.
It imports the context and the pillars below, never a wing (catalogue, warm, exchange, integrity, collector, doctor).
"""
