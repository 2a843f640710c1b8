"Answers held to a form: every schema that is taken is kept, by any writer, and no other row notices."

import copy, functools, json, re, sys

import jsonschema, pytest, torch
from hypothesis import HealthCheck, given, settings, strategies as st

pytest.importorskip(
    "llguidance", reason="structured outputs need llguidance, the extra `structured`"
)
from batchlab.api import LLM
from batchlab.jobs.job import Job
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.errors import ModelError
from batchlab.errors import ParamError
from batchlab.core.params import SamplingParams, StructuredOutputsParams
from batchlab.core.sampling import SamplingRow, sample
from batchlab.tasks.structured import Grammars, WHITESPACE, check_schema

PERSON = dict(
    type="object",
    required=["name", "age", "tags"],
    properties=dict(
        name=dict(type="string", minLength=1, maxLength=6),
        age=dict(type="integer", minimum=0, maximum=130),
        tags=dict(type="array", items=dict(enum=["a", 'b"c', None, 7]), maxItems=2),
    ),
)


pytestmark = pytest.mark.usefixtures("one_thread")


@functools.cache
def model():
    return tiny_model("llama", num_hidden_layers=1)


def engine(**kw):
    return LLM(
        copy.deepcopy(model()), tiny_tokenizer(), **{"max_num_seqs": 8, "compile": False} | kw
    )


@functools.cache
def llm():
    return engine()


@functools.cache
def grammars():
    return Grammars(tiny_tokenizer(), llm().vocab_size, llm().eos_ids)


def wish(seed=0, n=1, max_tokens=400, temperature=1.0, **form):
    form = dict(disable_any_whitespace=True) | form if {"json", "json_object"} & {*form} else form
    return SamplingParams(
        seed=seed, n=n, max_tokens=max_tokens, temperature=temperature, structured_outputs=form
    )


def valid(text, schema):
    jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema).validate(
        json.loads(text)
    )
    return True


def walk(schema, draw, most=400, **form):
    "Text written by choosing among the allowed ids with `draw`, which favours short ways out; None if there was no end."
    g, words = grammars().of(wish(json=schema, **form)), words_of()
    ids = []
    for _ in range(most):
        x = g.mask_(torch.zeros(1, len(words)), ids)
        some = x[0].isfinite().nonzero()[:, 0].tolist()
        assert some, f"nothing may follow {bytes(b''.join(words[i] for i in ids))!r}"
        more = [i for i in some if i not in llm().eos_ids]
        if not more or len(more) < len(some) and draw(3) != 1:
            return b"".join(words[i] for i in ids).decode()
        some = more
        out = [i for i in some if words[i] in (b'"', b"}", b"]", b",", b":")]
        ids.append(out[draw(len(out))] if out and draw(2) else some[draw(len(some))])


@functools.cache
def words_of():
    return [grammars().vocabulary.decode_bytes([i]) for i in range(llm().vocab_size)]


names = st.text('abc"\\é 😀', min_size=1, max_size=4)
numbers = st.integers(-30, 30)
leaves = st.one_of(
    st.just(dict(type="null")),
    st.just(dict(type="boolean")),
    st.tuples(numbers, st.integers(0, 40)).map(
        lambda t: dict(type="integer", minimum=t[0], maximum=t[0] + t[1])
    ),
    st.tuples(numbers, st.integers(1, 40)).map(
        lambda t: dict(type="number", minimum=t[0], exclusiveMaximum=t[0] + t[1])
    ),
    st.sampled_from([3, 5]).map(lambda n: dict(type="integer", multipleOf=n)),
    st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
        lambda t: dict(type="string", minLength=t[0], maxLength=sum(t))
    ),
    st.sampled_from(
        [
            "^[a-c]{1,3}$",
            "^(x|yz)+$",
            r"^\d{2}-\w$",
            "^[^a]{1,2}$",
            "^.{1,3}$",
            "^[ -~]{1,2}$",
            r"^\s?\S$",
        ]
    ).map(lambda p: dict(type="string", pattern=p)),
    st.sampled_from(["date", "uuid", "ipv6", "unheard-of"]).map(
        lambda f: dict(type="string", format=f)
    ),
    st.lists(st.one_of(names, numbers, st.none(), st.booleans()), min_size=1, max_size=4).map(
        lambda v: dict(enum=v)
    ),
    st.one_of(names, numbers, st.none()).map(lambda v: dict(const=v)),
    st.just(dict(type=["string", "null"], maxLength=3)),
)


def grown(inner):
    objects = st.tuples(
        st.dictionaries(names, inner, min_size=1, max_size=3), st.integers(0, 3)
    ).map(
        lambda t: dict(
            type="object", properties=t[0], required=[*t[0]][: t[1]], additionalProperties=False
        )
    )
    return st.one_of(
        objects,
        st.lists(inner, min_size=1, max_size=3).map(lambda v: dict(anyOf=v)),
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda t: dict(type="array", items=t[0], minItems=t[1], maxItems=t[1] + t[2])
        ),
        st.lists(inner, min_size=1, max_size=2).map(
            lambda v: dict(type="array", prefixItems=v, items=False)
        ),
        inner.map(lambda s: dict(type="object", additionalProperties=s, maxProperties=2)),
    )


schemas = st.recursive(leaves, grown, max_leaves=5)


@settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(schema=schemas, seed=st.integers(0, 2**32), tight=st.booleans())
def test_a_schema_that_is_taken_is_kept(schema, seed, tight):
    "Whatever writer: one that chooses at random among what the mask allows."
    import random

    rng = random.Random(seed)
    check_schema(schema)
    for _ in range(3):
        text = walk(schema, lambda n: rng.randrange(n), disable_any_whitespace=tight)
        assert text is None or valid(text, schema)


