"Vectors, scores and classes in files, over HTTP, on the command line: what `LLM` gives, each line once, whoever asks and whatever goes wrong."

import asyncio, base64, functools, http.client, json, random, re
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np, pytest, torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
)

from batchlab.cli import main
from batchlab.errors import JobError, ModelError, UnsupportedModelError
from batchlab.api import LLM
from batchlab.models.load import quiet
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.llm.pooling_params import POOLING_TASKS, PoolingParams
from batchlab.models.tiny import TINY_ARCHS
from batchlab.jobs.job import Job
from batchlab.jobs.journal import as_journal, from_journal, journal_of
from batchlab.jobs.pooling import PoolingRequest, TextsOutput, parse_pooling, pooling_body
from batchlab.jobs.settings import BadRequest
from batchlab.jobs.schema import POOLING_URLS
from batchlab.jobs.tables import table_rows
from batchlab.tasks.admit import ASKED_BY
from batchlab.api.ray import BatchLLM
from helpers import (
    ctrl_c,
    generated,
    greedy,
    ids,
    kept_model,
    read_lines,
    read_table,
    texts,
    until,
    write_lines,
)
import test_batches
import test_server
from test_encoders import encoder as encoder_of

from test_batches import httpx, openai

SMALL = dict(hidden_size=32, max_position_embeddings=64)
TEXTS = ["a cat", "two dogs and more", "x", "a longer text about nothing at all", "é"]
EMBED = PoolingRequest("embed", [], params=PoolingParams("embed"))


def kept_encoder(path):
    "A tiny encoder in folder `path` as sentence-transformers saves it: mean, and length 1."
    with quiet():
        kept_model(path, encoder_of("bert", **SMALL))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling/config.json").write_text('{"pooling_mode": "mean"}')
    steps = dict(Transformer="", Pooling="1_Pooling", Normalize="2_Normalize")
    kind = "sentence_transformers.models"
    modules = [dict(type=f"{kind}.{name}", path=at) for name, at in steps.items()]
    (path / "modules.json").write_text(json.dumps(modules))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return kept_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def encoder(folder):
    return LLM(folder, compile=False, max_num_seqs=4)


@functools.cache
def classifier(labels=2):
    model = encoder_of("bert", AutoModelForSequenceClassification, num_labels=labels, **SMALL)
    return LLM(model, tiny_tokenizer(), compile=False)


@functools.cache
def writer():
    model = tiny_model("llama", num_hidden_layers=1)
    return LLM(model, tiny_tokenizer(), max_num_seqs=4, compile=False)


def vectors(llm, prompts=TEXTS, **params):
    outs = llm.embed(prompts, pooling_params=PoolingParams(**params))
    return [o.outputs.embedding for o in outs]


def scores(llm, *texts):
    return [o.outputs.score for o in llm.score(*texts)]


def close(a, b):
    np.testing.assert_allclose(np.array(a, "float64"), np.array(b, "float64"), atol=2e-5)


def length(texts):
    return sum(len(t.encode()) for t in texts)


def unpacked(text):
    return np.frombuffer(base64.b64decode(text), "<f4")


def ask(i, url="/v1/embeddings", **body):
    return dict(custom_id=str(i), method="POST", url=url, body=body)


def records(path):
    found = read_lines(path)
    assert len({r.get("id", r.get("request_id")) for r in found}) == len(found)
    return {r.get("custom_id") or r.get("line"): r for r in found}


def test_a_part_of_a_model_says_of_which(folder):
    with pytest.raises(UnsupportedModelError, match=f"model type None, maybe its parent {folder};"):
        LLM(f"{folder}/1_Pooling")


# files


