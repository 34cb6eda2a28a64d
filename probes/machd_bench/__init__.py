"""``machd bench``: how fast a server of the OpenAI API is, and how fast the machine would allow."""