@pytest.mark.parametrize(
    "bad",
    [
        dict(type="array", items={}, uniqueItems=True),
        dict(type="array", items={}, contains={}),
        {"not": {}},
        dict(oneOf=[dict(minimum=3), dict(type="integer")]),
        {"if": {}, "then": {}},
        {"$ref": "http://x/y"},
        {"$ref": "#x"},
        dict(type="string", pattern='a"b'),
        dict(type="string", pattern=r"a\\b"),
        dict(type="string", pattern="a\nb"),
        dict(type="string", pattern=r"\x22"),
        dict(type="object", patternProperties={'a"': {}}),
        dict(type="integer", enum=[True]),
        dict(type="object", properties=dict(a={}), required=["b"], additionalProperties=False),
        dict(type="object", properties=dict(a={}, b={}, c={}), minProperties=2),
        dict(type="object", propertyNames=dict(format="date")),
        dict(type="object", properties=dict(a={}), dependentRequired=dict(a=["b"])),
        dict(anyOf=[dict(type="null")], type="string"),
        dict(
            type="object", additionalProperties=dict(type="null"), minProperties=2
        ),  # {"a":null,"a":null}
        dict(
            oneOf=[
                dict(type="object", properties=dict(a={})),
                dict(type="object", properties=dict(a={}, b={}), required=["b"]),
            ]
        ),  # both fit
        dict(type="number", exclusiveMinimum=0, exclusiveMaximum=0.5),
        dict(type="number", minimum=-1.5, exclusiveMaximum=-1),
        dict(exclusiveMinimum=0, anyOf=[dict(maximum=0.5)]),
        dict(allOf=[dict(type="number", exclusiveMinimum=0), dict(maximum=0.5)]),
        dict(type="thing"),
        dict(type="integer", minimum=5, maximum=3),
        dict(enum=[]),
        {"$ref": "#/nowhere"},
        dict(type="string", pattern="(a"),
        '{"type":',
        "5",
        "[]",
        dict(properties=5),
        dict(type="object", required=5),
        dict(type={}),
        dict(enum=3),
        dict(anyOf=3),
        dict(type="object", properties=dict(a=3)),
        dict(type=5),
        dict(type="string", pattern=5),
        dict(type="string", maxLength="x"),
        dict(type="array", items={}, maxItems=-1),
    ],
)
def test_what_is_not_kept_is_refused_alone(bad):
    outs = llm().generate(["bad", "good"], [wish(json=bad), SamplingParams(max_tokens=2)])
    assert (
        "structured_outputs" in outs[0].error
        and "\n" not in outs[0].error
        and "/project" not in outs[0].error
    )
    assert outs[1].error is None and len(outs[1].outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    "schema",
    [
        dict(oneOf=[{}]),
        dict(oneOf=[dict(type="null"), dict(type="integer", maximum=9)]),
        dict(allOf=[{}, {}]),
        dict(allOf=[dict(type="integer"), dict(minimum=3), dict(maximum=9)]),
        {"$ref": "#/$defs/n", "minimum": 3, "$defs": dict(n=dict(type="integer", maximum=12))},
        dict(minimum=3),
        dict(type="string", pattern="^a+$", maxLength=3),
        dict(type="string", format="date", minLength=3),
        dict(type="number", multipleOf=2, minimum=0, maximum=30),
        dict(type="integer", multipleOf=7, minimum=2, maximum=99),
        dict(type="integer", multipleOf=0.5, minimum=0, maximum=9),
        dict(type="integer", enum=[1, "a"]),
        dict(
            allOf=[
                dict(type="object", properties=dict(a=dict(type="null")), required=["a"]),
                dict(properties=dict(b=dict(type="null")), required=["b"]),
            ]
        ),
        dict(type="object", additionalProperties=dict(type="null"), minProperties=1),
        dict(type="number", exclusiveMinimum=0, maximum=1),
        dict(type="integer", exclusiveMinimum=0, maximum=1),
        dict(
            oneOf=[
                dict(
                    type="object",
                    properties=dict(k=dict(const=k), v={"type": t}),
                    required=["k", "v"],
                )
                for k, t in (("a", "null"), ("b", "boolean"))
            ]
        ),
        dict(
            type="object",
            properties=dict(a=dict(type="null")),
            required=["b"],
            additionalProperties=dict(type="null"),
        ),
        dict(
            type="object", propertyNames=dict(maxLength=2), additionalProperties=dict(type="null")
        ),
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "array",
            "items": [dict(type="null"), dict(type="boolean")],
            "additionalItems": False,
            "minItems": 1,
        },
        dict(type="object", properties=dict(a=dict(type="null")), additionalProperties=True),
        dict(
            type="object",
            properties=dict(a=dict(type="null")),
            additionalProperties=dict(type="boolean"),
        ),
        dict(
            type="object",
            properties=dict(ab=dict(type="null")),
            patternProperties={"^a": dict(enum=[None, 1])},
            additionalProperties=False,
        ),
        dict(type="array", items=dict(type="boolean"), uniqueItems=False, maxItems=3),
        {"type": "string", "maxLength": 2, "x-guidance": dict(lenient=True)},
    ],
    ids=str,
)
def test_more_that_is_kept(schema):
    import random

    rng, ends = random.Random(0), 0
    for _ in range(8):
        text = walk(schema, lambda n: rng.randrange(n), disable_any_whitespace=True)
        ends += text is not None and valid(text, schema)
    assert ends >= 4


