"What OpenTelemetry's conventions for generative AI say of a server: histograms in /metrics for each request, and spans that are a part of the client's trace."

import http.client, json, sys

import pytest

httpx = pytest.importorskip("httpx", reason="needs httpx: pip install '.[dev]'")
pytest.importorskip("fastapi", reason="needs fastapi: pip install '.[dev]'")
pytest.importorskip("uvicorn", reason="needs uvicorn: pip install '.[dev]'")

from batchlab.errors import JobError
from batchlab.serve import telemetry
from batchlab.serve.telemetry import LIMITS
from helpers import until
from test_server import CHAT, TALK, TEXT, paused_after, serving

RESPONSES, MESSAGES, EMBED = "/v1/responses", "/v1/messages", "/v1/embeddings"
DURATION = "gen_ai_server_request_duration_seconds"
FIRST = "gen_ai_server_time_to_first_token_seconds"
TOKEN = "gen_ai_server_time_per_output_token_seconds"
USAGE = "gen_ai_client_token_usage"
BODIES = {
    CHAT: dict(messages=TALK, max_tokens=5, temperature=0, ignore_eos=True),
    TEXT: dict(prompt=["a", "tell me more"], max_tokens=5, temperature=0, ignore_eos=True),
    RESPONSES: dict(input="Hello", max_output_tokens=5, temperature=0, ignore_eos=True),
    MESSAGES: dict(model="tiny", messages=TALK, max_tokens=5, temperature=0),
    EMBED: dict(input=["a", "tell me more"]),
}
NAMES = {TEXT: "text_completion", EMBED: "embeddings"}


@pytest.fixture
def s():
    with serving() as s, httpx.Client(base_url=s.url, timeout=100) as web:
        s.web = web
        s.value = lambda name, **labels: value(s, name, labels)
        yield s


def value(s, name, labels):
    "The sum of the samples of a metric that have `labels`."
    families = s.api.metrics.registry.collect()
    found = [x for f in families for x in f.samples if x.name == name]
    return sum(x.value for x in found if labels.items() <= x.labels.items())


@pytest.mark.parametrize("stream", [False, True])
def test_each_kind_of_request_counts_once(s, stream):
    for path, body in BODIES.items():
        if stream and path == EMBED:
            continue
        own = dict(gen_ai_operation_name=NAMES.get(path, "chat"), gen_ai_provider_name="batchlab")
        own |= dict(gen_ai_request_model="tiny", gen_ai_response_model="tiny")
        count = lambda name, **more: s.value(name, **own | more)
        usage = lambda kind: count(f"{USAGE}_sum", gen_ai_token_type=kind)
        before = [count(f"{k}_count") for k in (DURATION, FIRST, TOKEN)], usage("input")
        r = s.web.post(path, json=body | (dict(stream=True) if stream else {}))
        assert r.status_code == 200, r.text
        until(lambda: count(f"{DURATION}_count") == before[0][0] + 1)
        assert usage("input") > before[1]
        if path == EMBED:
            continue
        assert [count(f"{k}_count") for k in (FIRST, TOKEN)] == [n + 1 for n in before[0][1:]]
    made = s.value(f"{USAGE}_sum", gen_ai_token_type="output")
    assert made == s.llm.stats().output_tokens > 0


def test_the_tokens_are_those_of_the_answer(s):
    used = s.web.post(CHAT, json=BODIES[CHAT]).json()["usage"]
    for kind, k in (("input", "prompt_tokens"), ("output", "completion_tokens")):
        until(lambda: s.value(f"{USAGE}_sum", gen_ai_token_type=kind) == used[k])


