"""Measuring a server from outside, over HTTP, and against what the machine could do at best.

Knows no engine and no tensor: servers and the bare loop run as processes of their own.
"""
