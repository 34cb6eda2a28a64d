"""Several processes that compute one model, each its shard of it, over mx.distributed.

Rank 0 has the scheduler and everything that decides; the other ranks are told each step and run it.
"""
