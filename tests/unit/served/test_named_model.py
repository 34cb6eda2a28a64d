"""One model's life as operators see and steer it, with an engine that does what the test says."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from structlog.testing import capture_logs
from support.engines.model_house import NEEDS, SIZE_BYTES, ModelHouse, ScriptedEngine, let_go_on

from machd.errors import (
    DrainDeadlineError,
    EngineEndedError,
    ModelFormatError,
    ModelNotLoadedError,
    NotReadyError,
)
from machd.served.load_history import LoadOutcome
from machd.served.reserved_needs import placed
from machd.served.residence import Residence
from machd.served.restarts import MAX_RESTARTS
from machd.served.served_models import Waiting
from machd.served.turns import ModelState, Rules
from machd.settings.model import Settings


def test_a_model_counts_its_loads_by_how_they_ended() -> None:
    """One that fails says why to an operator, and is tried again at once."""

    async def main() -> None:
        house = ModelHouse("a", places=1, loads=False)
        with pytest.raises(ModelNotLoadedError, match="could not be loaded: damaged"):
            await house.load("a", ModelFormatError("damaged"))
        model = house.models["a"]
        assert model.state is ModelState.FAILED
        assert (str(model.cause), model.reserved_bytes, model.leases) == ("damaged", 0, 0)

        await house.load("a")
        assert model.is_ready
        assert model.cause is None
        assert model.history.outcomes == {
            LoadOutcome.LOADED: 1, LoadOutcome.FAILED: 1, LoadOutcome.REFUSED: 0,
        }  # fmt: skip

    asyncio.run(main())


def test_a_model_that_never_fits_is_refused_with_the_figures() -> None:
    """The operator gets them, too."""

    async def main() -> None:
        house = ModelHouse("a", places=0)
        loading = asyncio.create_task(house.models.load(house.models["a"]))
        await let_go_on()
        house.models["a"].sized(NEEDS)
        with pytest.raises(ModelNotLoadedError, match=r"needs 0\.00 GB, and models.memory_gb is"):
            await loading
        assert house.models["a"].history.outcomes[LoadOutcome.REFUSED] == 1

    asyncio.run(main())


def test_a_model_that_never_fits_is_refused_again_without_a_process(tmp_path: Path) -> None:
    """Another process is asked once its files or its settings are not the same, or the memory is not."""

    async def main() -> None:
        file = tmp_path / "model.gguf"
        file.write_bytes(b"weights")
        house = ModelHouse("a", places=0)
        a = house.models["a"]
        a.settings = Settings.model_validate({"model": {"path": str(file)}})

        async def ask() -> ModelState:
            """Returns what the model does of a request that comes 10 s later."""
            house.clock.advance(10.0)
            asking = asyncio.create_task(house.models.lease(a))
            await let_go_on()
            state = a.state
            if state is ModelState.LOADING:
                a.sized(NEEDS)
            with pytest.raises(ModelNotLoadedError, match=r"needs 0\.00 GB, and models.memory_gb"):
                await asking
            return state

        assert [await ask(), await ask()] == [ModelState.LOADING, ModelState.FAILED]
        file.write_bytes(b"other weights")
        assert [await ask(), await ask()] == [ModelState.LOADING, ModelState.FAILED]
        a.settings = Settings.model_validate({"model": {"path": str(file), "dtype": "float32"}})
        assert [await ask(), await ask()] == [ModelState.LOADING, ModelState.FAILED]
        assert (a.reserved_bytes, a.leases) == (0, 0)
        house.models.set_rules(Rules(SIZE_BYTES, 60.0), Waiting(loads=True, max_wait_s=60.0))
        await house.load("a")
        assert a.is_ready

    asyncio.run(main())


def test_a_suspended_model_comes_back_for_another_request_alone() -> None:
    """Those that hold it do not have it loaded again, or suspending it would free nothing."""

    async def main() -> None:
        house = ModelHouse("a", places=1)
        await house.load("a")
        model = house.models["a"]
        model.hold()
        model.suspend()
        await let_go_on()
        assert (model.state, model.leases) == (ModelState.UNLOADED, 1)
        assert model.history.suspensions == 1
        asking = asyncio.create_task(house.models.lease(model))
        await let_go_on()
        assert model.state is ModelState.LOADING
        asking.cancel()

    asyncio.run(main())


def test_an_idle_model_that_gives_way_is_not_suspended() -> None:
    """Only what holds up answers counts."""

    async def main() -> None:
        house = ModelHouse("a", "b", places=1)
        await house.load("a")
        await house.load("b")
        a, b = house.models
        assert (a.state, b.state) == (ModelState.UNLOADED, ModelState.READY)
        assert a.history.suspensions == 0

    asyncio.run(main())


def test_a_pin_is_the_operators_until_it_is_forgotten() -> None:
    """Other settings do not take it away; what is forgotten is as the settings say."""

    async def main() -> None:
        house = ModelHouse("a", "b", places=1)
        await house.load("a")
        a, b = house.models
        a.pin(is_pinned=True)
        a.live(Residence(ttl_s=5.0))
        assert a.residence == Residence(is_pinned=True, ttl_s=5.0)
        with pytest.raises(ModelNotLoadedError, match="of which pinned models have"):
            await house.load("b")
        house.models.forget_pins()
        assert a.residence == Residence(ttl_s=5.0)
        await house.load("b")
        assert (a.state, b.state) == (ModelState.UNLOADED, ModelState.READY)

    asyncio.run(main())


def test_a_request_that_leaves_before_its_turn_has_nothing_loaded() -> None:
    """A model that nobody waits for any more does not push another one out."""

    async def main() -> None:
        house = ModelHouse("a", "b", "c", places=1)
        a, b, c = house.models
        first = asyncio.create_task(house.models.load(a))
        await let_go_on()
        waiting = asyncio.create_task(house.models.load(b))
        await let_go_on()
        waiting.cancel()
        await let_go_on()
        a.sized(NEEDS)
        cast("ScriptedEngine", a.served.link).loading.set_result(None)
        await first
        await let_go_on()
        assert (a.state, b.state, c.state) == (
            ModelState.READY, ModelState.UNLOADED, ModelState.UNLOADED,
        )  # fmt: skip

    asyncio.run(main())


def test_what_a_model_needs_is_asked_again_at_each_load() -> None:
    """Its files and settings may have changed: it gets no memory for what it needed the last time."""

    async def main() -> None:
        house = ModelHouse("a", places=1)
        await house.load("a")
        a = house.models["a"]
        a.unload()
        await let_go_on()
        loading = asyncio.create_task(house.models.load(a))
        await let_go_on()
        assert (a.state, a.reserved_bytes) == (ModelState.LOADING, 0)
        a.sized(replace(NEEDS, weights_bytes=1_000))
        with pytest.raises(ModelNotLoadedError, match="needs"):
            await loading

    asyncio.run(main())


def test_a_process_that_takes_the_place_of_one_that_died_gets_no_more_memory() -> None:
    """One that needs more waits for it, or is refused."""

    async def main() -> None:
        house = ModelHouse("a", places=1)
        loading = asyncio.create_task(house.models.load(house.models["a"]))
        await let_go_on()
        a = house.models["a"]
        a.sized(NEEDS)
        assert a.reserved_bytes == SIZE_BYTES
        a.sized(replace(NEEDS, weights_bytes=1_000))
        with pytest.raises(ModelNotLoadedError, match="needs"):
            await loading

    asyncio.run(main())


def test_the_late_end_of_a_refused_engine_is_not_its_successors() -> None:
    """An operator may load it again before the refused process has ended."""

    async def main() -> None:
        house = ModelHouse("a", places=0)
        a = house.models["a"]
        refused = asyncio.create_task(house.models.load(a))
        await let_go_on()
        old = cast("ScriptedEngine", a.served.link)
        a.sized(NEEDS)
        with pytest.raises(ModelNotLoadedError):
            await refused
        again = asyncio.create_task(house.models.load(a))
        await let_go_on()
        old.loading.set_exception(ModelFormatError("ended"))
        await let_go_on()
        assert cast("object", a.served.link) is not old
        assert a.state is ModelState.LOADING
        again.cancel()

    asyncio.run(main())


def test_a_load_that_nobody_waits_for_is_ended_before_others_give_way() -> None:
    """A request that leaves before its model has memory takes nothing from a busy one."""

    async def main() -> None:
        house = ModelHouse("a", "b", places=1)
        await house.load("a")
        a, b = house.models
        a.hold()
        asking = asyncio.create_task(house.models.lease(b))
        await let_go_on()
        b.sized(NEEDS)
        asking.cancel()
        await let_go_on()
        cast("ScriptedEngine", b.served.link).finished.set_result(None)
        await let_go_on()
        house.clock.advance(1_000.0)
        house.models.act()
        assert (a.state, b.state) == (ModelState.READY, ModelState.UNLOADED)

    asyncio.run(main())


def test_a_request_that_may_load_nothing_takes_no_unload_back() -> None:
    """It is refused while the model is being unloaded, which then is."""

    async def main() -> None:
        house = ModelHouse("a", places=1, loads=False)
        await house.load("a")
        a = house.models["a"]
        lease = a.hold()
        a.unload()
        lease.close()
        assert a.claim.state is ModelState.SUSPENDING
        with pytest.raises(ModelNotLoadedError, match="autoload is off"):
            await house.models.lease(a)
        await let_go_on()
        assert a.state is ModelState.UNLOADED

    asyncio.run(main())


def test_requests_that_wait_for_a_model_end_with_the_daemon() -> None:
    """With the reason that they are given."""

    async def main() -> None:
        house = ModelHouse("a", places=1)
        asking = asyncio.create_task(house.models.lease(house.models["a"]))
        await let_go_on()
        house.models.stop(DrainDeadlineError("the server has stopped"))
        with pytest.raises(DrainDeadlineError):
            await asking

    asyncio.run(main())


def test_a_refused_load_is_logged_and_the_next_client_gets_its_figures() -> None:
    """They are no secret of the operator's."""

    async def main() -> None:
        house = ModelHouse("a", places=0)
        a = house.models["a"]
        with capture_logs() as logs:
            asking = asyncio.create_task(house.models.lease(a))
            await let_go_on()
            a.sized(NEEDS)
            with pytest.raises(ModelNotLoadedError):
                await asking
        failed = [one for one in logs if one["event"] == "model.failed"]
        assert ["needs 0.00 GB" in one["error"] for one in failed] == [True]
        with pytest.raises(
            ModelNotLoadedError, match=r"needs 0\.00 GB, .*; it is tried again in 10 s"
        ):
            await house.models.lease(a)

    asyncio.run(main())