def test_lines_of_all_kinds_among_chats_each_once(tmp_path):
    llm = writer()
    talk = dict(messages=[dict(role="user", content="Hi")], max_tokens=3, temperature=0)
    lines = [
        ask(0, input=TEXTS),
        ask(1, "/v1/chat/completions", **talk),
        ask(2, input="x", encoding_format="base64", dimensions=4, user="me"),
        ask(3, input=[[5, 6], [7]]),
        ask(4, "/v1/score", text_1="a", text_2=["b", "a"]),
        ask(5, "/rerank", query="a", documents=["b", "a"], top_n=1),
        ask(6, "/pooling", input="abc", task="token_embed"),
        ask(7, input=["ok", "y" * 300]),
        ask(8, input=[]),
        ask(9, "/classify", input="a"),
        ask(10, input="x", dimensions=65),
    ]
    write_lines(tmp_path / "in.jsonl", lines)
    out = tmp_path / "out.jsonl"
    job = lambda: Job(tmp_path / "in.jsonl", out, look_ahead=3, model_name="tiny")
    with ctrl_c(llm, 2):
        job().run(llm)
    before = out.read_bytes()
    r = job().run(llm)
    assert (r.total, r.failed) == (11, 4) and r.before and out.read_bytes().startswith(before)
    found = records(out)
    assert found.keys() == {d["custom_id"] for d in lines}
    bodies = {int(i): d["response"]["body"] for i, d in found.items()}
    data = lambda i, key="embedding": [d[key] for d in bodies[i]["data"]]
    assert (bodies[0]["model"], data(0, "index")) == ("tiny", [*range(5)])
    assert bodies[0]["usage"] == dict(prompt_tokens=length(TEXTS), total_tokens=length(TEXTS))
    close(data(0), vectors(llm))
    close(unpacked(data(2)[0]), vectors(llm, ["x"], dimensions=4)[0])
    close(data(3), vectors(llm, [[5, 6], [7]]))
    close(data(4, "score"), scores(llm, "a", ["b", "a"]))
    [best] = bodies[5]["results"]
    assert (best["index"], best["document"]) == (1, dict(text="a"))
    assert [row["index"] for row in table_rows(found["5"])] == [1]
    assert np.shape(data(6, "data")[0]) == (3, 64)
    said = llm.chat([talk["messages"]], dict(max_tokens=3, temperature=0))
    assert [bodies[1]["choices"][0]["message"]["content"]] == texts(said)
    bad = [found[str(i)] for i in (7, 8, 9, 10)]
    assert {d["response"]["status_code"] for d in bad} == {400}
    codes = ["context_length_exceeded"] + ["invalid_request"] * 3
    assert [d["error"]["code"] for d in bad] == codes
    assert "input[1]: the prompt has 300 tokens" in bad[0]["error"]["message"]


@pytest.mark.parametrize(
    "kind, body, place",
    [
        ("rerank", dict(query="a", documents=["b", "y" * 300]), "documents[1]"),
        ("rerank", dict(query="y" * 300, documents=["b", "c"]), "query"),
        ("score", dict(queries=["a", "b"], items=["y" * 300, "c"]), "items[0]"),
        ("score", dict(text_1=["a", "y" * 300], text_2=["b", "c"]), "text_1[1]"),
    ],
)
def test_a_text_that_is_too_long_is_named(kind, body, place):
    asked = parse_pooling(body, kind)
    group = asked.as_group(writer(), "a")
    assert group.error.startswith(f"{place}: the prompt has 300 tokens")
    assert asked.key == place.partition("[")[0]


