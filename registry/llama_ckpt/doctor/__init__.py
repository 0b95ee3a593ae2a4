"""The doctor: checks of store, database, policy and model, each with what to do about it.

Owns the checks (`store`, `database`, `model`; `examine` runs them) and their levels (`diagnosis`); it changes nothing but the
file of `probe`, which tries what the store's file system does.
It imports `checkpoints` and below, never another wing (catalogue, warm, exchange, integrity, collector).
"""

from llama_ckpt.doctor.diagnosis import Diagnosis, Level, worst
from llama_ckpt.doctor.examine import examine

__all__ = ["Diagnosis", "Level", "examine", "worst"]