def test_the_next_client_is_not_told_why_a_load_failed() -> None:
    """The reason may name files, which are the operator's."""

    async def main() -> None:
        house = ModelHouse("a", places=1)
        with pytest.raises(ModelNotLoadedError):
            await house.load("a", ModelFormatError("/secret is damaged"))
        with pytest.raises(ModelNotLoadedError, match="it is tried again in 10 s") as raised:
            await house.models.lease(house.models["a"])
        assert "secret" not in str(raised.value)

    asyncio.run(main())


def test_a_load_that_has_its_memory_goes_on_without_its_client() -> None:
    """Else a model that loads for longer than clients wait could never be loaded by them."""

    async def main() -> None:
        house = ModelHouse("a", places=1, max_wait_s=0.1)
        a = house.models["a"]
        asking = asyncio.create_task(house.models.lease(a))
        await let_go_on()
        a.sized(NEEDS)
        with pytest.raises(NotReadyError, match=r"limits\.queue_timeout_s"):
            await asking
        assert (a.state, a.leases) == (ModelState.LOADING, 0)
        house.engine("a").loading.set_result(None)
        await let_go_on()
        assert a.is_ready
        assert (await house.models.lease(a)).model is a

    asyncio.run(main())


def test_a_load_of_a_model_that_is_to_be_unloaded_keeps_it() -> None:
    """The operator has asked for it last."""

    async def main() -> None:
        house = ModelHouse("a", places=1)
        await house.load("a")
        a = house.models["a"]
        lease = a.hold()
        a.unload()
        a.load()
        await let_go_on()
        lease.close()
        await let_go_on()
        assert a.is_ready

    asyncio.run(main())