def table_of(path):
    "The rows of a file of answers, a vector as a list, and nothing as None."
    vector = lambda v: json.loads(v) if isinstance(v, str) and v.startswith("[") else v or None
    return [{k: vector(v) for k, v in row.items()} for row in read_table(path)]


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet"])
def test_plain_texts_of_a_table(tmp_path, encoder, name):
    "Beside columns that would be a setting or a vector elsewhere; the vectors' column has the name that is asked for."
    rows = ["text,temperature,embedding", *(f"{t},hot,mine" for t in [*TEXTS, "", "z" * 200])]
    write_lines(tmp_path / "in.csv", rows)
    out, said = tmp_path / name, []
    how = dict(embed=EMBED, look_ahead=2, ordered=True, say=said.append)
    job = lambda column="vector": Job(tmp_path / "in.csv", out, output_column=column, **how)
    with ctrl_c(encoder, 1):
        job().run(encoder)
    r = job().run(encoder)
    assert (r.total, r.failed) == (7, 2) and r.before
    assert (tmp_path / f"{name}.batchlab").exists()  # to try the two again
    found = table_of(out)
    got = [r["vector"] for r in found]
    assert {(r["temperature"], r["embedding"]) for r in found} == {("hot", "mine")}
    assert [r["text"] for r in found[:5]] == TEXTS and got[5:] == [None, None]
    close(got[:5], vectors(encoder))
    assert not any("text as" in s for s in said)  # which a vector has not
    with pytest.raises(JobError, match="another column of that name"):
        job("text").run(encoder)
    how["embed"] = PoolingRequest("embed", [], params=PoolingParams("embed", dimensions=3))
    with pytest.raises(JobError, match="begun with embed"):
        job().run(encoder)
    if name.endswith(".jsonl"):
        assert [d["row"] for d in found] == [*range(1, 8)]
        assert found[0]["usage"] == dict(prompt_tokens=5, total_tokens=5)
    if name.endswith(".csv"):
        assert "is empty" in found[5]["error"]
    if name.endswith(".parquet"):
        import pyarrow as pa, pyarrow.parquet as pq

        assert pq.read_schema(out).field("vector").type == pa.list_(pa.float32())


@pytest.mark.parametrize("form", ["plain", "batch"])
@pytest.mark.parametrize("name", ["out.csv", "out.parquet", "out.jsonl.gz"])
def test_the_journal_of_vectors_goes_on_wherever_it_is_cut(tmp_path, encoder, form, name):
    write_lines(
        tmp_path / "in.jsonl",
        (ask(i, input=t) if form == "batch" else dict(text=t) for i, t in enumerate(TEXTS * 3)),
    )
    out, journal = tmp_path / name, Path(journal_of(tmp_path / name))
    embed = EMBED if form == "plain" else None
    job = lambda: Job(tmp_path / "in.jsonl", out, embed=embed, keep_journal=True).run(encoder)

    def found():
        "The vectors by the line that they are of."
        rows = table_of(out)
        bodies = [r.get("response", {}).get("body", {}).get("data", [r])[0] for r in rows]
        line = lambda r: int(str(r.get("request_id") or r["id"]).split("_")[2])
        return [v for _, v in sorted((line(r), d["embedding"]) for r, d in zip(rows, bodies))]

    job()
    whole, want = journal.read_bytes(), vectors(encoder, TEXTS * 3)
    assert whole.count(b"\0") >= 2 * len(want)
    close(found(), want)
    for cut in random.Random(0).sample(range(len(whole)), 20):
        out.unlink()
        journal.write_bytes(whole[:cut])
        assert job().before - whole[:cut].count(b"\n") in (0, 1)  # only its end was torn off
        close(found(), want)


def test_a_record_of_a_journal_holds_a_vector_as_its_bytes():
    numbers = np.frombuffer(random.Random(1).randbytes(4 * 384 * 20), "<f4")
    vector = [x for x in numbers.tolist() if np.isfinite(x)][:384]
    odd = dict(embedding=[0.1] * 99, data=[[2.5] * 40, [3.0]], probs=[1, *[2.0] * 40], text="\0a\1")
    for vectors in (dict(embedding=vector), odd, dict(data=[dict(embedding=vector)] * 2)):
        d = dict(request_id="batch_req_1_00000000", error=None, **vectors)
        line = as_journal(d)
        assert from_journal(line[:-1]) == d and line.find(b"\n") == len(line) - 1
    assert len(as_journal(dict(vector=vector))) < 4 * 384 * 1.02 + 40


