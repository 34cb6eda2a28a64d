"""The matrix of vision-language families: tiny models in machd's engine against mlx-vlm's own generation."""
