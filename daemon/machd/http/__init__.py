"""Litestar: one module for each endpoint family."""