def test_a_load_that_is_ended_keeps_its_memory_until_its_process_has_ended() -> None:
    """Another model reads its weights only then."""

    async def main() -> None:
        house = ModelHouse("a", "b", places=1)
        a, b = house.models
        asking = asyncio.create_task(house.models.lease(a))
        await let_go_on()
        a.sized(NEEDS)
        engine = house.engine("a")
        engine.suspended = Future()
        other = asyncio.create_task(house.models.lease(b))
        await let_go_on()
        house.leave("a")
        asking.cancel()
        await let_go_on()
        b.sized(NEEDS)
        engine.finished.set_result(None)  # its last message, while it still writes blocks to disk
        await let_go_on()
        assert (a.state, a.reserved_bytes, b.reserved_bytes) == (
            ModelState.SUSPENDING, SIZE_BYTES, 0,
        )  # fmt: skip
        engine.suspended.set_result(None)
        await let_go_on()
        assert (a.reserved_bytes, b.reserved_bytes) == (0, SIZE_BYTES)
        other.cancel()

    asyncio.run(main())


def test_waiters_without_a_lease_end_with_a_model_that_leaves() -> None:
    """A reload waits for loads that no request holds."""

    async def main() -> None:
        house = ModelHouse("a", "b", places=1)
        await house.load("a")
        a = house.models["a"]
        lease = a.hold()
        a.suspend()
        await let_go_on()
        waiting = a.want()
        house.leave("a")
        lease.close()
        await let_go_on()
        assert waiting.done()
        assert isinstance(waiting.exception(), DrainDeadlineError)

    asyncio.run(main())


