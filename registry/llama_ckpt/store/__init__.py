"""The store: checkpoint files on disk, their names, and the processes that write temporaries.

Owns every path below the store's root: staging, rename and unlink (`store`, on `disk`), names and the walk (`layout`), the
marker of the registry (`marker`), and which process writes a temporary (`writers`).
It depends on no row, engine or policy, and imports none of the other pillars (retention, db, engine, metrics).
"""
