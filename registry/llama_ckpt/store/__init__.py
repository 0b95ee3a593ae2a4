"""The store: checkpoint files on disk, their names, and who writes a temporary.

Owns every path below the store's root: staging, fsync, rename, map, walk, unlink, and the marker of the registry.
It knows no row, no engine and no policy, and imports none of the other pillars (retention, db, engine, metrics).
"""
