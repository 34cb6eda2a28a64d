"""Keys, values and recurrent state of rows and batches.

Decoders use :mod:`~machd.engine.kv.lane_kv`, satisfied by ``batch_lane`` and ``serial_lane``. Prefix blocks
and proposers use ``row_caches``, attention kernels ``layers.slab``, loading ``formats``. What is known of a
class of caches is in :mod:`~machd.engine.kv.layers`, a file for each kind. All else is internal.
"""
