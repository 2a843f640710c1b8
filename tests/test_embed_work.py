"Vectors, scores and classes in files, over HTTP, on the command line: what `LLM` gives, each line once, whoever asks and whatever goes wrong."

import asyncio, base64, functools, http.client, itertools, json, threading
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

from batchlab import SamplingParams
from batchlab.cli import main
from batchlab.errors import JobError, UnsupportedModelError
from batchlab.api import LLM
from batchlab.models.load import quiet
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.llm.pooled import PoolingParams
from batchlab.models.tiny import TINY_ARCHS
from batchlab.tasks.verify import verify
from batchlab.serve.batches import ENDED, BatchRunner, BatchStore
from batchlab.jobs.job import Job
from batchlab.jobs.pooling import PoolingRequest
from batchlab.jobs.ray import BatchLLM
from helpers import running, until

SMALL = dict(
    vocab_size=259,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=48,
    pad_token_id=0,
    initializer_range=0.4,
    max_position_embeddings=64,
)
TEXTS = ["a cat", "two dogs and more", "x", "a longer text about nothing at all", "é"]
EMBED = PoolingRequest("embed", [], params=PoolingParams("embed"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    "A tiny encoder as sentence-transformers saves it: mean, and length 1."
    path = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    with quiet():
        AutoModel.from_config(AutoConfig.for_model("bert", **SMALL)).save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling/config.json").write_text('{"pooling_mode": "mean"}')
    steps = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    (path / "modules.json").write_text(
        json.dumps([dict(type=f"sentence_transformers.models.{t}", path=p) for t, p in steps])
    )
    return str(path)


@pytest.fixture(scope="module")
def encoder(folder):
    return LLM(folder, compile=False, max_num_seqs=4)


@functools.cache
def classifier(labels=2):
    torch.manual_seed(1)
    return LLM(
        AutoModelForSequenceClassification.from_config(
            AutoConfig.for_model("bert", num_labels=labels, **SMALL)
        ).eval(),
        tiny_tokenizer(),
        compile=False,
    )


@functools.cache
def writer():
    return LLM(
        tiny_model("llama", num_hidden_layers=1), tiny_tokenizer(), max_num_seqs=4, compile=False
    )


def vectors(llm, texts=TEXTS, **kw):
    return [o.outputs.embedding for o in llm.embed(texts, use_tqdm=False, **kw)]


def close(a, b):
    np.testing.assert_allclose(
        np.array(a, dtype="float64"), np.array(b, dtype="float64"), atol=2e-5
    )


def unpacked(text):
    return np.frombuffer(base64.b64decode(text), "<f4")


def ask(i, url="/v1/embeddings", **body):
    return dict(custom_id=str(i), method="POST", url=url, body=body)


def write(path, lines):
    Path(path).write_text(
        "".join((s if isinstance(s, str) else json.dumps(s)) + "\n" for s in lines),
        encoding="utf-8",
    )


def records(path):
    found = [json.loads(s) for s in Path(path).read_text(encoding="utf-8").splitlines()]
    assert len({r.get("id", r.get("request_id")) for r in found}) == len(found)
    return {r.get("custom_id") or r.get("line"): r for r in found}


@contextmanager
def interrupted(llm, steps):
    "Ctrl-C at that step."
    step, count = llm.step, itertools.count()

    def once():
        if next(count) == steps:
            raise KeyboardInterrupt
        return step()

    llm.step = once
    try:
        yield
    finally:
        del llm.step


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
    write(tmp_path / "in.jsonl", lines)
    job = functools.partial(
        Job, tmp_path / "in.jsonl", tmp_path / "out.jsonl", look_ahead=3, model_name="tiny"
    )
    with interrupted(llm, 2), pytest.raises(KeyboardInterrupt):
        job().run(llm)
    before = (tmp_path / "out.jsonl").read_bytes()
    r = job().run(llm)
    assert (
        (r.total, r.failed) == (11, 4)
        and r.before
        and (tmp_path / "out.jsonl").read_bytes().startswith(before)
    )
    found = records(tmp_path / "out.jsonl")
    assert found.keys() == {d["custom_id"] for d in lines}
    body = lambda i: found[str(i)]["response"]["body"]
    assert (body(0)["object"], [d["index"] for d in body(0)["data"]], body(0)["model"]) == (
        "list",
        [*range(5)],
        "tiny",
    )
    assert body(0)["usage"] == dict(
        prompt_tokens=sum(len(t.encode()) for t in TEXTS),
        total_tokens=sum(len(t.encode()) for t in TEXTS),
    )
    close([d["embedding"] for d in body(0)["data"]], vectors(llm))
    close(
        unpacked(body(2)["data"][0]["embedding"]),
        vectors(llm, ["x"], pooling_params=PoolingParams(dimensions=4))[0],
    )
    close([d["embedding"] for d in body(3)["data"]], vectors(llm, [[5, 6], [7]]))
    close(
        [d["score"] for d in body(4)["data"]],
        [o.outputs.score for o in llm.score("a", ["b", "a"], use_tqdm=False)],
    )
    assert [d["index"] for d in body(5)["results"]] == [1] and body(5)["results"][0][
        "document"
    ] == dict(text="a")
    assert np.shape(body(6)["data"][0]["data"]) == (3, 64)
    assert (
        body(1)["choices"][0]["message"]["content"]
        == llm.chat([talk["messages"]], dict(max_tokens=3, temperature=0), use_tqdm=False)[0]
        .outputs[0]
        .text
    )
    assert {
        i: (found[str(i)]["response"]["status_code"], found[str(i)]["error"]["code"])
        for i in (7, 8, 9, 10)
    } == {
        7: (400, "context_length_exceeded"),
        8: (400, "invalid_request"),
        9: (400, "invalid_request"),
        10: (400, "invalid_request"),
    }
    assert "input[1]: the prompt has 300 tokens" in found["7"]["error"]["message"]


@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet", "out.npy"])
def test_plain_texts_of_a_table(tmp_path, encoder, name):
    import csv, io

    rows = [*TEXTS, "", "z" * 200]
    with (tmp_path / "in.csv").open(
        "w", encoding="utf-8", newline=""
    ) as f:  # a column that would be a setting elsewhere
        csv.writer(f).writerows([["text", "temperature"], *[[t, "hot"] for t in rows]])
    out, job = (
        tmp_path / name,
        lambda: Job(tmp_path / "in.csv", tmp_path / name, embed=EMBED, look_ahead=2, ordered=True),
    )
    with interrupted(encoder, 1), pytest.raises(KeyboardInterrupt):
        job().run(encoder)
    r = job().run(encoder)
    assert (r.total, r.failed) == (7, 2) and r.before
    if name.endswith(".npy"):
        got = np.load(out)
    elif name.endswith(".jsonl"):
        found = [json.loads(s) for s in out.read_text().splitlines()]
        assert (
            [d["row"] for d in found] == [*range(1, 8)]
            and found[0]["temperature"] == "hot"
            and found[0]["usage"] == dict(prompt_tokens=5, total_tokens=5)
        )
        got = [d["embedding"] for d in found]
    elif name.endswith(".csv"):
        found = [*csv.DictReader(io.StringIO(out.read_text()))]
        assert "is empty" in found[5]["error"] and found[0]["text"] == TEXTS[0]
        got = [json.loads(d["embedding"]) if d["embedding"] else None for d in found]
    else:
        import pyarrow as pa, pyarrow.parquet as pq

        table = pq.read_table(out)
        assert (
            table.schema.field("embedding").type == pa.list_(pa.float32())
            and table["temperature"].to_pylist() == ["hot"] * 7
        )
        got = table["embedding"].to_pylist()
    close(got[:5] if isinstance(got, list) else got[:5], vectors(encoder))
    assert np.isnan(got[5:]).all() if name.endswith(".npy") else got[5:] == [None, None]
    assert not (tmp_path / f"{name}.batchlab").exists()


@pytest.mark.parametrize("name", ["out.csv", "out.parquet", "out.jsonl"])
def test_the_column_of_vectors_has_the_name_that_is_asked_for(tmp_path, encoder, name):
    (tmp_path / "in.csv").write_text("text,embedding\nHi,mine\nYou,too\n")
    said: list[str] = []
    job = lambda **more: Job(
        tmp_path / "in.csv", tmp_path / name, embed=EMBED, ordered=True, say=said.append, **more
    )
    assert job(output_column="vector").run(encoder).failed == 0
    if name.endswith(".csv"):
        import csv

        found = [*csv.DictReader((tmp_path / name).open())]
        got = [json.loads(r["vector"]) for r in found]
    elif name.endswith(".jsonl"):
        found = [json.loads(s) for s in (tmp_path / name).read_text().splitlines()]
        got = [r["vector"] for r in found]
    else:
        import pyarrow.parquet as pq

        found = pq.read_table(tmp_path / name).to_pylist()
        got = [r["vector"] for r in found]
    assert [(r["text"], r["embedding"]) for r in found] == [("Hi", "mine"), ("You", "too")]
    close(got, [o.outputs.embedding for o in encoder.embed(["Hi", "You"])])
    assert not any("text as" in s for s in said)  # which a vector has not
    with pytest.raises(JobError, match="another column of that name"):
        job(output_column="text").run(encoder)
    with pytest.raises(JobError, match="an array has none"):
        Job(tmp_path / "in.csv", tmp_path / "o.npy", embed=EMBED, output_column="v").run(encoder)


def test_a_job_of_vectors_says_what_it_can_not(tmp_path, encoder):
    write(tmp_path / "plain.jsonl", [dict(prompt="a")])
    write(
        tmp_path / "chat.jsonl",
        [ask(0, "/v1/chat/completions", messages=[dict(role="user", content="Hi")])],
    )
    with pytest.raises(JobError, match="BertModel writes no text"):
        Job(tmp_path / "chat.jsonl", tmp_path / "a.jsonl").run(encoder)
    with pytest.raises(JobError, match="an array is for the vectors"):
        Job(tmp_path / "plain.jsonl", tmp_path / "a.npy").run(encoder)
    write(tmp_path / "class.jsonl", [ask(0, "/classify", input="a")])
    with pytest.raises(JobError, match="has no task 'classify'"):
        Job(tmp_path / "class.jsonl", tmp_path / "b.jsonl").run(encoder)


def test_a_plan_of_vectors(tmp_path, encoder):
    p = encoder.plan(TEXTS * 3, PoolingParams("embed"))
    assert (p.num_requests, p.prompt_tokens, p.shared_tokens) == (
        15,
        3 * sum(len(t.encode()) for t in TEXTS),
        0,
    ) and p.blocks
    encoder.embed(TEXTS)
    assert encoder.stats().kv_bytes == 0  # nothing is kept from step to step
    write(tmp_path / "in.jsonl", [ask(0, input=TEXTS), ask(1, input="z" * 200)])
    plan = Job(tmp_path / "in.jsonl").plan(encoder)
    assert (plan.requests, plan.failed, plan.max_output_tokens, plan.longest) == (
        1,
        1,
        0,
        max(len(t.encode()) for t in TEXTS),
    )
    assert (
        plan.prompt_tokens == sum(len(t.encode()) for t in TEXTS)
        and plan.prompt_rate
        and "output" not in str(plan).split("speed")[1]
    )
    assert Job(tmp_path / "in.jsonl").dry_run().requests == 2


def save(model, folder, architecture=None, **more):
    "`model` in `folder`, with `more` weights, said to be an `architecture`."
    from safetensors.torch import load_file, save_file

    with quiet():
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    save_file(
        load_file(folder / "model.safetensors") | more,
        folder / "model.safetensors",
        dict(format="pt"),
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | dict(architectures=[architecture or type(model).__name__]))
    )
    return str(folder)


def test_weights_without_a_place_are_refused_by_name(tmp_path):
    torch.manual_seed(0)
    bert, labelled = (
        auto.from_config(AutoConfig.for_model("bert", **SMALL))
        for auto in (AutoModel, AutoModelForSequenceClassification)
    )
    with pytest.raises(
        UnsupportedModelError, match="BertModel has no place for linear.weight, as a ColBERT"
    ) as e:
        LLM(save(bert, tmp_path / "colbert", "HF_ColBERT", **{"linear.weight": torch.ones(8, 32)}))
    assert "\n" not in str(e.value)
    with pytest.raises(
        UnsupportedModelError, match=r"no place for classifier.bias, classifier.weight"
    ):
        LLM(save(labelled, tmp_path / "labels", "BertModel"))
    with pytest.raises(UnsupportedModelError, match=r"a.0, a.1, a.2, …,"):
        LLM(save(labelled, tmp_path / "more", **{f"a.{i}": torch.ones(2) for i in range(5)}))
    pylate = save(bert, tmp_path / "pylate")
    for i, step in enumerate(("sentence_transformers.models.Dense", "pylate.models.Dense.Dense")):
        (tmp_path / "pylate/modules.json").write_text(
            json.dumps(
                [
                    dict(type="sentence_transformers.models.Transformer", path=""),
                    dict(type=step, path="1_Dense"),
                ]
            )
        )
        with pytest.raises(UnsupportedModelError, match=f"step 1 of modules.json is a {step}"):
            LLM(pylate, compile=False)


@pytest.mark.parametrize("arch", TINY_ARCHS)
def test_a_weight_inside_a_language_model_is_refused_and_one_beside_it_left(tmp_path, arch):
    model = tiny_model(arch)
    layers = next(name for name, m in model.named_modules() if isinstance(m, torch.nn.ModuleList))
    inside = next(
        name
        for name, m in model.named_modules()
        if name.startswith(f"{layers}.1.") and len(name.split(".")) > len(layers.split(".")) + 2
    )
    beside = {
        k: torch.ones(8)
        for k in (
            f"{layers}.9.norm.weight",
            "v_head.summary.weight",
            f"{layers}.0.attn.rotary_emb.inv_freq",
            f"{layers}.0.attn.masked_bias",
        )
    }
    llm = LLM(save(model, tmp_path / "beside", **beside), compile=False)
    assert all(
        torch.equal(t, model.get_parameter(name)) for name, t in llm.model.named_parameters()
    )
    for key in (
        f"{inside}.extra",
        f"{layers}.0.extra_norm.weight",
        f"{layers.removeprefix(f'{model.base_model_prefix}.')}.1.extra",
    ):
        with pytest.raises(
            UnsupportedModelError,
            match=f"{type(model).__name__} has no place for .*extra.*, and without it the tokens would be others",
        ):
            LLM(save(model, tmp_path / "inside", **{key: torch.ones(8)}), compile=False)


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
    llm = LLM(
        save(model, tmp_path / "old", **{f"transformer.h.0.{key}": torch.ones(1, 1, 8, 8)}),
        compile=False,
    )
    ids = [5, 9, 33, 7]
    want = model.generate(torch.tensor([ids]), max_new_tokens=5, min_new_tokens=5, do_sample=False)[
        0, 4:
    ].tolist()
    assert (
        list(
            llm.generate([ids], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True))[0]
            .outputs[0]
            .token_ids
        )
        == want
    )


