"""Keys, values and recurrent state of rows and batches.

Decoders use :mod:`~machd.engine.kv.lane_kv`, satisfied by ``batch_lane`` and ``serial_lane``. Prefix blocks
and proposers use ``row_caches``, attention kernels ``layers.slab``, loading ``formats``. Each kind
of cache has a file in :mod:`~machd.engine.kv.layers`. All else is internal.
"""