def test_a_plan_of_vectors(tmp_path, encoder):
    p = encoder.plan(TEXTS * 3, PoolingParams("embed"))
    counts = p.num_requests, p.prompt_tokens, p.shared_tokens
    assert counts == (15, 3 * length(TEXTS), 0) and p.blocks
    encoder.embed(TEXTS)
    assert encoder.stats().kv_bytes == 0  # nothing is kept from step to step
    write_lines(tmp_path / "in.jsonl", [ask(0, input=TEXTS), ask(1, input="z" * 200)])
    plan = Job(tmp_path / "in.jsonl").plan(encoder)
    assert (plan.requests, plan.failed, plan.max_output_tokens) == (1, 1, 0)
    assert plan.longest == max(len(t.encode()) for t in TEXTS)
    assert plan.prompt_tokens == length(TEXTS) and plan.prompt_rates[0]
    assert Job(tmp_path / "in.jsonl").dry_run().requests == 2


def save(model, folder, architecture=None, **more):
    "`model` in `folder`, with `more` weights, said to be an `architecture`."
    from safetensors.torch import load_file, save_file

    with quiet():
        kept_model(folder, model)
    file, config = folder / "model.safetensors", folder / "config.json"
    save_file(load_file(file) | more, file, dict(format="pt"))
    said = dict(architectures=[architecture or type(model).__name__])
    config.write_text(json.dumps(json.loads(config.read_text()) | said))
    return str(folder)


def test_weights_without_a_place_are_refused_by_name(tmp_path):
    autos = AutoModel, AutoModelForSequenceClassification
    bert, labelled = (encoder_of("bert", auto, **SMALL) for auto in autos)
    beside = {"linear.weight": torch.ones(8, 32)}
    for model, architecture, more, why in (
        (bert, "HF_ColBERT", beside, "linear.weight, as a ColBERT"),
        (labelled, "BertModel", {}, "classifier.bias, classifier.weight"),
    ):
        with pytest.raises(UnsupportedModelError, match=f"has no place for .*{why}"):
            LLM(save(model, tmp_path / architecture, architecture, **more))
    pylate, kind = save(bert, tmp_path / "pylate"), "sentence_transformers.models"
    for step in (f"{kind}.Dense", "pylate.models.Dense.Dense"):
        steps = [dict(type=f"{kind}.Transformer", path=""), dict(type=step, path="1_Dense")]
        (tmp_path / "pylate/modules.json").write_text(json.dumps(steps))
        with pytest.raises(UnsupportedModelError, match=f"step 1 of modules.json is a {step}"):
            LLM(pylate, compile=False)


@pytest.mark.parametrize("arch", TINY_ARCHS)
def test_a_weight_inside_a_language_model_is_refused_and_one_beside_it_left(tmp_path, arch):
    model = tiny_model(arch)
    layers = next(name for name, m in model.named_modules() if isinstance(m, torch.nn.ModuleList))
    names = [name for name, _ in model.named_modules() if name.startswith(f"{layers}.1.")]
    inside = next(name for name in names if name.count(".") > layers.count(".") + 2)
    masks = f"{layers}.0.attn.rotary_emb.inv_freq", f"{layers}.0.attn.masked_bias"
    beside = f"{layers}.9.norm.weight", "v_head.summary.weight", *masks
    beside = {key: torch.ones(8) for key in beside}
    llm = LLM(save(model, tmp_path / "beside", **beside), compile=False)
    own = {
        name: torch.equal(t, model.get_parameter(name)) for name, t in llm.model.named_parameters()
    }
    assert all(own.values())
    short = layers.removeprefix(f"{model.base_model_prefix}.")
    for key in (f"{inside}.extra", f"{layers}.0.extra_norm.weight", f"{short}.1.extra"):
        folder = save(model, tmp_path / "inside", **{key: torch.ones(8)})
        with pytest.raises(UnsupportedModelError, match="has no place for .*extra"):
            LLM(folder, compile=False)


@pytest.mark.parametrize(
    "arch, key",
    [
        ("gptj", "attn.bias"),
        ("gptj", "attn.masked_bias"),
        ("gpt_neo", "attn.attention.bias"),
        ("codegen", "attn.causal_mask"),
        ("gpt2", "attn.bias"),
    ],
)
def test_masks_that_older_checkpoints_hold_are_no_weights(tmp_path, arch, key):
    model = tiny_model(arch)
    mask = {f"transformer.h.0.{key}": torch.ones(1, 1, 8, 8)}
    llm, prompt = LLM(save(model, tmp_path / "old", **mask), compile=False), [5, 9, 33, 7]
    assert ids(llm.generate([prompt], greedy(5))) == [generated(model, prompt, 5)]