def test_bombs_are_refused_or_cheap():
    deep = {"type": "null"}
    for _ in range(3000):
        deep = dict(type="array", items=deep)
    for form in (
        dict(json=deep),
        dict(json='{"type":"array","items":' * 9000 + "{}" + "}" * 9000),
        dict(regex="(" * 9000 + "a" + ")" * 9000),
        dict(regex="a" * 2**18),
        dict(json=dict(enum=["x" * 2**18])),
    ):
        assert "structured_outputs" in llm().generate("x", wish(max_tokens=2, **form))[0].error
    for form in (
        dict(json=dict(type="string", maxLength=10**6)),
        dict(regex="(x{0,1000}){0,1000}"),
    ):
        assert llm().generate("x", wish(max_tokens=2, **form))[0].error is None


FORMS = [
    None,
    dict(json=PERSON),
    dict(regex="[a-z]{3,9}"),
    None,
    dict(choice=["one", 'two "2"\n', "dréi"]),
    dict(json_object=True),
    dict(grammar='root ::= "a" root | "b"'),
    None,
    dict(json=dict(type="string", pattern="^[0-9]{4}$")),
]
PROMPTS = [f"{'word ' * (i % 5)}{i}" for i in range(len(FORMS))]


def mixed_params(**kw):
    return [
        wish(seed=i, **(f or {}), **kw)
        if f
        else SamplingParams(seed=i, max_tokens=40, temperature=1.0)
        for i, f in enumerate(FORMS)
    ]


@functools.cache
def alone():
    "Each request by itself, without an engine's company; those without a form by an engine that never saw one."
    fresh = engine()
    free = [i for i, f in enumerate(FORMS) if f is None]
    outs = {i: fresh.generate([PROMPTS[i]], [mixed_params()[i]])[0] for i in free}
    assert fresh.grammars is None
    return [
        outs[i] if i in outs else llm().generate([PROMPTS[i]], [mixed_params()[i]])[0]
        for i in range(len(FORMS))
    ]


@pytest.mark.parametrize(
    "how",
    [
        dict(),
        dict(strategy="loop"),
        dict(strategy="static"),
        dict(strategy="bucketed"),
        dict(strategy="prefix"),
        dict(max_num_seqs=3, max_num_batched_tokens=8),
        dict(compile="auto"),
    ],
    ids=str,
)
def test_rows_beside_are_unchanged(how):
    "In any strategy, few slots, chunks: the tokens of a request alone, structured or free."
    e = engine(**how)
    outs = e.generate(PROMPTS, mixed_params())
    assert [o.outputs[0].token_ids for o in outs] == [o.outputs[0].token_ids for o in alone()]
    for form, o in zip(FORMS, outs):
        text, c = o.outputs[0].text, o.outputs[0]
        if form is None or c.finish_reason != "stop":
            continue
        if "json" in form:
            assert valid(text, form["json"])
        if "regex" in form:
            assert re.fullmatch(form["regex"], text)
        if "choice" in form:
            assert text in form["choice"]
        if "grammar" in form:
            assert re.fullmatch("a*b", text)
        if "json_object" in form:
            assert isinstance(json.loads(text), dict)


def test_put_off_and_computed_again():
    "Preempted in the middle, and after a step that broke off, a request goes on where its form was."
    e, outs = engine(), {}
    for k, event in enumerate(e.stream(PROMPTS, mixed_params())):
        if event.finished:
            outs[event.index] = event.output
        scheduler, runner = e.engines["packed"].scheduler, e.engines["packed"].runner
        if k % 9 == 5 and scheduler.running:
            scheduler.preempt(scheduler.running[-1])
        if k == 40:
            execute = runner.execute

            def broken(batch):
                runner.execute = execute
                raise MemoryError

            runner.execute = broken
    assert e.stats().preemptions > 3 and e.stats().recomputed > 50
    assert [outs[i].outputs[0].token_ids for i in range(len(outs))] == [
        o.outputs[0].token_ids for o in alone()
    ]


def test_every_answer_is_valid():
    params = [
        wish(
            seed=i,
            json=PERSON,
            disable_any_whitespace=i % 2 == 0,
            temperature=[0, 0.7, 1.5][i % 3],
            max_tokens=900,
        )
        for i in range(60)
    ]
    outs = [o.outputs[0] for o in llm().generate([f"person {i}" for i in range(60)], params)]
    assert {o.finish_reason for o in outs} == {"stop"}
    assert sum(valid(o.text, PERSON) for o in outs) == 60
    assert not re.search(f"[ \n]{{{WHITESPACE + 1}}}", "".join(o.text for o in outs))


def test_n_seeds_logprobs_and_stop():
    out = llm().generate(
        "pick",
        SamplingParams(
            n=4,
            seed=3,
            max_tokens=20,
            logprobs=2,
            temperature=1.0,
            structured_outputs=dict(regex="[ab]{4,8}"),
        ),
    )[0]
    assert len({c.text for c in out.outputs}) > 1 and all(
        re.fullmatch("[ab]{4,8}", c.text) and c.finish_reason == "stop" for c in out.outputs
    )
    again = llm().generate(
        "pick",
        SamplingParams(
            seed=5, max_tokens=20, temperature=1.0, structured_outputs=dict(regex="[ab]{4,8}")
        ),
    )[0]
    assert again.outputs[0].token_ids == out.outputs[2].token_ids
    for c in out.outputs:  # of the model itself, before any mask
        assert all(i in d and len(d) >= 2 for i, d in zip(c.token_ids, c.logprobs))
    cut = (
        llm()
        .generate(
            "x", SamplingParams(max_tokens=3, temperature=0, structured_outputs=dict(regex="a{9}"))
        )[0]
        .outputs[0]
    )
    assert (cut.text, cut.finish_reason) == ("aaa", "length")
    stopped = (
        llm()
        .generate(
            "x",
            SamplingParams(
                max_tokens=30, temperature=0, stop="aab", structured_outputs=dict(regex="aaaab{3}")
            ),
        )[0]
        .outputs[0]
    )
    assert (stopped.text, stopped.stop_reason) == ("aa", "aab")
    stuck = llm().generate(
        ["x", "y"],
        [
            SamplingParams(min_tokens=5, structured_outputs=dict(choice=["a"])),
            SamplingParams(max_tokens=1),
        ],
    )
    assert "structured_outputs" in stuck[0].error and stuck[1].error is None