def test_what_fails_has_the_kind_of_its_error(s):
    long = BODIES[CHAT] | dict(messages=[dict(role="user", content="x" * 3000)])
    assert s.web.post(CHAT, json=long).status_code == 400
    until(lambda: s.value(f"{DURATION}_count", error_type="context_length_exceeded") == 1)
    assert s.value(f"{USAGE}_count") == s.value(f"{FIRST}_count") == 0
    s.web.post(CHAT, json=BODIES[CHAT] | dict(model="gpt"))
    s.web.post(CHAT, json=BODIES[CHAT] | dict(model="x" * 100))
    labels = {
        x.labels.get("gen_ai_request_model")
        for f in s.api.metrics.registry.collect()
        for x in f.samples
    }
    assert labels <= {None, "tiny"}, "no client makes labels of its own"


def test_who_leaves_is_cancelled(s):
    with paused_after(s.llm, 0):
        client = http.client.HTTPConnection(s.url.removeprefix("http://"))
        client.request("POST", CHAT, json.dumps(BODIES[CHAT]))
        until(lambda: s.api.pending)
        client.close()
        until(lambda: s.value(f"{DURATION}_count", error_type="cancelled") == 1)


def test_the_limits_are_those_of_the_conventions(s):
    s.web.post(CHAT, json=BODIES[CHAT])
    until(lambda: f"{DURATION}_bucket" in s.web.get("/metrics").text)  # it counts after it answers
    text = s.web.get("/metrics").text
    assert "vllm:time_to_first_token_seconds_bucket" in text
    for name, limits in zip((DURATION, FIRST, TOKEN, USAGE), LIMITS.values()):
        lines = [x for x in text.splitlines() if x.startswith(f"{name}_bucket")]
        found = {x.partition('le="')[2].partition('"')[0] for x in lines} - {"+Inf"}
        assert {float(x) for x in found} == {float(x) for x in limits}, name
    assert LIMITS["duration"][-1] == 81.92 and LIMITS["usage"][-1] == 67108864


# Spans


@pytest.fixture
def spans(s):
    "The spans of the server `s` that have ended."
    why = "needs opentelemetry-sdk: pip install 'batchlab[otel]'"
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason=why)
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    s.api.telemetry.tracer = telemetry.tracer_of(provider)
    return kept


@pytest.mark.parametrize("path", BODIES)
def test_a_span_has_what_was_asked_and_what_came(s, spans, path):
    parent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    r = s.web.post(path, json=BODIES[path], headers=dict(traceparent=parent))
    until(spans.get_finished_spans)
    [span] = spans.get_finished_spans()
    name, own = NAMES.get(path, "chat"), span.attributes
    assert (span.name, span.kind.name) == (f"{name} tiny", "SERVER")
    assert (
        f"{span.context.trace_id:032x}" == "ab" * 16 and f"{span.parent.span_id:016x}" == "cd" * 8
    )
    assert own["gen_ai.operation.name"] == name and own["gen_ai.provider.name"] == "batchlab"
    used = r.json()["usage"]
    assert own["gen_ai.usage.input_tokens"] == used.get("prompt_tokens", used.get("input_tokens"))
    assert own["gen_ai.response.id"] in r.json().get("id", own["gen_ai.response.id"])
    if path != EMBED:
        assert own["gen_ai.request.max_tokens"] == 5 and own["gen_ai.request.temperature"] == 0
        assert {*own["gen_ai.response.finish_reasons"]} <= {"length", "stop"}
    assert "Hello" not in json.dumps(dict(own), default=list), "no text is in a span"
    assert span.status.status_code.name == "UNSET"


def test_a_span_of_a_failure(s, spans):
    long = BODIES[CHAT] | dict(messages=[dict(role="user", content="x" * 3000)], stream=True)
    assert s.web.post(CHAT, json=long).status_code == 400
    until(spans.get_finished_spans)
    [span] = spans.get_finished_spans()
    assert span.attributes["error.type"] == "context_length_exceeded"
    assert span.status.status_code.name == "ERROR"


def test_spans_are_sent_only_where_the_environment_says_where(monkeypatch):
    for name in telemetry.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert telemetry.export_spans() is False
    monkeypatch.setenv(telemetry.ENDPOINTS[0], "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    with pytest.raises(JobError, match=r"batchlab\[otel\]"):
        telemetry.export_spans()