@pytest.mark.parametrize(
    "kind", ["bert", "roberta", "distilbert", "electra", "albert", "mpnet", "deberta", "nomic_bert"]
)
def test_what_guesses_masked_words_is_left_out(tmp_path, kind):
    small = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    if kind == "distilbert":
        small = dict(dim=32, hidden_dim=48, n_layers=2, n_heads=2)
    if kind in ("electra", "albert"):
        small |= dict(embedding_size=32)
    config = AutoConfig.for_model(kind, vocab_size=259, max_position_embeddings=64, **small)
    position_ids = {"embeddings.position_ids": torch.arange(64)[None]}
    for auto in (AutoModelForMaskedLM, AutoModelForPreTraining):
        if kind == "nomic_bert" and auto is AutoModelForPreTraining:
            continue
        torch.manual_seed(0)
        model, prompt = auto.from_config(config).eval(), [5, 9, 33, 7]
        llm = LLM(save(model, tmp_path / auto.__name__, **position_ids), compile=False)
        with torch.inference_mode():
            want = model.base_model(torch.tensor([prompt])).last_hidden_state[0]
        got = torch.as_tensor(llm.encode([prompt], pooling_task="token_embed")[0].outputs.data)
        torch.testing.assert_close(got.float(), want, atol=1e-4, rtol=1e-3)


# the command line


def test_embed_on_the_command_line(tmp_path, encoder, capfd, monkeypatch):
    embed = lambda *args: main(["embed", *map(str, args)], llm=encoder)
    assert embed("a cat", "x", "--dimensions", 3, "--no-normalize") == 0
    out = [json.loads(s) for s in capfd.readouterr().out.splitlines()]
    close(
        [d["embedding"] for d in out],
        vectors(encoder, ["a cat", "x"], dimensions=3, use_activation=False),
    )
    write_lines(tmp_path / "in.txt", TEXTS)
    file = "-i", tmp_path / "in.txt", "-o"
    assert embed(*file, tmp_path / "out.csv") == 0
    close([r["embedding"] for r in table_of(tmp_path / "out.csv")], vectors(encoder))
    for _ in range(2):
        assert embed(*file, tmp_path / "out.jsonl") == 0
    assert len(records(tmp_path / "out.jsonl")) == 5
    assert "5 of 5 requests done (5 of them before)" in capfd.readouterr().err
    assert embed(*file, tmp_path / "out.jsonl", "--dimensions", 3) == 0
    assert "is finished: nothing is run" in capfd.readouterr().err
    assert embed("z" * 200) == 1
    for flags in (["--truncate"], ["--truncate", "-1"], ["--truncate", "auto"], ["--truncate=5"]):
        capfd.readouterr()
        assert embed(*flags, "z" * 200, "--", "--truncate") == embed("z" * 200, *flags) == 0
        *both, alone = [json.loads(s)["usage"] for s in capfd.readouterr().out.splitlines()]
        assert both[0] == alone and both[1]["prompt_tokens"] <= len("--truncate")
        assert alone["prompt_tokens"] == (5 if "=" in flags[0] else 64)
    assert embed("a", "-i", "b") == 2 and embed("a", "--pooling", "median") == 2


def test_a_plan_of_texts_on_the_command_line(tmp_path, encoder, capfd):
    write_lines(tmp_path / "in.txt", [*TEXTS, "z" * 200])
    write_lines(tmp_path / "in.csv", ["text,max_tokens", "abc,x", "abcdef,"])
    plan = lambda name, *flags, llm=encoder: main(["plan", "-i", str(tmp_path / name), *flags], llm)
    assert plan("in.txt", "--embed", "--no-calibration") == 1
    assert f"{length(TEXTS):,} in prompts" in capfd.readouterr().out
    assert plan("in.txt", "--embed", "--no-calibration", "--truncate", "-1") == 0
    assert plan("in.txt") == 2 and "--embed" in capfd.readouterr().err
    assert plan("in.txt", "--embed", "--no-calibration", llm=writer()) == 0  # it writes as well
    assert plan("in.csv", "--embed") == 0 and "speed" in capfd.readouterr().out


