"""What services count: histograms as the library's, latencies shared among tokens, idle engines, labels of vLLM."""

import asyncio
import threading
from types import SimpleNamespace

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as LibraryHistogram

from benchmarks.pair_simulation import round_times
from draftwire.engine.engine_metrics import COUNTS
from draftwire.errors import NoRoomError
from draftwire.method.rounds import DraftTimings, Fence, Verdict
from draftwire.method.token_source import TokenSource
from draftwire.options.ahead.held_blocks import HeldTally
from draftwire.runtime import metrics_endpoint
from draftwire.runtime.histogram import Histogram
from draftwire.runtime.metrics import LONG_SECONDS, SECONDS, ServiceMetrics
from draftwire.runtime.metrics_endpoint import MetricsApp, MetricsPage
from draftwire_gateway.auth.access import Access
from draftwire_gateway.config import GatewayConfig
from draftwire_gateway.core import GatewayCore
from draftwire_gateway.http.app import make_app
from draftwire_gateway.metrics import PARTS, GatewayMetrics
from draftwire_gateway.request_record import Latencies
from draftwire_gateway.session.round_times import RoundTimes, WhyPlain
from draftwire_verifier.draft_waits import DraftWaits, IdleWatch
from draftwire_verifier.drafters import Drafters, Greeting
from draftwire_verifier.metrics import VerifierMetrics
from tests.metric_families import IDLE, OF_PROCESS, PROCESS_SERIES

OF_MODEL = {"model_name": "big", "engine": "0"}
BOUNDS = (0.5, 1.0, 2.0)
ACCEPTED = {
    "nothing": "",
    "Prometheus 2": "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Prometheus 3": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
}
"""What scrapers send as `Accept`."""
PLAIN = "text/plain; version=0.0.4; charset=utf-8"


def value(metrics: ServiceMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"draftwire:{name}", labels)