def test_verify_knows_the_grammar():
    outs = llm().generate(PROMPTS, mixed_params())
    report = llm().verify(outs)
    assert report.ok and report.tokens > 20
    i = next(i for i, f in enumerate(FORMS) if f and "regex" in f)
    outs[i].outputs[0].token_ids[1] = tiny_tokenizer().convert_tokens_to_ids("7")
    assert not llm().verify([outs[i]]).ok


@pytest.mark.parametrize("text", ["[" * 2**16, '"' + '\\"' * 2**15, '"a" [b' * 2**13])
def test_a_grammar_that_does_not_close_is_refused_at_once(text):
    "In time that grows with its length, not with its square: else this would run for minutes."
    with pytest.raises(ParamError, match="grammar"):
        grammars().of(wish(grammar="root ::= " + text))


def test_a_grammar_is_a_function_of_the_tokens():
    ids = lambda s: [tiny_tokenizer().convert_tokens_to_ids(c) for c in s]
    make = lambda: grammars().of(wish(regex="(ab|ac)*d"))
    g, x = make(), lambda: torch.zeros(2, llm().vocab_size)[:1]
    for text in ("", "a", "ab", "abac", "ab", "aca", "a", "abacd", "", "acabab", "x", "ab"):
        assert torch.equal(g.mask_(x(), ids(text)), make().mask_(x(), ids(text))), text
    wide = g.mask_(
        torch.zeros(1, llm().vocab_size + 40), ids("a")
    )  # logits beyond the vocabulary are no tokens
    assert wide[0].isfinite().nonzero()[:, 0].tolist() == sorted(ids("bc"))
    assert g.mask_(x(), ids("d") + [*llm().eos_ids]).isfinite().sum() == 0


def test_compiled_once(monkeypatch):
    e = engine()
    e.generate("x", wish(json=PERSON, max_tokens=2))
    e.generate(
        ["a", "b", "c"],
        [wish(seed=i, json=json.loads(json.dumps(PERSON)), max_tokens=2) for i in range(3)],
    )
    assert e.grammars.compiled.cache_info().misses == 1


def test_wishes_that_make_no_sense():
    for bad in (
        {},
        dict(regex="a", choice=["b"]),
        dict(regex=5),
        dict(choice=[]),
        dict(choice=[1]),
        dict(json=5),
        dict(xml="a"),
        "json",
        dict(json_object="yes"),
    ):
        with pytest.raises(ParamError, match="structured_outputs"):
            SamplingParams(structured_outputs=bad)
    with pytest.raises(ParamError, match="ignore_eos"):
        SamplingParams(structured_outputs=dict(regex="a"), ignore_eos=True)
    assert SamplingParams.of(
        dict(structured_outputs=dict(regex="a"))
    ).structured_outputs == StructuredOutputsParams(regex="a")
    pydantic = pytest.importorskip("pydantic", reason="a pydantic model as a schema needs pydantic")

    class Pet(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=5)
        legs: int = pydantic.Field(ge=0, le=9)

    out = llm().generate("x", wish(json=Pet))[0].outputs[0]
    assert 0 <= Pet.model_validate_json(out.text).legs <= 9


def test_without_library_or_tokenizer(monkeypatch):
    bare = LLM(copy.deepcopy(model()), None, compile=False)
    with pytest.raises(ModelError, match="needs a tokenizer"):
        bare.generate([[5, 6], [7]], wish(regex="a"))
    held, free = bare.generate(
        [[5, 6], [7]], [wish(regex="a"), SamplingParams(max_tokens=1, detokenize=False)]
    )  # those that can run do
    assert "needs a tokenizer" in held.error and free.error is None
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(ModelError, match=r"pip install 'batchlab\[structured\]'"):
        engine().generate(["a", "b"], wish(regex="a"))


