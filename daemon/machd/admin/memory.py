"""Memory for an operator: of the models, of machd's processes, and of the machine, now and over the last hour."""

from __future__ import annotations

from litestar.di import NamedDependency
from msgspec import Struct

from machd.admin.context import AdminContext
from machd.admin.endpoint import endpoint
from machd.admin.memory_history import MemorySample


class MemoryReport(Struct, frozen=True, kw_only=True):
    """Memory now, and a point each ten seconds of the last hour, the oldest first."""

    now: MemorySample
    history: list[MemorySample]


@endpoint("GET /admin/memory", MemoryReport)
async def get_memory(admin: NamedDependency[AdminContext]) -> MemoryReport:
    """Memory of models, processes and machine, now and over the last hour."""
    await admin.memory.refresh()
    return MemoryReport(now=admin.memory.now, history=list(admin.memory.samples))