@pytest.mark.parametrize(
    "kind", ["bert", "roberta", "distilbert", "electra", "albert", "mpnet", "deberta", "nomic_bert"]
)
def test_what_guesses_masked_words_is_left_out(tmp_path, kind):
    small = (
        dict(dim=32, hidden_dim=48, n_layers=2, n_heads=2)
        if kind == "distilbert"
        else dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    )
    config = AutoConfig.for_model(
        kind,
        vocab_size=259,
        max_position_embeddings=64,
        **small,
        **(dict(embedding_size=32) if kind in ("electra", "albert") else {}),
    )
    for auto in (AutoModelForMaskedLM, AutoModelForPreTraining):
        if kind == "nomic_bert" and auto is AutoModelForPreTraining:
            continue
        torch.manual_seed(0)
        model = auto.from_config(config).eval()
        llm = LLM(
            save(
                model,
                tmp_path / auto.__name__,
                **{"embeddings.position_ids": torch.arange(64)[None]},
            ),
            compile=False,
        )
        ids = [5, 9, 33, 7]
        with torch.inference_mode():
            want = model.base_model(torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(
            torch.as_tensor(llm.encode([ids], pooling_task="token_embed")[0].outputs.data).float(),
            want,
            atol=1e-4,
            rtol=1e-3,
        )


# the command line


def test_embed_on_the_command_line(tmp_path, encoder, capfd, monkeypatch):
    assert main(["embed", "a cat", "x", "--dimensions", "3", "--no-normalize"], llm=encoder) == 0
    out = [json.loads(s) for s in capfd.readouterr().out.splitlines()]
    close(
        [d["embedding"] for d in out],
        vectors(
            encoder,
            ["a cat", "x"],
            pooling_params=PoolingParams(dimensions=3, use_activation=False),
        ),
    )
    write(tmp_path / "in.txt", TEXTS)
    assert (
        main(
            ["embed", "-i", str(tmp_path / "in.txt"), "-o", str(tmp_path / "out.npy")], llm=encoder
        )
        == 0
    )
    close(np.load(tmp_path / "out.npy"), vectors(encoder))
    for status in (0, 0):
        assert (
            main(
                ["embed", "-i", str(tmp_path / "in.txt"), "-o", str(tmp_path / "out.jsonl")],
                llm=encoder,
            )
            == status
        )
    assert (
        len(records(tmp_path / "out.jsonl")) == 5
        and "5 of 5 requests done (5 of them before)" in capfd.readouterr().err
    )
    assert (
        main(
            [
                "embed",
                "-i",
                str(tmp_path / "in.txt"),
                "-o",
                str(tmp_path / "out.jsonl"),
                "--dimensions",
                "3",
            ],
            llm=encoder,
        )
        == 2
    )  # other vectors than those there
    assert (
        main(["embed", "z" * 200], llm=encoder) == 1
        and main(["embed", "z" * 200, "--truncate"], llm=encoder) == 0
    )
    assert (
        main(["embed", "a", "-i", "b"], llm=encoder) == 2
        and main(["embed", "a", "--pooling", "median"], llm=encoder) == 2
    )


def test_a_plan_of_texts_on_the_command_line(tmp_path, encoder, capfd):
    (tmp_path / "in.txt").write_text("\n".join([*TEXTS, "z" * 200]))
    plan = ["plan", "-i", str(tmp_path / "in.txt")]
    assert main([*plan, "--embed", "--no-calibration"], llm=encoder) == 1
    said = capfd.readouterr().out
    assert (
        f"tokens: {sum(len(t.encode()) for t in TEXTS):,} in prompts" in said
        and "weights" in said
        and "the model takes 64" in said
    ), said
    assert (
        main(plan, llm=encoder) == 2
        and (err := capfd.readouterr().err).count("\n") == 1
        and "--embed" in err
    ), err
    assert (
        main([*plan, "--embed", "--no-calibration"], llm=writer()) == 0
    )  # of a model that writes as well
    (tmp_path / "in.csv").write_text("text,max_tokens\nabc,x\nabcdef,\n")
    assert (
        main(["plan", "-i", str(tmp_path / "in.csv"), "--embed"], llm=encoder) == 0
        and "speed" in capfd.readouterr().out
    )


# the server

fastapi, openai, httpx = map(pytest.importorskip, ("fastapi", "openai", "httpx"))


@contextmanager
def serving(llm, **kw):
    from batchlab.serve.app import Server, create_app, listen, url_of

    up, sock = threading.Event(), listen("127.0.0.1", 0)
    server = Server(create_app(llm, "tiny", **kw), 60, up.set)
    with running(server, sock, up), httpx.Client(base_url=url_of(sock), timeout=100) as web:
        yield SimpleNamespace(url=url_of(sock), web=web, api=server.api, llm=llm)


def test_openais_client_gets_vectors(encoder):
    with (
        serving(encoder) as s,
        openai.OpenAI(base_url=f"{s.url}/v1", api_key="any", max_retries=0) as client,
    ):
        want = vectors(encoder)
        for more in ({}, dict(encoding_format="float")):  # its own default is base64
            r = client.embeddings.create(model="tiny", input=TEXTS, **more)
            close([d.embedding for d in r.data], want)
            assert [d.index for d in r.data] == [
                *range(5)
            ] and r.usage.prompt_tokens == r.usage.total_tokens == sum(
                len(t.encode()) for t in TEXTS
            )
        close(
            client.embeddings.create(model="tiny", input=[5, 6, 7], dimensions=4).data[0].embedding,
            vectors(encoder, [[5, 6, 7]], pooling_params=PoolingParams(dimensions=4))[0],
        )
        many = client.embeddings.create(model="tiny", input=[f"text {i}" for i in range(1500)])
        close(
            [many.data[i].embedding for i in (0, 1499)], vectors(encoder, ["text 0", "text 1499"])
        )
        for wrong, param in (
            (dict(input=["a", "z" * 200]), "input"),
            (dict(input="a", dimensions=33), "dimensions"),
            (dict(input="a", model="gpt-4"), "model"),
        ):
            with pytest.raises(openai.APIStatusError) as e:
                client.embeddings.create(**dict(model="tiny") | wrong)
            assert e.value.status_code in (400, 404) and e.value.param == param, wrong
        assert (
            "BertModel writes no text"
            in s.web.post(
                "/v1/chat/completions", json=dict(messages=[dict(role="user", content="Hi")])
            ).json()["error"]["message"]
        )
        figures = s.web.get("/metrics").text
        assert (
            'vllm:e2e_request_latency_seconds_count{model_name="tiny"} 4.0' in figures
            and 'finished_reason="stop"' in figures
        )
        assert not encoder.has_unfinished and s.api.pending == 0


def test_scores_ranks_and_classes(encoder):
    with serving(classifier(1)) as s:
        post = lambda path, **body: s.web.post(path, json=body)
        docs = ["a", "b", "c"]
        want = [o.outputs.score for o in s.llm.score("q", docs, use_tqdm=False)]
        for path, a, b in (
            ("/score", "text_1", "text_2"),
            ("/v1/score", "queries", "documents"),
            ("/score", "data_1", "data_2"),
            ("/score", "queries", "items"),
        ):
            close([d["score"] for d in post(path, **{a: "q", b: docs}).json()["data"]], want)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            r = post(path, query="q", documents=docs, top_n=2).json()
            assert [d["index"] for d in r["results"]] == sorted(range(3), key=lambda i: -want[i])[
                :2
            ] and r["usage"]["total_tokens"] == 6
            close([d["relevance_score"] for d in r["results"]], sorted(want)[:0:-1])
        assert (
            e := post("/v1/embeddings", input="a")
        ).status_code == 400 and "has no task 'embed'" in e.json()["error"]["message"]
        assert post("/score", text_1=["a", "b"], text_2=docs).json()["error"]["param"] == "text_2"
    with serving(classifier()) as s:
        data = s.web.post("/classify", json=dict(input=TEXTS)).json()["data"]
        want = [o.outputs.probs for o in s.llm.classify(TEXTS, use_tqdm=False)]
        close([d["probs"] for d in data], want)
        assert [(d["label"], d["num_classes"]) for d in data] == [
            (f"LABEL_{np.argmax(p)}", 2) for p in want
        ]
    with serving(encoder) as s:  # the cosine of two vectors
        close(
            [
                d["score"]
                for d in s.web.post("/score", json=dict(text_1=TEXTS[0], text_2=TEXTS)).json()[
                    "data"
                ]
            ],
            [o.outputs.score for o in encoder.score(TEXTS[0], TEXTS, use_tqdm=False)],
        )
        assert len(s.web.post("/pooling", json=dict(input="abc")).json()["data"][0]["data"]) == 32


def test_a_client_that_leaves_ends_all_its_texts(encoder):
    with serving(encoder, max_pending=2) as s:
        cancelled = encoder.stats().requests.get("cancelled", 0)
        encoder.start().pause()
        c = http.client.HTTPConnection(*s.url.removeprefix("http://").split(":"))
        c.request(
            "POST",
            "/v1/embeddings",
            json.dumps(dict(input=TEXTS * 4)),
            {"Content-Type": "application/json"},
        )
        until(lambda: encoder.groups and s.api.pending == 2)  # 20 texts take two places
        r = s.web.post("/v1/embeddings", json=dict(input="a"))
        assert r.status_code == 429 and r.headers["retry-after"]
        assert s.web.post("/v1/embeddings", json=dict(input=["a"] * 33)).status_code == 400
        c.close()
        until(lambda: s.api.pending == 0)
        encoder.resume()
        until(lambda: not encoder.has_unfinished)
        assert encoder.stats().requests["cancelled"] == cancelled + 20
        close(
            [
                d["embedding"]
                for d in s.web.post("/v1/embeddings", json=dict(input=TEXTS)).json()["data"]
            ],
            vectors(encoder),
        )


def test_a_batch_of_vectors(tmp_path, encoder):
    from fastapi.testclient import TestClient
    from batchlab.serve.app import create_app

    lines = [
        ask(0, input=TEXTS),
        ask(1, input="x", encoding_format="base64"),
        ask(2, "/score", text_1="a", text_2="b"),
        ask(3, input=None),
    ]
    store = BatchStore(tmp_path / "data")
    with TestClient(
        create_app(encoder, "tiny", batches=BatchRunner(store, encoder, "tiny")),
        base_url="http://localhost",
    ) as web:
        file = web.post(
            "/v1/files",
            files=dict(file=("in.jsonl", "\n".join(map(json.dumps, lines)))),
            data=dict(purpose="batch"),
        ).json()["id"]
        batch = web.post(
            "/v1/batches",
            json=dict(input_file_id=file, endpoint="/v1/embeddings", completion_window="24h"),
        ).json()["id"]
        until(lambda: web.get(f"/v1/batches/{batch}").json()["status"] in ENDED)
        b = web.get(f"/v1/batches/{batch}").json()
        assert b["status"] == "completed" and b["request_counts"] == dict(
            total=4, completed=2, failed=2
        )
        read = lambda id: {
            d["custom_id"]: d
            for d in map(json.loads, web.get(f"/v1/files/{id}/content").text.splitlines())
        }
        good, bad = read(b["output_file_id"]), read(b["error_file_id"])
        close([d["embedding"] for d in good["0"]["response"]["body"]["data"]], vectors(encoder))
        close(
            unpacked(good["1"]["response"]["body"]["data"][0]["embedding"]),
            vectors(encoder, ["x"])[0],
        )
        assert {i: d["response"]["body"]["error"]["code"] for i, d in bad.items()} == {
            "2": "invalid_url",
            "3": "invalid_request",
        }


# elsewhere


def test_rows_of_ray_data(folder):
    async def answered(batch):
        return [x async for x in worker(batch)]

    worker = BatchLLM(embed=True, model=folder, prompt_column="text", compile=False)
    [got] = asyncio.run(
        answered(
            dict(
                text=np.array([*TEXTS, "z" * 200], dtype=object),
                temperature=np.array(["hot"] * 6, dtype=object),
            )
        )
    )
    close([*got["embedding"][:5]], vectors(worker.queue.llm))
    assert (
        got["embedding"][5] is None
        and "the model takes" in got["error"][5]
        and got["error"][0] is None
        and "generated_text" not in got
    )
    worker.queue.llm.stop()


def test_embed_by_a_worker_on_ray(tmp_path, folder, encoder, capfd, monkeypatch):
    pytest.importorskip("ray", reason="needs Ray: pip install 'batchlab[ray]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    texts = [
        *TEXTS,
        *(f"text {'and more ' * (i % 7)}{i}" for i in range(40)),
        "z" * 200,
    ]  # the last is longer than the model takes
    Path("in.txt").write_text("\n".join(texts))
    args = [
        "embed",
        "-i",
        "in.txt",
        "-o",
        "out.jsonl",
        "--model",
        folder,
        "--ray",
        "1",
        "--ray-cpus",
        "1",
    ]
    assert main(args) == 1 and "46 of 46 requests done, 1 failed" in (
        said := capfd.readouterr().err
    ), said
    records = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert (
        [r["line"] for r in records] == [*range(1, 47)]
        and "the model takes" in records[-1]["error"]["message"]
        and records[-1]["embedding"] is None
    )
    close([r["embedding"] for r in records[:-1]], vectors(encoder, texts[:-1]))
    assert main([*args[:4], "more.jsonl", *args[5:-4]]) == 1 and [
        json.loads(x)["embedding"] is None for x in Path("more.jsonl").read_text().splitlines()
    ] == [False] * 45 + [True]


def test_verify_compares_vectors(encoder):
    pairs = [{"prompt": "a", "text_pair": t} for t in TEXTS]
    outs = [
        *classifier(1).encode(pairs, pooling_task="score", use_tqdm=False),
        *classifier(1).score("q", TEXTS, use_tqdm=False),
    ]
    r = verify(classifier(1), outs, sample=None)
    assert r.ok and r.requests == 10 and not r.skipped
    mixed = encoder.embed(TEXTS, use_tqdm=False)
    assert verify(encoder, mixed, sample=None).ok
    mixed[0].outputs, mixed[1].outputs = (
        mixed[1].outputs,
        mixed[0].outputs,
    )  # two answers changed places
    assert {d.request_id for d in verify(encoder, mixed, sample=None).bugs} == {
        mixed[0].request_id,
        mixed[1].request_id,
    }
    assert (
        verify(encoder, encoder.score("a", "b", use_tqdm=False)).skipped[0][1]
        == "it is the cosine of two vectors: give these"
    )
