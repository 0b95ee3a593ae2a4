"""Retention: which checkpoints a policy keeps, and why. Pure functions of columns, policy and clock.

Owns `Policy`, its rules, their explanations and how settings become a policy.
It touches no disk, no database and no clock, and imports none of the other pillars (store, db, engine, metrics).
"""
