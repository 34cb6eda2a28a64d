"""Ways to put an opened model into memory: dtype, quantisation, experts on disk, a rank's shard."""