# the server


@contextmanager
def serving(llm, **kw):
    with (
        test_server.serving(llm=llm, **kw) as s,
        httpx.Client(base_url=s.url, timeout=100) as s.web,
    ):
        yield s


def test_openais_client_gets_vectors(encoder):
    with serving(encoder) as s, test_server.client_of(s) as client:
        create = lambda **body: client.embeddings.create(**dict(model="tiny") | body)
        for more in ({}, dict(encoding_format="float")):  # its own default is base64
            r = create(input=TEXTS, **more)
            close([d.embedding for d in r.data], vectors(encoder))
            assert [d.index for d in r.data] == [*range(5)]
            assert r.usage.prompt_tokens == r.usage.total_tokens == length(TEXTS)
        [short] = create(input=[5, 6, 7], dimensions=4).data
        close([short.embedding], vectors(encoder, [[5, 6, 7]], dimensions=4))
        many = create(input=[f"text {i}" for i in range(1500)]).data
        ends = vectors(encoder, ["text 0", "text 1499"])
        close([many[0].embedding, many[1499].embedding], ends)
        for wrong, param in (
            (dict(input=["a", "z" * 200]), "input"),
            (dict(input="a", dimensions=33), "dimensions"),
            (dict(input="a", model="gpt-4"), "model"),
        ):
            with pytest.raises(openai.APIStatusError) as e:
                create(**wrong)
            assert e.value.status_code in (400, 404) and e.value.param == param, wrong
        talk = dict(messages=[dict(role="user", content="Hi")])
        refused = s.web.post("/v1/chat/completions", json=talk).json()
        assert "BertModel writes no text" in refused["error"]["message"]
        figures = s.web.get("/metrics").text
        assert 'vllm:e2e_request_latency_seconds_count{model_name="tiny"} 4.0' in figures
        assert 'finished_reason="stop"' in figures
        assert not encoder.has_unfinished and s.api.limits.pending == 0


def test_a_model_that_is_asked_for_what_it_has_not_says_how_to_ask_it(tmp_path, encoder):
    "In Python, in a job and at a server; and each call and url that any model is told of is there."
    llm, words = classifier(), "BertForSequenceClassification writes no text, it has classify"
    how = "call llm.classify or llm.encode, or give lines of the Batch API with the url /classify"
    with pytest.raises(ModelError, match=f"{words}.*{how}"):
        llm.generate(["a"])
    name = tmp_path / "in.jsonl"
    for own, line, why in (
        (llm, dict(prompt="a"), f"{words}.*{how}"),
        (encoder, ask(0, "/classify", input="a"), "has no task 'classify'"),
    ):
        write_lines(name, [line])
        with pytest.raises(JobError, match=why) as e:
            Job(name, tmp_path / "out.jsonl").run(own)
        assert e.value.status == 2  # nothing had begun
    with serving(llm) as s:
        said = s.web.post("/v1/completions", json=dict(prompt="a")).json()["error"]["message"]
        assert re.search(f"{words}.*{how}", said)
    assert {*ASKED_BY} == {*POOLING_TASKS}
    for call, url in ASKED_BY.values():
        assert callable(getattr(llm, call.removeprefix("llm."))) and url in POOLING_URLS


