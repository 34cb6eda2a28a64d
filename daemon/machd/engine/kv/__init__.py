"""Keys, values and recurrent state of rows and batches.

Reading order: lane_kv (all that decoders see), row_positions, slab_layout, batch_lane; in layers: batched_cache, slab,
window, merged, state; then rollback, serial_lane, and formats.

A batch has one object for each cache of the model: SlabKv for attention, WindowKv for a sliding window, StateKv for
recurrent state, MergedKv for any other. All four share a pass: one RowPositions tells slabs and windows where each row
begins and ends, and ``BatchLaneKv.begin_pass`` tells the other two each row's number of tokens where spans differ. A
batch has one slab a layer, and several only where ``kernels/fused_llama.py`` attends: llama layers on the CPU in one
process.

Prefix blocks and proposers use ``row_caches``, attention kernels ``layers.slab``, loading ``formats``.
"""