def sentencepiece_like():
    "A tokenizer of the other family: pieces with a space as `▁`, and bytes as a way out."
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        *'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,.-',
        "▁a",
        "▁{",
        "ab",
        "true",
        "▁null",
        "▁12",
    ]
    tok = Tokenizer(
        models.BPE(
            {p: i for i, p in enumerate(pieces)},
            [],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tok, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def test_any_character_of_a_gbnf_grammar_may_be_a_line_break():
    "Between quotes, in a set and in a comment a point is a point."

    def takes(grammar, text):
        g, ids = grammars().of(wish(grammar=grammar)), tiny_tokenizer()(text)["input_ids"]
        return g.follow(ids) and bool(
            g.mask_(torch.zeros(1, llm().vocab_size), ids)[0, [*llm().eos_ids]].isfinite().all()
        )

    for text in ("axb", "a\nb", "aéb", "a😀b", 'a"b', "a.b"):
        assert takes('root ::= "a" . "b"', text), text
    for text in ("ab", "axxb", "ax"):
        assert not takes('root ::= "a" . "b"', text), text
    assert takes('root ::= "a" .* "b"', "a\n\n x\nb") and takes('root ::= ( "x" | . )+', "x\n")
    for text in ("x", "\n"):
        assert not takes(r'root ::= "." | [.] | "\"." | [\].]   # any .', text)
    assert (
        takes(r'root ::= "\"." | [\].]', '".')
        and takes(r'root ::= "\"." | [\].]', "]")
        and takes(r"root ::= [.]", ".")
    )


def test_an_empty_pattern_is_a_pattern():
    out = llm().generate("x", wish(regex="", max_tokens=4))[0]
    assert out.error is None and (out.outputs[0].text, out.outputs[0].finish_reason) == ("", "stop")


def test_the_other_family_of_tokenizers():
    tok = sentencepiece_like()
    e = LLM(
        tiny_model(
            "llama",
            num_hidden_layers=1,
            vocab_size=len(tok) + 21,
            eos_token_id=tok.eos_token_id,
            bos_token_id=1,
        ),
        tok,
        compile=False,
    )
    outs = e.generate(["abc", "a", "12 ab"] * 4, [wish(seed=i, json=PERSON) for i in range(12)])
    for o in outs:
        assert o.outputs[0].finish_reason == "stop" and valid(o.outputs[0].text, PERSON)
    for o in e.generate(
        ["abc", "a"] * 4, [wish(seed=i, regex="[a-z]{2,4} [0-9]é", max_tokens=40) for i in range(8)]
    ):
        assert re.fullmatch("[a-z]{2,4} [0-9]é", o.outputs[0].text)


def test_special_tokens_are_no_text():
    tok = tiny_tokenizer()
    g = grammars().of(wish(regex=".{1,40}"))
    hidden = {*tok.all_special_ids} - {*llm().eos_ids}
    x = g.mask_(torch.zeros(1, llm().vocab_size), [tok.convert_tokens_to_ids("a")])
    assert (
        hidden and not x[0, [*hidden]].isfinite().any() and x[0, [*llm().eos_ids]].isfinite().all()
    )


def chat_line(i, **body):
    body = (
        dict(
            model="m",
            messages=[dict(role="user", content="who? " * (1 + i % 4))],
            max_tokens=500,
            seed=i,
        )
        | body
    )
    return dict(custom_id=f"r{i}", method="POST", url="/v1/chat/completions", body=body)


def test_a_batch_file_with_response_formats(tmp_path):
    "100% of JSON-schema requests parse and validate, and the lines beside them say what they say without them."
    schema = dict(type="json_schema", json_schema=dict(name="person", strict=True, schema=PERSON))
    wanted = [
        schema,
        None,
        dict(type="json_object"),
        None,
        dict(type="text"),
        schema,
        dict(type="json_schema", json_schema=dict(schema=dict(uniqueItems=True))),
    ]
    lines = [
        chat_line(
            i,
            **{} if not (f := wanted[i % 7]) else dict(response_format=f),
            **dict(max_tokens=20) if not f else {},
        )
        for i in range(42)
    ]
    free = [l for l in lines if "response_format" not in l["body"]]
    for name, some in dict(all=lines, free=free).items():
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(l) + "\n" for l in some), encoding="utf-8"
        )
        Job(tmp_path / f"{name}.jsonl", tmp_path / f"{name}.out.jsonl", any_model=True).run(llm())
    read = lambda name: {
        d["custom_id"]: d
        for d in map(json.loads, (tmp_path / name).read_text(encoding="utf-8").splitlines())
    }
    got, same = read("all.out.jsonl"), read("free.out.jsonl")
    text = lambda d: d["response"]["body"]["choices"][0]["message"]["content"]
    held = [i for i in range(42) if wanted[i % 7] is schema]
    assert len(held) == 12 and sum(valid(text(got[f"r{i}"]), PERSON) for i in held) == 12
    assert len(same) == 12 and {k: text(d) for k, d in same.items()} == {
        k: text(got[k]) for k in same
    }
    bad = [got[f"r{i}"] for i in range(42) if i % 7 == 6]
    assert all(
        "uniqueItems" in d["error"]["message"] and d["response"]["status_code"] == 400 for d in bad
    )
    objects = [got[f"r{i}"]["response"]["body"]["choices"][0] for i in range(42) if i % 7 == 2]
    assert all(
        isinstance(json.loads(c["message"]["content"]), dict)
        for c in objects
        if c["finish_reason"] == "stop"
    )


def test_an_inherited_object_gets_the_properties_of_both():
    base = dict(type="object", properties=dict(a=dict(type="null")), required=["a"])
    more = dict(type="object", properties=dict(b=dict(type="null")), required=["b"])
    for schema in (
        {"$defs": dict(base=base), "allOf": [{"$ref": "#/$defs/base"}, more]},
        {"$defs": dict(base=base), "$ref": "#/$defs/base", **more},
    ):
        import random

        rng = random.Random(1)
        texts = [
            walk(schema, lambda n: rng.randrange(n), disable_any_whitespace=True) for _ in range(30)
        ]
        ended = [t for t in texts if t is not None]
        assert ended and all(valid(t, schema) for t in ended)


def test_grammars_of_llama_cpp():
    "Escapes as they write them, and no rule twice."
    from batchlab.tasks.structured import grammar_text
    from batchlab.core.params import StructuredOutputsParams

    of = lambda text: grammar_text(StructuredOutputsParams(grammar=text))
    for text in (r'root ::= "\u00e9" [\u0041-\u0043]', r"root ::= [a\-z]+", r'root ::= "\\u0041"'):
        assert of(text)
    with pytest.raises(ParamError, match="'foo' is defined twice"):
        of('root ::= foo\nfoo ::= "a"\nfoo ::= "b"')