def test_a_pin_of_an_operators_ends_when_the_model_leaves() -> None:
    """It gives way as any other while its answers end."""

    async def main() -> None:
        house = ModelHouse("a", "b", places=1)
        await house.load("a")
        a = house.models["a"]
        a.pin(is_pinned=True)
        a.hold()
        house.leave("a")
        assert not a.claim.is_pinned

    asyncio.run(main())


_LARGE = replace(NEEDS, kv_budget_bytes=10_000_000, bytes_per_token=1_000, context_tokens=1_000)
"""Needs with a KV budget of ten contexts."""


@pytest.mark.parametrize(("keeps", "kv_bytes"), [(False, 1_000_001), (True, 10_000_000)])
def test_a_kv_budget_is_one_context_unless_the_table_sets_it(*, keeps: bool, kv_bytes: int) -> None:
    """What an operator has written for the model is reserved for it."""
    needs = placed(_LARGE, Settings(), keeps_kv_budget=keeps)
    assert (needs.kv_budget_bytes, needs.working_bytes) == (kv_bytes, 0)


def test_a_prefix_cache_of_a_set_size_is_reserved() -> None:
    """It counts as working memory, unless it is off."""
    settings = Settings.model_validate({"cache": {"memory_mb": 7}})
    off = Settings.model_validate({"cache": {"memory_mb": 7, "prefix": False}})
    assert placed(NEEDS, settings, keeps_kv_budget=False).working_bytes == 7_000_000
    assert placed(NEEDS, off, keeps_kv_budget=False).working_bytes == 0


def test_prefix_caches_share_what_no_model_has_reserved() -> None:
    """They shrink before another model reads its weights, and grow when one has gone."""

    async def main() -> None:
        house = ModelHouse("a", "b", places=1_001)

        def limits_mb(name: str) -> int | None:
            return house.engine(name).limits[-1].cache.memory_mb

        await house.load("a")
        assert limits_mb("a") == 20  # a fifth of 100 MB
        await house.load("b")
        assert (limits_mb("a"), limits_mb("b")) == (9, 9)  # each a fifth of half of it
        house.models["b"].unload()
        await let_go_on()
        assert limits_mb("a") == 20

    asyncio.run(main())


def test_a_prefix_cache_gets_what_comes_free_while_its_model_loads() -> None:
    """The process begins with it."""

    async def main() -> None:
        house = ModelHouse("a", "b", places=1_001)
        await house.load("a")
        b = house.models["b"]
        loading = asyncio.create_task(house.models.load(b))
        await let_go_on()
        b.sized(NEEDS)
        assert house.engine("b").limits[-1].cache.memory_mb == 9
        house.models["a"].unload()
        await let_go_on()
        assert house.engine("b").limits[-1].cache.memory_mb == 20
        house.engine("b").loading.set_result(None)
        await loading

    asyncio.run(main())


def test_a_process_that_takes_up_a_suspended_model_begins_with_its_own_settings() -> None:
    """What its last process had room for does not bound what it asks for."""

    async def main() -> None:
        house = ModelHouse("a", places=1)
        await house.load("a")
        a = house.models["a"]
        assert house.engine("a").limits[-1].continuous_batching.kv_budget_gb == 0.0001
        a.unload()
        await let_go_on()
        asking = asyncio.create_task(house.models.lease(a))
        await let_go_on()
        assert house.engine("a").limits[-1] == a.settings
        asking.cancel()

    asyncio.run(main())


def test_a_model_whose_processes_die_while_they_load_is_tried_again_some_times() -> None:
    """Then it counts as one that cannot be loaded, for as long as any other."""

    async def main() -> None:
        house = ModelHouse("a", places=1)
        asking = asyncio.create_task(house.models.lease(house.models["a"]))
        await let_go_on()
        for _ in range(MAX_RESTARTS + 1):
            assert not asking.done()
            house.engine("a").loading.set_exception(EngineEndedError("killed"))
            await let_go_on()
        with pytest.raises(ModelNotLoadedError, match="could not be loaded"):
            await asking

    asyncio.run(main())
