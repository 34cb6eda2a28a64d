"""Transport: sockets, connections, gate, authentication, bodies, streams, failures; no dialect."""
