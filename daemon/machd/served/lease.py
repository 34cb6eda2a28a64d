"""A request's hold on a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from machd.served.named_model import NamedModel


class Lease:
    """A request's hold on a model, from before its load to the end of the answer."""

    def __init__(self, model: NamedModel) -> None:
        """Count as one of the model's leases."""
        self.model = model
        self._is_open = True

    def close(self) -> None:
        """Give it back; again is no mistake."""
        if self._is_open:
            self._is_open = False
            self.model.release()
