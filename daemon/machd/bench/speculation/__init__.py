"""``machd bench --speculation``: what guessing ahead gains where a text is copied, and costs elsewhere.

Two daemons of one model, one that guesses and one that does not, are asked for the same answers in
turns. A module for what is asked (workloads), for a daemon and its counters (server, counters), for
what came out (pairs, figures), one that runs it, and the tables and bars that show it.
"""
