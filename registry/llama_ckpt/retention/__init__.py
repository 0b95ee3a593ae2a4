"""Retention: which checkpoints a policy keeps, and why. Pure functions of columns, policy and clock.

Owns `Policy` with the declarations of its settings (`policy`, which needs no numpy), its rules (`rules`) and their explanations.
It touches no disk, no database and no clock, and imports none of the other pillars (store, db, engine, metrics).
"""
