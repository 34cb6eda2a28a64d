"""Experts on disk: a bank of the experts in memory, and the layers that compute with it.

Read in this order: stored_layer (where an expert lies), bank (which experts are in memory), banked_layer (a layer
that computes with the bank), router_preview (what the next layer will need), banked_model (all of it in a model).
"""
