"""Scheduled runs by the system: what its timers are given (`units`), and how that is installed and removed (`install`)."""
