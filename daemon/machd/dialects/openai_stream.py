"""What streams of OpenAI's chat completions and completions have in common."""

from __future__ import annotations

from machd.dialects.wire.errors import error_json
from machd.errors import MachdError
from machd.http.sse import COMMENT_KEEP_ALIVE, DONE, EVENT_STREAM, data_frame


class OpenAIStream:
    """Events without names, comments between them, and ``[DONE]`` at the end."""

    media_type = EVENT_STREAM
    keep_alive = COMMENT_KEEP_ALIVE

    def failure(self, error: MachdError) -> bytes:
        """An error in place of a chunk, and the end."""
        return data_frame(error_json(error)) + DONE
