"""The collector: prune marks, gc deletes, purge deletes now, a schedule repeats them.

Owns every deletion of a checkpoint's file, and the plan that is shown before it.
It imports `checkpoints` and below, never another wing (catalogue, warm, exchange, integrity, doctor).
"""

from llama_ckpt.collector.collector import Collector

__all__ = ["Collector"]
