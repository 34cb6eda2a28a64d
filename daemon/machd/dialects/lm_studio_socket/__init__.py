"""LM Studio's protocol of messages over web sockets, which its packages for Python and TypeScript speak."""