# --- what generators of schemas write


def takes(text, **form):
    "Whether an answer of `text` fits."
    g, ids = grammars().of(wish(**form)), grammars().vocabulary.tokenize_str(text)
    return g.follow(ids) and bool(
        g.mask_(torch.zeros(1, llm().vocab_size), ids)[0, [*llm().eos_ids]].isfinite().all()
    )


def refusal(**form):
    with pytest.raises(ParamError) as e:
        grammars().of(wish(**form))
    assert "\n" not in str(e.value)
    return str(e.value)


TAG = dict(type="object", properties=dict(tag=dict(enum=["<eos>"])), required=["tag"])


@pytest.mark.parametrize(
    "form,fits",
    [
        (dict(json=dict(const="a <eos> b")), lambda t: json.loads(t) == "a <eos> b"),
        (dict(json=TAG), lambda t: json.loads(t) == {"tag": "<eos>"}),
        (
            dict(
                json=dict(
                    type="object", properties={"<pad>": dict(type="null")}, required=["<pad>"]
                )
            ),
            lambda t: json.loads(t) == {"<pad>": None},
        ),
        (dict(choice=["<eos>x"]), lambda t: t == "<eos>x"),
        (dict(regex="tag: <bos>[a-z]"), lambda t: re.fullmatch("tag: <bos>[a-z]", t)),
        (dict(grammar='root ::= "<" "eos>" "!"'), lambda t: t == "<eos>!"),
        (dict(grammar='%llguidance {}\nstart: "<bos>" /<pad>/'), lambda t: t == "<bos><pad>"),
        (dict(json=dict(type="string", pattern="^<eos>$")), lambda t: json.loads(t) == "<eos>"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_a_text_that_spells_a_control_token_is_a_text(form, fits):
    out = llm().generate("x", wish(max_tokens=60, **form))[0]
    assert (
        out.error is None and out.outputs[0].finish_reason == "stop" and fits(out.outputs[0].text)
    )


def test_a_grammar_of_ones_own_names_control_tokens():
    g, bos = (
        grammars().of(wish(grammar='%llguidance {}\nstart: "a<bos>" <bos> "b"')),
        tiny_tokenizer().bos_token_id,
    )
    assert g.follow(
        [
            *grammars().vocabulary.tokenize_str("a<bos>"),
            bos,
            *grammars().vocabulary.tokenize_str("b"),
        ]
    )


def test_integers_that_no_double_is():
    "Refused in a list of values; a bound goes to the next double inside."
    for n in (2**53 + 1, 2**63 - 1, 10**22 + 1, 1234567890123456789, 2**64, 10**400):
        for s in (dict(const=n), dict(enum=[0, n]), dict(const=dict(id=[n]))):
            assert "which no double is" in refusal(
                json=dict(type="object", properties=dict(id=s))
            ) and "#/properties/id" in refusal(json=dict(type="object", properties=dict(id=s)))
    for n in (2**53, -(2**60), 10**22, 2**62):
        assert takes(str(n), json=dict(const=n)) and not takes(str(n + 1), json=dict(const=n))
    for kind in ("integer", "number"):
        s = dict(type=kind, minimum=-(2**63), maximum=2**63 - 1)
        assert (
            takes(str(2**62), json=s)
            and takes("-5", json=s)
            and not takes(str(2**63), json=s)
            and not takes(str(-(2**63) - 1), json=s)
        )
        s = dict(type=kind, maximum=2**53 + 1)
        assert takes(str(2**53), json=s) and not takes(str(2**53 + 2), json=s)
        assert takes(
            "12",
            json=dict(type=kind, minimum=-1.7976931348623157e308, maximum=1.7976931348623157e308),
        )
    assert not takes("3", json=dict(type="integer", minimum=3, exclusiveMinimum=True)) and takes(
        "3", json=dict(type="integer", minimum=3, exclusiveMinimum=False)
    )


LABELS = [f"label {i} / of {i % 97}" for i in range(20_000)]


@pytest.mark.parametrize(
    "form",
    [
        dict(choice=LABELS),
        dict(json=dict(enum=LABELS)),
        dict(grammar="root ::= " + " | ".join(f'"c{i}"' for i in range(3000))),
        dict(json=dict(type="object", properties={f"c{i}": dict(const=1) for i in range(2500)})),
    ],
    ids=["choice", "enum", "gbnf", "properties"],
)
def test_thousands_of_choices(form):
    out = llm().generate("x", wish(seed=1, max_tokens=60, **form))[0]
    assert out.error is None
    if "choice" in form:
        assert out.outputs[0].text in form["choice"] and out.outputs[0].finish_reason == "stop"


def test_a_grammar_that_can_not_go_on_says_why():
    "Too many alternatives: said when it is compiled; later, by the row."
    from llguidance import LLMatcher, LLParserLimits
    from batchlab.tasks.structured import Grammar

    rows = 'start: "a" ("b"' + "".join(f' | "c{i}"' for i in range(200)) + ")"
    g = Grammar(
        LLMatcher(
            grammars().vocabulary, rows, log_level=0, limits=LLParserLimits(max_items_in_row=100)
        ),
        llm().eos_ids,
    )
    a = tiny_tokenizer().convert_tokens_to_ids("a")
    assert (
        g.mask_(torch.zeros(1, llm().vocab_size), []).isfinite().any()
        and not g.mask_(torch.zeros(1, llm().vocab_size), [a]).isfinite().any()
    )
    row = SamplingRow(
        SamplingParams(temperature=0), [5], frozenset(), None, output_ids=[a], grammar=g
    )
    said = sample(torch.zeros(1, llm().vocab_size), [row])
    assert "can not go on after 1 tokens" in said.errors[0] and "max is 100" in said.errors[0]


def test_a_chain_of_references_does_not_end_the_process():
    links = {
        f"d{i}": dict(type="object", properties=dict(a={"$ref": f"#/$defs/d{i + 1}"}))
        for i in range(5000)
    }
    assert "levels" in refusal(
        json={"$defs": links | dict(d5000=dict(type="null")), "$ref": "#/$defs/d0"}
    )
    assert "over 4,000 properties" in refusal(
        json=dict(type="object", properties={f"c{i}": {} for i in range(5000)})
    )


def test_where_in_a_schema_a_mistake_is():
    inside = lambda s: dict(
        type="object", properties=dict(a=dict(type="array", items=s)), required=["a"]
    )
    for s, why in (
        (dict(type="array", uniqueItems=True), "uniqueItems at #/properties/a/items"),
        (dict(type="bool"), "type 'bool' at #/properties/a/items"),
        (
            dict(type="string", pattern="(a"),
            "json at #/properties/a/items can not be compiled: regex parse error",
        ),
        (
            {"$ref": "#/$defs/x"},
            "$ref '#/$defs/x', which names nothing in the schema, at #/properties/a/items/$ref",
        ),
    ):
        assert why in refusal(json=inside(s))
    assert "at #/$defs/x can not" in refusal(
        json=inside({"$ref": "#/$defs/x"}) | {"$defs": dict(x=dict(type="string", maxLength=-1))}
    )


@pytest.mark.parametrize(
    "schema,good,bad",
    [
        (
            dict(type="string", format="date"),
            ["2024-02-29", "2023-12-31"],
            ["2023-02-29", "2023-04-31", "0000-01-01", "1900-02-29"],
        ),
        (
            dict(type="string", format="date-time"),
            ["2024-02-29T23:59:59Z", "2024-01-01T00:00:00.5+01:00"],
            ["2023-02-29T00:00:00Z", "2023-01-01T24:00:00Z", "2023-01-01T00:00:60Z", "2023-01-01"],
        ),
        (dict(type="string", pattern=r"^\D\S.$"), ["ab,"], ["1b,", "٣b,", "a b", "ab\u2028"]),
        (
            dict(type="string", pattern=r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"),
            ["1", "-.5", "007."],
            ["", "-", ".", "1.2.3"],
        ),
        (
            dict(
                oneOf=[{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
                discriminator=dict(propertyName="k"),
                **{
                    "$defs": {
                        k: dict(
                            type="object",
                            properties={"k": dict(const=k), k: dict(type="null")},
                            required=["k"],
                        )
                        for k in "ab"
                    }
                },
            ),
            [dict(k="a", a=None), dict(k="b")],
            [dict(k="c"), dict(k="a", b=None)],
        ),
        (
            {
                "$ref": "#/components/schemas/a~1b",
                "components": dict(schemas={"a/b": dict(type="integer", nullable=True)}),
            },
            [5],
            ["5"],
        ),
        (
            dict(
                type="object",
                propertyNames=dict(enum=["a", "b"]),
                additionalProperties=dict(type="null"),
                required=["a"],
            ),
            [dict(a=None)],
            [dict(b=None), dict(a=None, c=None)],
        ),
        (
            dict(
                type="object",
                propertyNames=dict(type="string"),
                additionalProperties=dict(type="null"),
            ),
            [dict(x=None)],
            [dict(x=1)],
        ),
        (
            dict(
                type="object",
                properties=dict(a=dict(type="null")),
                additionalProperties=dict(type="boolean"),
            ),
            [dict(a=None, b=True), dict(b=False)],
            [dict(a=True), dict(b=None)],
        ),
        (
            dict(type="object", properties=dict(a={"not": {}}, b=dict(type="null"))),
            [dict(b=None), {}],
            [dict(a=1)],
        ),
        ({"not": dict(type="null"), "type": ["null", "boolean"]}, [True], [None]),
        (
            dict(type="array", items=[dict(type="null")], additionalItems=dict(type="boolean")),
            [[None, True], [None]],
            [[True], [None, None]],
        ),
        (
            dict(type="array", items=dict(type="null"), uniqueItems=True, maxItems=1),
            [[None]],
            [[None, None]],
        ),
        (
            dict(
                anyOf=[dict(type="object", properties=dict(a=dict(type="null")))],
                allOf=[dict(type="object", properties=dict(b=dict(type="null")))],
            ),
            [dict(a=None, b=None)],
            [dict(b=1), dict(a=1)],
        ),
    ],
    ids=str,
)
def test_what_generators_write(schema, good, bad):
    as_text = lambda v: json.dumps(v, ensure_ascii=False, separators=(",", ":"))
    assert [v for v in good if not takes(as_text(v), json=schema)] == [] and [
        v for v in bad if takes(as_text(v), json=schema)
    ] == []


def test_a_listed_name_is_not_written_with_escapes():
    s = dict(
        type="object",
        properties=dict(a=dict(type="null")),
        additionalProperties=dict(type="boolean"),
    )
    for schema in (
        s,
        dict(
            allOf=[dict(s, additionalProperties=True), dict(type="object", properties=dict(c={}))]
        ),
    ):
        assert (
            takes('{"a":null}', json=schema)
            and not takes('{"\\u0061":true}', json=schema)
            and not takes('{"a":null,"\\u0061":true}', json=schema)
        )


def drawn_models(seed):
    "A pydantic model, by a seed."
    import datetime, decimal, random, typing, uuid
    from typing import Annotated, Literal, Optional, Union

    pydantic = pytest.importorskip("pydantic", reason="schemas of pydantic models need pydantic")
    r, field, count = random.Random(seed), pydantic.Field, iter(range(10**6))
    leaves = [
        int,
        float,
        bool,
        str,
        type(None),
        datetime.date,
        datetime.datetime,
        uuid.UUID,
        decimal.Decimal,
        typing.Any,
        Literal["a", "b <eos>", 3],
        Annotated[int, field(ge=-(2**63), le=2**63 - 1)],
        Annotated[int, field(gt=2, lt=9, multiple_of=2)],
        Annotated[float, field(ge=0.5, lt=3)],
        Annotated[str, field(min_length=1, max_length=4)],
        Annotated[str, field(pattern=r"^\w{2}\S$|^x")],
    ]

    def kind(deep):
        if not deep or r.random() < 0.4:
            return r.choice(leaves)
        one, other = kind(deep - 1), kind(deep - 1)
        return r.choice(
            [
                list[one],
                Optional[one],
                Union[one, other],
                dict[str, one],
                tuple[one, other],
                dict[Literal["k", "l"], one],
                set[int],
                Annotated[list[one], field(min_length=1, max_length=2)],
                model(deep - 1),
                model(deep - 1),
                union(deep - 1),
            ]
        )

    def model(deep, **fixed):
        config = pydantic.ConfigDict(extra=r.choice(["ignore", "forbid", "allow"]))
        fields = {
            n: (kind(deep), r.choice([..., ..., None]))
            for n in r.sample(["id", "name", "tags", "note", "at"], r.randint(1, 3))
        }
        return pydantic.create_model(f"M{next(count)}", __config__=config, **fixed, **fields)

    def union(deep):
        return Annotated[
            Union[tuple(model(deep, kind=(Literal[k], ...)) for k in "xy")],
            field(discriminator="kind"),
        ]

    return model(3).model_json_schema()


def test_schemas_of_drawn_models_are_held_or_refused_by_name():
    "And what is held is held whatever writer."
    import random

    held, refused = 0, []
    for seed in range(40):
        schema, rng = drawn_models(seed), random.Random(seed)
        try:
            grammars().of(wish(json=schema))
        except ParamError as e:
            refused.append(str(e))
            continue
        text = walk(schema, lambda n: rng.randrange(n), most=100, disable_any_whitespace=True)
        held += text is None or valid(text, schema)
    assert (
        held > 25
        and held + len(refused) == 40
        and all("uniqueItems at #" in why for why in refused)
    )


def test_answers_cut_in_a_form_are_said_once(caplog):
    outs = llm().generate(
        ["a", "b", "c"],
        [wish(json=PERSON, max_tokens=4), SamplingParams(max_tokens=2), wish(choice=["y"])],
    )
    assert [o.outputs[0].finish_reason for o in outs] == ["length", "length", "stop"]
    [said] = [r.getMessage() for r in caplog.records if "cut off by max_tokens" in r.getMessage()]
    assert (
        said.startswith("1 of 2 answers held to a form")
        and "first: outputs[0], at 4 tokens" in said
        and "larger max_tokens" in said
    )


def test_forms_of_response_format():
    from batchlab.jobs.settings import structured_of

    s = dict(properties=dict(a=dict(const=1)), required=["a"])
    for form in (
        dict(type="json_schema", json_schema=dict(name="n", schema=s, strict=True)),
        dict(type="json_schema", schema=s, name="n"),
    ):
        assert structured_of(form) == dict(json=s)
    for form in (
        dict(type="json_object", schema=s),
        dict(type="json_object", json_schema=dict(schema=s)),
    ):
        assert structured_of(form) == dict(json=dict(type="object") | s)
    assert (
        structured_of(dict(type="json_object")) == dict(json_object=True)
        and structured_of(dict(type="text")) is None
    )
    for form, why in (
        (dict(type="text", schema=s), "type text has a schema"),
        (dict(type="json_object", shema=s), "no 'shema'"),
        (dict(type="json_schema"), "needs the schema"),
        (dict(type="json_object", schema=5), "needs the schema"),
        (dict(type="json_schema", schema=s, json_schema=dict(schema=s)), "needs the schema"),
        (dict(type="json_schema", json_schema=5), "must be an object"),
    ):
        with pytest.raises(ParamError, match=why):
            structured_of(form)
    with pytest.raises(TypeError, match="'jsn'. Did you mean 'json'"):
        StructuredOutputsParams(jsn=s)
    with pytest.raises(ParamError, match="'jsn'.*did you mean 'json'"):
        SamplingParams(structured_outputs=dict(jsn=s))


def test_a_form_from_a_file(tmp_path):
    from batchlab.cli.flags import json_value

    (tmp_path / "form.json").write_text(json.dumps(dict(json=PERSON)), encoding="utf-8")
    assert json_value(f"@{tmp_path / 'form.json'}") == dict(json=PERSON) and json_value(
        '{"regex": "a"}'
    ) == dict(regex="a")
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    for bad, why in (
        (f"@{tmp_path / 'none.json'}", "can not be read"),
        (f"@{tmp_path / 'bad.json'}", "not JSON"),
        ("{", "not JSON"),
    ):
        with pytest.raises(Exception, match=why):
            json_value(bad)
