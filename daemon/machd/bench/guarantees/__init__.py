"""``machd bench --guarantees``: what machd promises in seconds, measured on a real process.

A guarantee is a class with a name, a goal and one try; ``run`` repeats the tries. A try ends with a
number of seconds, or with an ``Obstacle`` where this model or this machine does not allow it.
"""
