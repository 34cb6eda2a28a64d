"""The families of GGUF files, each as an architecture of mlx-lm."""