def test_scores_ranks_and_classes(encoder):
    with serving(classifier(1)) as s:
        post = lambda path, **body: s.web.post(path, json=body)
        docs = ["a", "b", "c"]
        want = scores(s.llm, "q", docs)
        for path, a, b in (
            ("/score", "text_1", "text_2"),
            ("/v1/score", "queries", "documents"),
            ("/score", "data_1", "data_2"),
            ("/score", "queries", "items"),
        ):
            close([d["score"] for d in post(path, **{a: "q", b: docs}).json()["data"]], want)
        order = sorted(range(3), key=lambda i: -want[i])
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            r = post(path, query="q", documents=docs, top_n=2).json()
            assert [d["index"] for d in r["results"]] == order[:2] and r["usage"][
                "total_tokens"
            ] == 6
            close([d["relevance_score"] for d in r["results"]], [want[i] for i in order[:2]])
        e = post("/v1/embeddings", input="a")
        assert e.status_code == 400 and "has no task 'embed'" in e.json()["error"]["message"]
        assert post("/score", text_1=["a", "b"], text_2=docs).json()["error"]["param"] == "text_2"
    with serving(classifier()) as s:
        data = s.web.post("/classify", json=dict(input=TEXTS)).json()["data"]
        want = [o.outputs.probs for o in s.llm.classify(TEXTS)]
        close([d["probs"] for d in data], want)
        labels = [(f"LABEL_{np.argmax(p)}", 2) for p in want]
        assert [(d["label"], d["num_classes"]) for d in data] == labels
    with serving(encoder) as s:  # the cosine of two vectors
        data = s.web.post("/score", json=dict(text_1=TEXTS[0], text_2=TEXTS)).json()["data"]
        close([d["score"] for d in data], scores(encoder, TEXTS[0], TEXTS))
        assert len(s.web.post("/pooling", json=dict(input="abc")).json()["data"][0]["data"]) == 32


def test_numbers_that_json_can_not_hold_are_an_error():
    part = SimpleNamespace(outputs=SimpleNamespace(data=torch.tensor([float("nan")])))
    with pytest.raises(BadRequest, match="not finite"):
        pooling_body(EMBED, TextsOutput("", [part]), "", "")


def test_a_client_that_leaves_ends_all_its_texts(encoder):
    with serving(encoder, max_pending=2) as s:
        cancelled = encoder.stats().requests.get("cancelled", 0)
        encoder.start().pause()
        c = http.client.HTTPConnection(*s.url.removeprefix("http://").split(":"))
        body, kind = json.dumps(dict(input=TEXTS * 4)), {"Content-Type": "application/json"}
        c.request("POST", "/v1/embeddings", body, kind)
        until(lambda: encoder.loop.groups and s.api.limits.pending == 2)  # 20 texts take two places
        r = s.web.post("/v1/embeddings", json=dict(input="a"))
        assert r.status_code == 429 and r.headers["retry-after"]
        assert s.web.post("/v1/embeddings", json=dict(input=["a"] * 33)).status_code == 400
        c.close()
        until(lambda: s.api.limits.pending == 0)
        encoder.resume()
        until(lambda: not encoder.has_unfinished)
        assert encoder.stats().requests["cancelled"] == cancelled + 20
        data = s.web.post("/v1/embeddings", json=dict(input=TEXTS)).json()["data"]
        close([d["embedding"] for d in data], vectors(encoder))


def test_a_batch_of_vectors(tmp_path, encoder):
    lines = [ask(0, input=TEXTS), ask(1, "/score", text_1="a", text_2="b")]
    with test_batches.serving(tmp_path / "data", encoder) as s:
        done = s.run(lines, endpoint="/v1/embeddings")
        assert done["status"] == "completed" and s.errors(done) == {"1": "invalid_url"}
        [good] = s.records(done["output_file_id"])
    close([d["embedding"] for d in good["response"]["body"]["data"]], vectors(encoder))


# elsewhere


def test_rows_of_ray_data(folder):
    async def answered(batch):
        return [x async for x in worker(batch)]

    worker = BatchLLM(embed=True, model=folder, prompt_column="text", compile=False, timeout=99)
    assert worker.queue.job.timeout == 99
    rows = dict(text=[*TEXTS, "z" * 200], temperature=["hot"] * 6)
    rows = {name: np.array(column, dtype=object) for name, column in rows.items()}
    [got] = asyncio.run(answered(rows))
    close([*got["embedding"][:5]], vectors(worker.queue.llm))
    assert got["embedding"][5] is None and "the model takes" in got["error"][5]
    assert got["error"][0] is None and "generated_text" not in got
    worker.queue.llm.stop()
