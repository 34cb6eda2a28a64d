"""Keys and values of rows and batches: slab, caches, positions, rollback, formats."""
