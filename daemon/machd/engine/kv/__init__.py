"""Keys, values and recurrent state of rows and batches.

Decoders use :mod:`~machd.engine.kv.lane_kv`, satisfied by ``batch_lane`` and ``serial_lane``. Prefix blocks
and proposers use ``row_caches``, attention kernels ``slab``, loading ``formats``. All else is internal.
"""
