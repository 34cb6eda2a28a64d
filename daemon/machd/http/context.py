"""Context of the endpoints: the running parts and the settings they obey."""

from __future__ import annotations

from dataclasses import dataclass, field

from machd.capabilities.versions import Versions
from machd.clock import Clock
from machd.generations.response_store import ResponseStore
from machd.generations.service import GenerationService
from machd.http.model_names import ModelNames
from machd.served.served_model import ServedModel
from machd.settings.model import Settings


@dataclass(frozen=True, slots=True)
class ServerContext:
    """Made once by ``compose.Parts``, read by every handler."""

    served: ServedModel
    service: GenerationService
    clock: Clock
    settings: Settings
    versions: Versions
    responses: ResponseStore
    names: ModelNames = field(default_factory=ModelNames)

    def check_model(self, asked: str | None) -> None:
        """Refuse a request for another model than the served one.

        Raises:
            ModelNotServedError: It names another model.
            InvalidRequestError: It names none, and not every name is accepted.
        """
        self.names.check(asked, self.served.model.model_id)
