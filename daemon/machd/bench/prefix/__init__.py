"""``machd bench --prefix``: what a prefix cache saves, what it holds, and what it costs.

A module for each thing that is measured (steps, latency, sharing, full_cache, kv_formats), one that
runs them in their order, and the tables and bars that show what came out.
"""
