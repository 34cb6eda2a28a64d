"""The only importer of mlx and mlx_lm: it computes and never decides."""
