"""The store: checkpoint files on disk, their names, and the processes that write temporaries.

Owns every path below the store's root: staging, fsync, rename, map, walk, unlink, and the marker of the registry.
It depends on no row, engine or policy, and imports none of the other pillars (retention, db, engine, metrics).
"""