def assert_values(metrics: ServiceMetrics, expected: dict[str, float], **labels: str) -> None:
    assert {name: value(metrics, name, **labels) for name in expected} == expected


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.2, 0.5, 0.7, 1.0, 2.0, 3.0]), st.integers(1, 4)), max_size=20))
def test_histogram_exports_what_the_library_does(values: list[tuple[float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histogram = Histogram("x:h", "What it is.", BOUNDS, ("part",))
    ours.register(histogram)
    library = LibraryHistogram("x:h", "What it is.", ["part"], buckets=BOUNDS, registry=theirs)
    tally, reference = histogram.labels("a"), library.labels("a")
    assert histogram.labels("a") is tally
    for number, times in values:
        tally.observe(number, times)
        for _ in range(times):
            reference.observe(number)

    def lines(registry: CollectorRegistry) -> dict[str, float]:
        text = generate_latest(registry).decode()
        return {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith("x:h") and "_created" not in line
        }

    assert (lines(ours), len(lines(ours))) == (pytest.approx(lines(theirs)), len(BOUNDS) + 3)


@pytest.mark.parametrize("bounds", [SECONDS, LONG_SECONDS, COUNTS])
def test_bounds_ascend(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))


def test_names_of_vllm_get_their_labels_when_the_model_is_known() -> None:
    metrics = GatewayMetrics()
    metrics.tokens.inc(3)
    assert value(metrics, "generation_tokens_total", **OF_MODEL) is None
    metrics.of_model.model_name = "big"
    assert value(metrics, "generation_tokens_total", **OF_MODEL) == 3.0
    assert value(metrics, "generation_tokens_total") is None
    assert value(metrics, "requests_total", result="stop") == 0.0


def times(num_draft_tokens: int = 0, num_accepted: int = 0, **changes: float | bool | WhyPlain | None) -> RoundTimes:
    return round_times(0, 0.0, 0.0, num_draft_tokens, num_accepted, **{"why_plain": None, **changes})


def counts(metrics: GatewayMetrics, suffix: str) -> dict[str, float]:
    found = {part: value(metrics, f"round_seconds_{suffix}", part=part) or 0.0 for part in PARTS}
    return {part: number for part, number in found.items() if number}


def test_parts_of_rounds_are_counted_where_a_round_has_them() -> None:
    metrics = GatewayMetrics()
    metrics.observe_round(times(is_first=True, why_plain=WhyPlain.WARMING_UP, prefill_s=2.0))
    assert counts(metrics, "count") == {"prefill": 1.0, "gateway": 1.0}
    metrics.observe_round(times(4, 2, calibration_s=0.25, draft_s=0.5, queue_s=1.0, verify_s=4.0, wire_s=8.0))
    metrics.observe_round(times(why_plain=WhyPlain.NO_DRAFTER, lost_s=16.0, gateway_s=32.0))
    assert counts(metrics, "count") == {
        "lost": 1.0, "prefill": 1.0, "draft": 1.0, "wire": 2.0, "queue": 2.0, "verify": 2.0, "gateway": 3.0
    }  # fmt: skip
    assert counts(metrics, "sum") == {
        "lost": 16.0, "prefill": 2.0, "draft": 0.75, "wire": 8.0, "queue": 1.0, "verify": 4.0, "gateway": 32.0
    }  # fmt: skip
    plain = {why: value(metrics, "rounds_total", kind="plain", reason=why.value) for why in WhyPlain}
    assert plain == dict.fromkeys(WhyPlain, 0.0) | {WhyPlain.WARMING_UP: 1.0, WhyPlain.NO_DRAFTER: 1.0}
    assert value(metrics, "rounds_total", kind="speculative", reason="") == 1.0
    assert value(metrics, "round_tokens_total") == 5.0


def test_time_between_rounds_is_shared_among_the_tokens_of_the_later_one() -> None:
    metrics = GatewayMetrics()
    metrics.of_model.model_name = "big"
    now = [10.0]
    latencies = Latencies(metrics, lambda: now[0])

    def after(seconds: float, choice: int, num_tokens: int) -> None:
        now[0] += seconds
        latencies.count_tokens(choice, num_tokens)

    after(2.0, 0, 3)
    after(1.0, 1, 1)  # of another choice: its first
    after(1.0, 0, 4)  # 2 s after the last of its choice
    after(0.5, 0, 0)  # text alone
    after(0.5, 0, 1)
    now[0] += 1.0
    latencies.count_end()
    read = {
        name: (value(metrics, f"{name}_count", **OF_MODEL), value(metrics, f"{name}_sum", **OF_MODEL))
        for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")
    }
    assert read == {
        "time_to_first_token_seconds": (2.0, 5.0),
        "inter_token_latency_seconds": (5.0, 3.0),
        "e2e_request_latency_seconds": (1.0, 6.0),
    }


def verdict(num_drafted: int, num_accepted: int, queue_us: int = 0) -> Verdict:
    tokens = list(range(num_accepted + 1))
    return Verdict(
        Fence(1, 0, 3, 9, 5), tokens, num_drafted, num_accepted, TokenSource.RECOVERED, 0,
        queue_us=queue_us, timings=DraftTimings(),
    )  # fmt: skip


def test_positions_are_counted_as_far_as_they_were_judged_and_accepted() -> None:
    metrics = VerifierMetrics()
    metrics.watch(IDLE, "big", "float32")
    for num_drafted, num_accepted in ((2, 2), (4, 1), (1, 0), (0, 0)):
        metrics.count(verdict(num_drafted, num_accepted))
    per_position = [
        [
            value(metrics, f"spec_decode_num_{kind}_tokens_per_pos_total", position=str(place), **OF_MODEL)
            for place in range(4)
        ]
        for kind in ("draft", "accepted")
    ]
    assert per_position == [[3.0, 2.0, 1.0, 1.0], [2.0, 1.0, 0.0, 0.0]]
    totals = {"num_draft_tokens": 7.0, "num_accepted_tokens": 3.0, "num_drafts": 3.0}
    expected = {f"spec_decode_{name}_total": number for name, number in totals.items()}
    assert_values(metrics, expected | {"generation_tokens_total": 7.0}, **OF_MODEL)


def test_steps_and_later_rounds_are_counted_with_their_time() -> None:
    """First rounds wait for their prompts, and are no part of the queue."""
    metrics = VerifierMetrics()
    metrics.count(verdict(0, 0, queue_us=9_000_000), is_first=True)
    metrics.count(verdict(2, 1, queue_us=500_000))
    assert_values(metrics, {"queue_seconds_count": 1.0, "queue_seconds_sum": 0.5})
    metrics.count_step(3, 0.25)
    metrics.count_step(1, 0.5)
    expected = {"steps_total": 2.0, "busy_seconds_total": 0.75, "step_sessions_sum": 4.0, "step_seconds_count": 2.0}
    assert_values(metrics, {f"engine_{name}": number for name, number in expected.items()})
    assert_values(metrics, {"engine_step_sessions_bucket": 1.0}, le="1.0")


def test_only_refusals_for_want_of_room_are_counted() -> None:
    metrics = VerifierMetrics()
    for error in (NoRoomError("full"), ValueError("other")):
        with pytest.raises(type(error)), metrics.counting_refusals():
            raise error
    with metrics.counting_refusals():
        pass
    assert_values(metrics, {"sessions_refused_total": 1.0})


def test_cache_is_counted_in_tokens_of_which_unread_ones_take_no_room_yet() -> None:
    sessions = {
        1: SimpleNamespace(committed=[0] * 20, num_unread=1),
        2: SimpleNamespace(committed=[0] * 8, num_unread=8),
    }
    room = SimpleNamespace(size=64, num_reserved=48, usage=0.75)
    metrics = VerifierMetrics()
    metrics.watch(SimpleNamespace(sessions=sessions, dropped={"odd": 2}, prefix_tokens={}, room=room), "big", "u8")
    of_cache = {"kv_cache_size_tokens": 64.0, "kv_cache_reserved_tokens": 48.0, "kv_cache_used_tokens": 19.0}
    assert_values(metrics, of_cache | {"num_sessions": 2.0})
    assert value(metrics, "model_info", dtype="u8") == 1.0
    assert value(metrics, "kv_cache_usage_perc", **OF_MODEL) == 0.75
    dropped = {reason: value(metrics, "messages_dropped_total", reason=reason) for reason in ("odd", "stale")}
    assert dropped == {"odd": 2.0, "stale": 0.0}


def test_engine_waits_only_while_it_idles_and_somebody_waits() -> None:
    watch = IdleWatch()
    for happens, read_at, waited in (
        ([(watch.set_idle, True, 1.0)], 5.0, 0.0),  # nobody waits
        ([(watch.wait, 1, 5.0), (watch.wait, 1, 6.0), (watch.wait, -1, 7.0)], 7.5, 2.5),  # it goes on
        ([(watch.wait, -1, 8.0)], 9.0, 3.0),
        ([(watch.wait, 1, 20.0), (watch.set_idle, False, 21.0)], 22.0, 4.0),  # others have work
        ([(watch.set_idle, True, 30.0), (watch.set_idle, True, 31.0), (watch.set_idle, False, 32.0)], 33.0, 6.0),
        ([(watch.wait, -1, 40.0)], 41.0, 6.0),
    ):
        for change, argument, at in happens:
            change(argument, at)
        assert watch.waited(read_at) == waited, read_at


def test_waiting_is_exported_while_it_goes_on_and_never_falls() -> None:
    now = [0.0]
    watch = IdleWatch()
    metrics = VerifierMetrics()
    metrics.watch_waits(DraftWaits(lambda: now[0], idle=watch), HeldTally())
    watch.set_idle(True, 0.0)
    watch.wait(1, 1.0)
    name = "engine_waiting_for_drafts_seconds_total"
    read = []
    for now[0] in (3.0, 5.0):
        read.append(value(metrics, name))
    watch.set_idle(False, 4.75)  # the step was made before, and is noted only now
    for now[0] in (5.5, 9.0):
        read.append(value(metrics, name))
    watch.set_idle(True, 10.0)
    now[0] = 12.0
    assert [*read, value(metrics, name)] == [2.0, 4.0, 4.0, 4.0, 5.75]


def samples_of(text: str) -> list[str]:
    return [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]


def scraper_of(
    metrics: ServiceMetrics, *, is_local: bool = True, state: SimpleNamespace | None = None
) -> httpx2.AsyncClient:
    app = MetricsApp(
        MetricsPage(metrics.registry), state or SimpleNamespace(refusal="", unready="", is_live=True), is_local=is_local
    )
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1:9052")


@pytest.mark.parametrize("accepted", ACCEPTED.values(), ids=list(ACCEPTED))
async def test_names_are_the_same_whatever_a_scraper_accepts(accepted: str) -> None:
    metrics = ServiceMetrics()
    metrics.counter("requests", "Requests.", ("result",)).labels("stop").inc()
    async with scraper_of(metrics) as client:
        answer = await client.get("/metrics", headers={"accept": accepted})
    names = samples_of(answer.text)
    assert answer.headers["Content-Type"] == PLAIN
    assert 'draftwire:requests_total{result="stop"}' in names
    assert names == samples_of(generate_latest(metrics.registry).decode())
    assert all(name.startswith(("draftwire:", "process_")) for name in names)


def test_process_is_measured_under_the_names_that_every_exporter_uses() -> None:
    samples = [sample for family in ServiceMetrics().registry.collect() for sample in family.samples]
    assert {sample.name for sample in samples if sample.name.startswith(OF_PROCESS)} == PROCESS_SERIES


def test_tokens_are_counted_by_caller_only_where_that_is_asked_for() -> None:
    for counts, expected in ((False, None), (True, 5.0)):
        metrics = GatewayMetrics(counts_callers=counts)
        metrics.count_prompts(5, "alice")
        metrics.count_generated(5, "alice")
        for kind in ("prompt", "generation"):
            assert value(metrics, "caller_tokens_total", caller="alice", kind=kind) == expected


async def test_metrics_of_this_machine_are_read_by_no_page_under_another_name() -> None:
    for is_local, host, status in (
        (True, "rebound.example:9052", 403),
        (True, "localhost:9052", 200),
        (False, "a", 200),
    ):
        async with scraper_of(ServiceMetrics(), is_local=is_local) as client:
            answer = await client.get("/metrics", headers={"host": host})
            assert (answer.status_code, "startup_seconds" in answer.text) == (status, status == 200)
            assert (await client.post("/metrics", headers={"host": host})).status_code == (
                405 if status == 200 else 403
            )


@pytest.mark.parametrize(
    ("refusal", "is_live", "ready", "live"),
    [
        ("", True, 200, 200),
        ("loading", True, 503, 200),
        ("draining", True, 503, 200),
        ("stuck", False, 503, 503),
        ("full", True, 503, 200),  # it refuses nothing for that
    ],
)
async def test_probes_say_whether_a_service_is_ready_and_whether_it_lives(
    refusal: str, is_live: bool, ready: int, live: int
) -> None:
    state = SimpleNamespace(refusal="" if refusal == "full" else refusal, unready=refusal, is_live=is_live)
    async with scraper_of(ServiceMetrics(), state=state) as client:
        for path, status in (("/readyz", ready), ("/livez", live), ("/metrics", 200), ("/", 404), ("/health", 404)):
            answer = await client.get(path)
            assert answer.status_code == status, path
            if status == 503:
                assert refusal in answer.text
            assert (await client.head(path)).status_code == status


@pytest.mark.parametrize("num_scrapers", [8, 16])
async def test_whoever_asks_while_metrics_are_made_gets_the_next_with_all_others(
    num_scrapers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice as many cost no more, and nobody gets what was begun before the question."""
    began, may_go_on, made = threading.Semaphore(0), threading.Semaphore(0), 0

    def rendered(_registry: CollectorRegistry) -> bytes:
        nonlocal made
        made += 1
        text = b"x %d" % made
        began.release()
        assert may_go_on.acquire(timeout=10.0)
        return text

    monkeypatch.setattr(metrics_endpoint, "generate_latest", rendered)
    page = MetricsPage(CollectorRegistry())
    first = asyncio.create_task(page.text())
    assert await asyncio.to_thread(began.acquire, timeout=10.0)
    others = [asyncio.create_task(page.text()) for _ in range(num_scrapers)]
    await asyncio.sleep(0)
    may_go_on.release(2)
    assert await first == b"x 1"
    assert await asyncio.gather(*others) == [b"x 2"] * num_scrapers
    assert made == 2


@pytest.mark.parametrize("accepted", ACCEPTED.values(), ids=list(ACCEPTED))
async def test_names_are_the_same_on_the_gateways_own_port(accepted: str) -> None:
    core = GatewayCore(GatewayConfig(), SimpleNamespace())  # type: ignore[arg-type]
    app = make_app(core, list, Access(None), SimpleNamespace(refusal=""), pages={})
    before = samples_of(generate_latest(core.metrics.registry).decode())
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1") as client:
        answer = await client.get("/metrics", headers={"accept": accepted})
    assert answer.headers["content-type"] == PLAIN
    assert samples_of(answer.text) == before
    assert 'draftwire:requests_total{result="stop"}' in samples_of(answer.text)


def test_drafters_may_come_while_they_are_read() -> None:
    drafters = Drafters()
    first = drafters.connect(Greeting("small", "host a", 1))
    read = iter(drafters)
    drafters.connect(Greeting("small", "host a", 2))
    assert list(read) == [first]
