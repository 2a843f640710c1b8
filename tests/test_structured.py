"Answers held to a form: every schema that is taken is kept, by any writer, and no other row notices."

import copy, functools, json, random, re, sys
from unittest import mock

import jsonschema, pytest, torch
from hypothesis import HealthCheck, given, settings, strategies as st

pytest.importorskip(
    "llguidance", reason="structured outputs need llguidance, the extra `structured`"
)
from batchlab.api import LLM
from batchlab.jobs.job import Job
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.errors import ModelError, ParamError
from batchlab.core.params import SamplingParams, StructuredOutputsParams
from batchlab.core.sampling import SamplingRow, sample
from batchlab.tasks import structured
from batchlab.tasks.structured import Grammars, WHITESPACE, check_schema, grammars_of
from helpers import ids, texts

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
    return Grammars(tiny_tokenizer(), llm().loaded.vocab_size, llm().loaded.eos_ids)


def wish(seed=0, n=1, max_tokens=400, temperature=1.0, **form):
    form = dict(disable_any_whitespace=True) | form if {"json", "json_object"} & {*form} else form
    return SamplingParams(
        seed=seed, n=n, max_tokens=max_tokens, temperature=temperature, structured_outputs=form
    )


def one(prompt="x", **form):
    "The answer to a prompt in a form, or its refusal."
    return llm().generate(prompt, wish(**form))[0]


def valid(text, schema):
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    kind(schema).validate(json.loads(text))
    return True


def logits(more=0):
    return torch.zeros(1, llm().loaded.vocab_size + more)


def may_end(grammar, tokens):
    "Whether an answer may end behind `tokens`."
    return bool(grammar.mask_(logits(), tokens)[0, [*llm().loaded.eos_ids]].isfinite().all())


def tokens_of(text):
    return [tiny_tokenizer().convert_tokens_to_ids(c) for c in text]


def walk(schema, seed, most=400, **form):
    "Text written by choosing at random among the allowed ids, with short ways out favoured; None if there was no end, or it is none."
    g, words, draw = grammars().of(wish(json=schema, **form)), words_of(), seed.randrange
    tokens = []
    for _ in range(most):
        some = g.mask_(logits(), tokens)[0].isfinite().nonzero()[:, 0].tolist()
        if g.why:
            return None
        assert some, f"nothing may follow {b''.join(words[i] for i in tokens)!r}"
        more = [i for i in some if i not in llm().loaded.eos_ids]
        if not more or len(more) < len(some) and draw(3) != 1:
            return b"".join(words[i] for i in tokens).decode()
        out = [i for i in more if words[i] in (b'"', b"}", b"]", b",", b":")]
        tokens.append(out[draw(len(out))] if out and draw(2) else more[draw(len(more))])


@functools.cache
def words_of():
    return [grammars().vocabulary.decode_bytes([i]) for i in range(llm().loaded.vocab_size)]


names = st.text('abc"\\é 😀', min_size=1, max_size=4)
numbers = st.integers(-30, 30)
PATTERNS = (
    r"^[a-c]{1,3}$, ^(x|yz)+$, ^\d{2}-\w$, ^[^a]{1,2}$, ^.{1,3}$, ^[ -~]{1,2}$, ^\s?\S$".split(", ")
)
pairs = lambda a, b: st.tuples(st.integers(*a), st.integers(*b))
leaves = st.one_of(
    st.just(dict(type="null")),
    st.just(dict(type="boolean")),
    pairs((-30, 30), (0, 40)).map(lambda t: dict(type="integer", minimum=t[0], maximum=sum(t))),
    pairs((-30, 30), (1, 40)).map(
        lambda t: dict(type="number", minimum=t[0], exclusiveMaximum=sum(t))
    ),
    st.sampled_from([3, 5]).map(lambda n: dict(type="integer", multipleOf=n)),
    pairs((0, 3), (0, 3)).map(lambda t: dict(type="string", minLength=t[0], maxLength=sum(t))),
    st.sampled_from(PATTERNS).map(lambda p: dict(type="string", pattern=p)),
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
    some = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.tuples(st.dictionaries(names, inner, min_size=1, max_size=3), st.integers(0, 3)).map(
            lambda t: dict(
                type="object", properties=t[0], required=[*t[0]][: t[1]], additionalProperties=False
            )
        ),
        some.map(lambda v: dict(anyOf=v)),
        st.tuples(inner, pairs((0, 2), (0, 2))).map(
            lambda t: dict(type="array", items=t[0], minItems=t[1][0], maxItems=sum(t[1]))
        ),
        some.map(lambda v: dict(type="array", prefixItems=v[:2], items=False)),
        inner.map(lambda s: dict(type="object", additionalProperties=s, maxProperties=2)),
    )


schemas = st.recursive(leaves, grown, max_leaves=5)


@settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(schema=schemas, seed=st.integers(0, 2**32), tight=st.booleans())
def test_a_schema_that_is_taken_is_kept(schema, seed, tight):
    "Whatever writer: one that chooses at random among what the mask allows."
    rng = random.Random(seed)
    check_schema(schema)
    for _ in range(3):
        text = walk(schema, rng, disable_any_whitespace=tight)
        assert text is None or valid(text, schema)


def parsed(lines):
    return [*map(json.loads, lines.strip().split("\n"))]


REFUSED = r"""
{"not": {"$ref": "http://127.0.0.1:9/x"}}
{"type": "object", "properties": {"a": {}, "b": {}, "c": {}}, "minProperties": 2}
{"type": "object", "unevaluatedProperties": false}
{"$dynamicRef": "#x"}
{"$ref": "http://x/y"}
{"$ref": "#x"}
{"type": "integer", "enum": [true]}
{"type": "object", "properties": {"a": {}}, "required": ["b"], "additionalProperties": false}
{"anyOf": [{"type": "null"}], "type": "string"}
{"type": "thing"}
{"type": "integer", "minimum": 5, "maximum": 3}
{"enum": []}
{"$ref": "#/nowhere"}
{"type": "string", "pattern": "(a"}
{"properties": 5}
{"type": "object", "required": 5}
{"type": {}}
{"enum": 3}
{"anyOf": 3}
{"type": "object", "properties": {"a": 3}}
{"type": 5}
{"type": "string", "pattern": 5}
{"type": "string", "maxLength": "x"}
{"type": "array", "items": {}, "maxItems": -1}
"""


@pytest.mark.parametrize("bad", [*parsed(REFUSED), '{"type":', "5", "[]"], ids=str)
def test_what_is_not_kept_is_refused_alone(bad):
    outs = llm().generate(["bad", "good"], [wish(json=bad), SamplingParams(max_tokens=2)])
    assert "structured_outputs" in outs[0].error and "\n" not in outs[0].error
    assert outs[1].error is None and len(ids(outs)[1]) == 2


KEPT = r"""
{"oneOf": [{}]}
{"oneOf": [{"type": "null"}, {"type": "integer", "maximum": 9}]}
{"allOf": [{}, {}]}
{"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 9}]}
{"$ref": "#/$defs/n", "minimum": 3, "$defs": {"n": {"type": "integer", "maximum": 12}}}
{"minimum": 3}
{"type": "string", "pattern": "^a+$", "maxLength": 3}
{"type": "string", "format": "date", "minLength": 3}
{"type": "number", "multipleOf": 2, "minimum": 0, "maximum": 30}
{"type": "integer", "multipleOf": 7, "minimum": 2, "maximum": 99}
{"type": "integer", "multipleOf": 0.5, "minimum": 0, "maximum": 9}
{"type": "integer", "enum": [1, "a"]}
{"allOf": [{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}, {"properties": {"b": {"type": "null"}}, "required": ["b"]}]}
{"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 1}
{"type": "number", "exclusiveMinimum": 0, "maximum": 1}
{"type": "integer", "exclusiveMinimum": 0, "maximum": 1}
{"oneOf": [{"type": "object", "properties": {"k": {"const": "a"}, "v": {"type": "null"}}, "required": ["k", "v"]}, {"type": "object", "properties": {"k": {"const": "b"}, "v": {"type": "boolean"}}, "required": ["k", "v"]}]}
{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"], "additionalProperties": {"type": "null"}}
{"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [{"type": "null"}, {"type": "boolean"}], "additionalItems": false, "minItems": 1}
{"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": true}
{"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "boolean"}}
{"type": "object", "properties": {"ab": {"type": "null"}}, "patternProperties": {"^a": {"enum": [null, 1]}}, "additionalProperties": false}
{"type": "array", "items": {"type": "boolean"}, "uniqueItems": false, "maxItems": 3}
{"type": "string", "maxLength": 2, "x-guidance": {"lenient": true}}
{"$defs": {"base": {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}}, "allOf": [{"$ref": "#/$defs/base"}, {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}]}
{"$defs": {"base": {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"]}}, "$ref": "#/$defs/base", "type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}
"""


@pytest.mark.parametrize("schema", parsed(KEPT), ids=str)
def test_more_that_is_kept(schema):
    rng, ends = random.Random(0), 0
    for _ in range(8):
        text = walk(schema, rng, disable_any_whitespace=True)
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
        assert "structured_outputs" in one(max_tokens=2, **form).error
    for form in (
        dict(json=dict(type="string", maxLength=10**6)),
        dict(regex="(x{0,1000}){0,1000}"),
    ):
        assert one(max_tokens=2, **form).error is None


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


def mixed_params():
    free = lambda i: SamplingParams(seed=i, max_tokens=40, temperature=1.0)
    return [wish(seed=i, **f) if f else free(i) for i, f in enumerate(FORMS)]


@functools.cache
def alone():
    "Each request by itself, without an engine's company; those without a form by an engine that never saw one."
    fresh, asked = engine(), [*zip(PROMPTS, mixed_params(), FORMS)]
    free = [fresh.generate([p], [s])[0] if f is None else None for p, s, f in asked]
    assert grammars_of not in fresh.loaded._derived
    return ids(out or llm().generate([p], [s])[0] for out, (p, s, _) in zip(free, asked))


# Whether a text is in the form that the key names.
IN_FORM = dict(
    json=valid,
    regex=lambda text, pattern: re.fullmatch(pattern, text),
    choice=lambda text, choices: text in choices,
    grammar=lambda text, _: re.fullmatch("a*b", text),
    json_object=lambda text, _: isinstance(json.loads(text), dict),
)


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
    assert ids(outs) == alone()
    for form, o in zip(FORMS, outs):
        if form and o.outputs[0].finish_reason == "stop":
            [(kind, wanted)] = form.items()
            assert IN_FORM[kind](o.outputs[0].text, wanted)


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
    assert ids(outs[i] for i in range(len(outs))) == alone()


def test_every_answer_is_valid():
    how = lambda i: dict(temperature=[0, 0.7, 1.5][i % 3], disable_any_whitespace=i % 2 == 0)
    params = [wish(seed=i, json=PERSON, max_tokens=900, **how(i)) for i in range(60)]
    outs = llm().generate([f"person {i}" for i in range(60)], params)
    assert {o.outputs[0].finish_reason for o in outs} == {"stop"}
    assert all(valid(text, PERSON) for text in texts(outs))
    assert not re.search(f"[ \n]{{{WHITESPACE + 1}}}", "".join(texts(outs)))


def test_n_seeds_logprobs_and_stop():
    def asked(regex, **more):
        form = dict(structured_outputs=dict(regex=regex))
        return llm().generate(
            "pick", SamplingParams(**dict(max_tokens=20, temperature=1.0) | more | form)
        )[0]

    out = asked("[ab]{4,8}", n=4, seed=3, logprobs=2)
    assert len({c.text for c in out.outputs}) > 1
    assert all(re.fullmatch("[ab]{4,8}", c.text) for c in out.outputs)
    assert {c.finish_reason for c in out.outputs} == {"stop"}
    again = asked("[ab]{4,8}", seed=5).outputs[0]
    assert again.token_ids == out.outputs[2].token_ids
    for c in out.outputs:  # of the model itself, before any mask
        assert all(i in d and len(d) >= 2 for i, d in zip(c.token_ids, c.logprobs))
    cut = asked("a{9}", max_tokens=3, temperature=0).outputs[0]
    assert (cut.text, cut.finish_reason) == ("aaa", "length")
    stopped = asked("aaaab{3}", temperature=0, stop="aab").outputs[0]
    assert (stopped.text, stopped.stop_reason) == ("aa", "aab")
    short = SamplingParams(min_tokens=5, structured_outputs=dict(choice=["a"]))
    stuck, free = llm().generate(["x", "y"], [short, SamplingParams(max_tokens=1)])
    assert "structured_outputs" in stuck.error and free.error is None


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
    make = lambda: grammars().of(wish(regex="(ab|ac)*d"))
    g, x = make(), lambda: logits().repeat(2, 1)[:1]
    for text in ("", "a", "ab", "abac", "ab", "aca", "a", "abacd", "", "acabab", "x", "ab"):
        tokens = tokens_of(text)
        assert torch.equal(g.mask_(x(), tokens), make().mask_(x(), tokens)), text
    wide = g.mask_(logits(40), tokens_of("a"))  # logits beyond the vocabulary are no tokens
    assert wide[0].isfinite().nonzero()[:, 0].tolist() == sorted(tokens_of("bc"))
    assert g.mask_(x(), tokens_of("d") + [*llm().loaded.eos_ids]).isfinite().sum() == 0


def test_compiled_once(monkeypatch):
    e = engine()
    e.generate("x", wish(json=PERSON, max_tokens=2))
    same = [wish(seed=i, json=copy.deepcopy(PERSON), max_tokens=2) for i in range(3)]
    e.generate(["a", "b", "c"], same)
    assert e.loaded.derived(grammars_of).compiled.cache_info().misses == 1


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
    params = SamplingParams.of(dict(structured_outputs=dict(regex="a")))
    assert params.structured_outputs == StructuredOutputsParams(regex="a")
    pydantic = pytest.importorskip("pydantic", reason="a pydantic model as a schema needs pydantic")

    class Pet(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=5)
        legs: int = pydantic.Field(ge=0, le=9)

    assert 0 <= Pet.model_validate_json(one(json=Pet).outputs[0].text).legs <= 9


def test_without_library_or_tokenizer(monkeypatch):
    bare = LLM(copy.deepcopy(model()), None, compile=False)
    with pytest.raises(ModelError, match="needs a tokenizer"):
        bare.generate([[5, 6], [7]], wish(regex="a"))
    params = [wish(regex="a"), SamplingParams(max_tokens=1, detokenize=False)]
    held, free = bare.generate([[5, 6], [7]], params)  # those that can run do
    assert "needs a tokenizer" in held.error and free.error is None
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(ModelError, match=r"pip install 'batchlab\[structured\]'"):
        engine().generate(["a", "b"], wish(regex="a"))


def test_any_character_of_a_gbnf_grammar_may_be_a_line_break():
    "Between quotes, in a set and in a comment a point is a point."

    def fits(grammar, text):
        g, tokens = grammars().of(wish(grammar=grammar)), tiny_tokenizer()(text)["input_ids"]
        return g.follow(tokens) and may_end(g, tokens)

    between, listed = 'root ::= "a" . "b"', r'root ::= "." | [.] | "\"." | [\].]   # any .'
    for text in ("axb", "a\nb", "aéb", "a😀b", 'a"b', "a.b"):
        assert fits(between, text), text
    for text in ("ab", "axxb", "ax"):
        assert not fits(between, text), text
    assert fits('root ::= "a" .* "b"', "a\n\n x\nb") and fits('root ::= ( "x" | . )+', "x\n")
    assert not fits(listed, "x") and not fits(listed, "\n")
    quoted = r'root ::= "\"." | [\].]'
    assert fits(quoted, '".') and fits(quoted, "]") and fits("root ::= [.]", ".")


def test_the_other_family_of_tokenizers():
    "Pieces with a space as `▁`, and bytes as a way out."
    from test_text import sentencepiece

    tok = sentencepiece()
    model = tiny_model("llama", num_hidden_layers=1, vocab_size=len(tok) + 21)
    model.generation_config.eos_token_id = tok.eos_token_id
    e = LLM(model, tok, compile=False)
    outs = e.generate(["abc", "a", "12 ab"] * 4, [wish(seed=i, json=PERSON) for i in range(12)])
    assert {o.outputs[0].finish_reason for o in outs} == {"stop"}
    assert all(valid(text, PERSON) for text in texts(outs))
    pattern = "[a-z]{2,4} [0-9]é"
    asked = [wish(seed=i, regex=pattern, max_tokens=40) for i in range(8)]
    assert all(re.fullmatch(pattern, text) for text in texts(e.generate(["abc", "a"] * 4, asked)))


def test_special_tokens_are_no_text():
    tok = tiny_tokenizer()
    g = grammars().of(wish(regex=".{1,40}"))
    hidden = {*tok.all_special_ids} - {*llm().loaded.eos_ids}
    x = g.mask_(logits(), tokens_of("a"))
    assert hidden and not x[0, [*hidden]].isfinite().any() and may_end(g, tokens_of("a"))


# --- the tokenizer's own tokens

TONES = [" positive", " negative", " neutral", " mixed"]
WORDS = [
    *(*TONES, "positive", "negative", "neutral", "mixed", "label"),
    *('{"', '":"', '"}', " re", "ab", "abc", "ba"),
]


@functools.cache
def cutting():
    """An engine whose tokenizer has a token for each of `WORDS`, and for each beginning of one, as
    large vocabularies do; the model is random, so that pieces are as likely as words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {w: i for i, w in enumerate(["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    merges = []
    for word in WORDS:
        letters = word.replace(" ", "Ġ")
        for n in range(1, len(letters)):
            if letters[: n + 1] not in vocab:
                vocab[letters[: n + 1]] = len(vocab)
                merges.append((letters[:n], letters[n]))
    t = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens(["<eos>"])
    tok = PreTrainedTokenizerFast(tokenizer_object=t, eos_token="<eos>")
    model = tiny_model("llama", num_hidden_layers=2, vocab_size=len(tok), eos_token_id=0)
    model.generation_config.eos_token_id = 0
    return LLM(model, tok, compile=False, max_num_seqs=8)


def cut(text):
    return cutting().tokenizer(text, add_special_tokens=False)["input_ids"]


ASKED = [f"{'so ' * (i % 7)}review {i * i}: is" for i in range(60)]
greedily = lambda **form: wish(temperature=0, max_tokens=40, **form)


def test_a_choice_is_the_likeliest_label():
    "That of `choose`, where a label is one token. By a grammar of characters alone it is in 25 of these 60."
    held = greedily(choice=TONES)
    outs = cutting().generate(ASKED, held)
    best = [c.best for c in cutting().choose(ASKED, TONES)]
    assert texts(outs) == best and len({*best}) == len(TONES)
    assert ids(outs) == [[*cut(b), 0] for b in best]
    assert ids(cutting().generate(p, held)[0] for p in ASKED[:6]) == ids(outs)[:6]


BARE = [tone.strip() for tone in TONES]
LABEL = '{"label":"'
labelled = lambda d: dict(type="object", required=["label"], properties=dict(label=d))
named = dict(type="object", properties={w: dict(type="null") for w in BARE})
FORMS_OF_VALUES = dict(  # what stands before one of `BARE`, and the form
    enum=(LABEL, dict(json=labelled(dict(enum=BARE)))),
    const=(LABEL, dict(json=labelled(dict(anyOf=[dict(const=w) for w in BARE])))),
    names=('{"', dict(json=named | dict(minProperties=1, maxProperties=1))),
    regex=(LABEL, dict(regex=re.escape(LABEL) + f"({'|'.join(BARE)})")),
    gbnf=(
        LABEL,
        dict(grammar=f"root ::= {json.dumps(LABEL)} ({' | '.join(map(json.dumps, BARE))})"),
    ),
)


@pytest.mark.parametrize("before, form", FORMS_OF_VALUES.values(), ids=FORMS_OF_VALUES)
def test_a_value_is_the_likeliest_too(before, form):
    "As `choose` finds it behind what stands before it."
    outs = cutting().generate(ASKED, greedily(**form))
    n = len(cut(before))
    assert [i[:n] for i in ids(outs)] == [cut(before)] * len(ASKED)
    asked = [cutting().tokenizer(p)["input_ids"] + cut(before) for p in ASKED]
    scores = cutting().choose(asked, [cut(w) for w in BARE])
    assert [(i[n],) for i in ids(outs)] == [c.best for c in scores]


def test_several_tokens_a_label():
    "Those of transformers, which is told what may follow; where one label begins another, in any batch and with drafts, too."
    labels = ["positive", "positive mixed", " re re", "", " re", "é<eos>", "mixed?"]
    cuts = [[*cut("é<"), *cut("eos>")] if "<" in label else cut(label) for label in labels]
    e, paths, want = cutting(), [[*c, 0] for c in cuts], []
    for p in ASKED[:20]:
        prompt = torch.tensor([e.tokenizer(p)["input_ids"]])

        def allowed(row, written, start=prompt.shape[1]):
            out = written[start:].tolist()
            return [*{path[len(out)] for path in paths if path[: len(out)] == out}] or [0]

        how = dict(do_sample=False, max_new_tokens=20, pad_token_id=0)
        got = e.model.generate(
            prompt, attention_mask=prompt * 0 + 1, prefix_allowed_tokens_fn=allowed, **how
        )
        want.append(got[0, prompt.shape[1] :].tolist())
    outs = e.generate(ASKED[:20], greedily(choice=labels))
    assert ids(outs) == want and 2 < len({*texts(outs)}) and {*texts(outs)} <= {*labels}
    drafting = LLM(e.model, e.tokenizer, compile=False, max_num_seqs=3, speculation="lookup")
    assert ids(drafting.generate(ASKED[:20], greedily(choice=labels))) == want
    drawn = e.generate(ASKED[0], wish(choice=labels, n=20, seed=1))[0].outputs
    assert len({o.text for o in drawn}) > 2
    assert {tuple(o.token_ids) for o in drawn} <= {*map(tuple, paths)}


def all_answers(**form):
    "Each sequence of ids that the masks of `form` let through, up to its end."
    e, found, todo = cutting(), [], [[]]
    mask = grammars_of(e.loaded).of(wish(**form))
    while todo:
        written = todo.pop()
        x = mask.mask_(torch.zeros(1, e.loaded.vocab_size), written)[0]
        some = x.isfinite().nonzero()[:, 0].tolist()
        assert some, written
        todo += [[*written, i] for i in some if i]
        found += [written] * (0 in some)
    return found


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    values=st.lists(st.text('abc "\\é', max_size=5), min_size=1, max_size=8, unique=True),
    pattern=st.sampled_from(["^ab?[01]$", "^(ab|b)+c?$", None]),
)
def test_each_value_can_still_be_written(values, pattern):
    "Whatever it has in common with others, and with a pattern beside it; also in its own tokens."
    either = [dict(enum=values), dict(type="string", pattern=pattern, maxLength=4)]
    schema = dict(anyOf=either) if pattern else either[0]
    found = all_answers(json=schema)
    with mock.patch("batchlab.tasks.structured.own_cuts", lambda words, matcher, ids: ids):
        every = all_answers(json=schema)
    text_of = cutting().tokenizer.decode
    assert {*map(text_of, found)} == {*map(text_of, every)}
    assert all(cut(text_of(path)) in found for path in found)
    assert len(found) <= len(every)


def test_a_choice_that_the_tokenizer_would_change():
    "A character that it takes for a space is written by its bytes; one that it lacks is refused."
    from test_text import sentencepiece
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    def over(tok, eos):
        model = tiny_model("llama", num_hidden_layers=1, vocab_size=len(tok), eos_token_id=eos)
        model.generation_config.eos_token_id = eos
        return LLM(model, tok, compile=False)

    labels = ["▁", " the", "the", "<s>", "<0x41>", "é\n"]
    for keeps in (True, False):
        e = over(sentencepiece(keeps), 2)
        for label in labels:
            [out] = e.generate("the", greedily(choice=[label]))
            assert out.error is None and out.outputs[0].text == label
        asked = [wish(seed=i, choice=labels) for i in range(12)]
        assert {*texts(e.generate(["the", "a", "12 ab"] * 4, asked))} <= {*labels}
    few = Tokenizer(models.BPE(vocab={"<eos>": 0, "a": 1}, merges=[]))
    few.decoder = decoders.ByteLevel()
    few.add_special_tokens(["<eos>"])
    e = over(PreTrainedTokenizerFast(tokenizer_object=few, eos_token="<eos>"), 0)
    outs = e.generate(["a", "a"], [greedily(choice=["a"]), greedily(choice=["aa", "ab"])])
    assert texts(outs)[0] == "a" and "'ab', which this tokenizer can't write" in outs[1].error


def chat_line(i, **body):
    talk = [dict(role="user", content="who? " * (1 + i % 4))]
    body = dict(model="m", messages=talk, max_tokens=500, seed=i) | body
    return dict(custom_id=f"r{i}", method="POST", url="/v1/chat/completions", body=body)


def test_a_batch_file_with_response_formats(tmp_path):
    schema = dict(type="json_schema", json_schema=dict(name="person", strict=True, schema=PERSON))
    bad, never = (
        dict(type="json_schema", json_schema=dict(schema=s)) for s in (dict(type="thing"), NEVER)
    )
    wanted = [schema, None, dict(type="json_object"), dict(type="text"), never, schema, bad]
    form = lambda f: dict(response_format=f) if f else dict(max_tokens=20)
    of, to = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    of.write_text("\n".join(json.dumps(chat_line(i, **form(f))) for i, f in enumerate(wanted * 4)))
    Job(of, to, any_model=True, ordered=True).run(llm())
    got = [json.loads(line) for line in to.read_text().splitlines()]
    assert len(got) == len(wanted) * 4
    for asked, d in zip(wanted * 4, got):
        if asked == bad:
            assert d["response"]["status_code"] == 400 and "thing" in d["error"]["message"]
            continue
        if asked == never:
            assert d["response"]["status_code"] == 500 and "non-unique" in d["error"]["message"]
            continue
        [choice] = d["response"]["body"]["choices"]
        if asked == schema:
            assert valid(choice["message"]["content"], PERSON)
        elif asked == wanted[2] and choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)


def test_grammars_of_llama_cpp():
    "Escapes as they write them, and no rule twice."
    for text in (r'root ::= "\u00e9" [\u0041-\u0043]', r"root ::= [a\-z]+", r'root ::= "\\u0041"'):
        assert grammars().of(wish(grammar=text))
    assert "'foo'" in refusal(grammar='root ::= foo\nfoo ::= "a"\nfoo ::= "b"')


# --- what generators of schemas write


def takes(text, **form):
    "Whether an answer of `text` fits."
    g, tokens = grammars().of(wish(**form)), grammars().vocabulary.tokenize_str(text)
    return g.follow(tokens) and may_end(g, tokens)


def refusal(**form):
    with pytest.raises(ParamError) as e:
        grammars().of(wish(**form))
    assert "\n" not in str(e.value)
    return str(e.value)


TAG = dict(type="object", properties=dict(tag=dict(enum=["<eos>"])), required=["tag"])


PAD = dict(type="object", properties={"<pad>": dict(type="null")}, required=["<pad>"])


@pytest.mark.parametrize(
    "form, want",
    [
        (dict(json=dict(const="a <eos> b")), '"a <eos> b"'),
        (dict(json=TAG), '{"tag":"<eos>"}'),
        (dict(json=PAD), '{"<pad>":null}'),
        (dict(choice=["<eos>x"]), "<eos>x"),
        (dict(regex="tag: <bos>[a-z]"), "tag: <bos>."),
        (dict(grammar='root ::= "<" "eos>" "!"'), "<eos>!"),
        (dict(grammar='%llguidance {}\nstart: "<bos>" /<pad>/'), "<bos><pad>"),
        (dict(json=dict(type="string", pattern="^<eos>$")), '"<eos>"'),
        (dict(regex=""), ""),
    ],
    ids=str,
)
def test_a_form_is_answered_by_a_text_of_it_and_what_spells_a_control_token_is_one(form, want):
    out = one(max_tokens=60, **form)
    assert out.error is None and out.outputs[0].finish_reason == "stop"
    assert re.fullmatch(want, out.outputs[0].text)


def test_a_grammar_of_ones_own_names_control_tokens():
    g = grammars().of(wish(grammar='%llguidance {}\nstart: "a<bos>" <bos> "b"'))
    spelled = grammars().vocabulary.tokenize_str
    assert g.follow([*spelled("a<bos>"), tiny_tokenizer().bos_token_id, *spelled("b")])


def test_integers_that_no_double_is():
    "A list of values that has one is never answered by its neighbour; a bound goes to the double inside."
    for n in (2**53, -(2**60), 10**22):
        assert takes(str(n), json=dict(const=n)) and not takes(str(n + 1), json=dict(const=n))
    big, most = 2**63, sys.float_info.max
    for kind in ("integer", "number"):
        for bounds, good, bad in (
            (dict(minimum=-big, maximum=big - 1), (2**62, -5), (big, -big - 1)),
            (dict(maximum=2**53 + 1), [2**53], [2**53 + 2]),
            (dict(minimum=-most, maximum=most), [12], []),
            (dict(minimum=3, exclusiveMinimum=True), [], [3]),
            (dict(minimum=3, exclusiveMinimum=False), [3], []),
        ):
            fits = lambda n: takes(str(n), json=dict(type=kind) | bounds)
            assert all(map(fits, good)) and not any(map(fits, bad)), bounds


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
    out = one(seed=1, max_tokens=60, **form)
    assert out.error is None
    if "choice" in form:
        assert out.outputs[0].text in form["choice"] and out.outputs[0].finish_reason == "stop"


def test_a_grammar_that_can_not_go_on_says_why():
    "Too many alternatives: said when it is compiled; later, by the row."
    from llguidance import LLMatcher, LLParserLimits
    from batchlab.tasks.structured import Grammar

    rows = 'start: "a" ("b"' + "".join(f' | "c{i}"' for i in range(200)) + ")"
    limits, vocabulary = LLParserLimits(max_items_in_row=100), grammars().vocabulary
    matcher = LLMatcher(vocabulary, rows, log_level=0, limits=limits)
    g = Grammar(vocabulary, matcher, llm().loaded.eos_ids)
    a = tokens_of("a")
    assert g.mask_(logits(), []).isfinite().any() and not g.mask_(logits(), a).isfinite().any()
    greedy = SamplingParams(temperature=0)
    row = SamplingRow(greedy, [5], frozenset(), None, output_ids=a, grammar=g)
    said = sample(logits(), [row]).errors[0]
    assert "can not go on after 1 tokens" in said and "max is 100" in said


def test_looking_ahead_leaves_the_grammar_as_it_is():
    "Where a draft leads to what is too wide, the tokens before it are still allowed."
    from llguidance import LLMatcher, LLParserLimits
    from batchlab.tasks.structured import Grammar

    wide = 'start: "a" ("b"' + "".join(f' | "c{i}"' for i in range(200)) + ")"
    limits, vocabulary = LLParserLimits(max_items_in_row=100), grammars().vocabulary

    def make():
        matcher = LLMatcher(vocabulary, wide, log_level=0, limits=limits)
        return Grammar(vocabulary, matcher, llm().loaded.eos_ids)

    plain, g = make(), make()
    for draft in (tokens_of("ab"), tokens_of("ac1"), tokens_of("zz")):
        g.forced([]), g.fitting([], draft)
        assert not g.matcher.is_error()
        assert torch.equal(g.mask_(logits(), []), plain.mask_(logits(), []))


def test_a_chain_of_references_does_not_end_the_process():
    link = lambda i: dict(type="object", properties=dict(a={"$ref": f"#/$defs/d{i + 1}"}))
    links = {f"d{i}": link(i) for i in range(5000)} | dict(d5000=dict(type="null"))
    assert "levels" in refusal(json={"$defs": links, "$ref": "#/$defs/d0"})
    wide = dict(type="object", properties={f"c{i}": {} for i in range(5000)})
    assert "over 4,000 properties" in refusal(json=wide)


def test_a_schema_that_is_too_large_is_refused_before_its_parts_are_read(monkeypatch):
    wide = [f"value {i}" for i in range(200_000)]
    deep = dict(type="string")
    for _ in range(15):
        deep = dict(anyOf=[deep, deep])
    monkeypatch.setattr(structured, "check_schema", None)
    for schema in (dict(enum=wide), dict(type="object", properties=dict(a=deep))):
        assert "over 524,288 characters" in refusal(json=schema)
        assert "over 524,288 characters" in refusal(json=json.dumps(schema))


NEVER = dict(type="array", items=dict(const=1), minItems=2, maxItems=2, uniqueItems=True)


def test_an_answer_that_no_grammar_holds_ends_with_an_error():
    "The others don't notice; one that is cut is as cut as any; in a stream the error comes last."
    cut, good = wish(json=NEVER, max_tokens=2), wish(json=dict(const=5))
    outs = llm().generate(["a", "b", "c"], [wish(json=NEVER), cut, good])
    assert [o.outputs[0].finish_reason for o in outs] == ["error", "length", "stop"]
    assert [bool(o.error) for o in outs] == [True, False, False]
    assert "at $ ([1, 1] has non-unique elements)" in outs[0].error and "\n" not in outs[0].error
    events = [*llm().stream(["a"], wish(json=NEVER))]
    assert "".join(e.text for e in events) == "[1,1]" and events[-1].finish_reason == "error"
    assert events[-1].finished and events[-1].output.error == outs[0].error


@pytest.mark.parametrize(
    "schema, text, slowest",
    [
        (dict(const="a" * 40 + "b", **{"not": dict(pattern="^(a|a)*$")}), "a" * 40 + "b", 0.01),
        (dict(const=1, allOf=[{"not": {"allOf": [{"minimum": 1}] * 9000}}] * 9), 1, 0.01),
        ({"const": 1, "not": {"$ref": "#"}}, 1, 60),  # by its depth, whatever the time
    ],
)
def test_a_check_comes_to_an_end(schema, text, slowest, monkeypatch):
    monkeypatch.setattr(structured, "SLOWEST", slowest)
    assert "can't be checked" in structured.Validity(schema)(json.dumps(text))


def test_where_in_a_schema_a_mistake_is():
    def inside(s, **more):
        items = dict(type="array", items=s)
        return refusal(json=dict(type="object", properties=dict(a=items), **more))

    at = "at #/properties/a/items"
    for s, why in (
        (dict(unevaluatedProperties=False), f"unevaluatedProperties {at}"),
        (dict(type="bool"), f"json {at} can not be compiled: Invalid type: bool"),
        (dict(type="string", pattern="(a"), f"json {at} can not be compiled: regex parse error"),
        ({"$ref": "#/$defs/x"}, f"json {at} can not be compiled: Pointer '/$defs/x' does not"),
    ):
        assert why in inside(s)
    wrong = dict(x=dict(type="string", maxLength=-1))
    assert "at #/$defs/x can not" in inside({"$ref": "#/$defs/x"}, **{"$defs": wrong})


# A schema, values that fit, values that do not.
GENERATED = r"""
[{"type": "string", "format": "date"}, ["2024-02-29", "2023-12-31"], ["2023-02-29", "2023-04-31", "0000-01-01", "1900-02-29"]]
[{"type": "string", "format": "date-time"}, ["2024-02-29T23:59:59Z", "2024-01-01T00:00:00.5+01:00"], ["2023-02-29T00:00:00Z", "2023-01-01T24:00:00Z", "2023-01-01T00:00:60Z", "2023-01-01"]]
[{"type": "string", "pattern": "^\\D\\S.$"}, ["ab,"], ["1b,", "٣b,", "a b"]]
[{"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?0*\\d*\\.?\\d*$"}, ["1", "-.5", "007."], ["", "-", ".", "1.2.3"]]
[{"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "discriminator": {"propertyName": "k"}, "$defs": {"a": {"type": "object", "properties": {"k": {"const": "a"}, "a": {"type": "null"}}, "required": ["k"]}, "b": {"type": "object", "properties": {"k": {"const": "b"}, "b": {"type": "null"}}, "required": ["k"]}}}, [{"k": "a", "a": null}, {"k": "b"}], [{"k": "c"}, {"k": "a", "b": null}]]
[{"$ref": "#/components/schemas/a~1b", "components": {"schemas": {"a/b": {"type": "integer", "nullable": true}}}}, [5], ["5"]]
[{"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}, "required": ["a"]}, [{"a": null}], [{"b": null}, {"a": null, "c": null}]]
[{"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "null"}}, [{"x": null}], [{"x": 1}]]
[{"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "boolean"}}, [{"a": null, "b": true}, {"b": false}], [{"a": true}, {"b": null}]]
[{"type": "object", "properties": {"a": {"not": {}}, "b": {"type": "null"}}}, [{"b": null}, {}], [{"a": 1}]]
[{"not": {"type": "null"}, "type": ["null", "boolean"]}, [true], [null]]
[{"type": "array", "items": [{"type": "null"}], "additionalItems": {"type": "boolean"}}, [[null, true], [null]], [[true], [null, null]]]
[{"type": "array", "items": {"type": "null"}, "uniqueItems": true, "maxItems": 1}, [[null]], [[null, null]]]
[{"oneOf": [{"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": false}, {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"], "additionalProperties": false}]}, [{"a": null}, {"b": null}], [{"a": null, "b": null}, {}]]
[{"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}, "y": {"$ref": "#/$defs/n"}}, "required": ["x", "y"], "$defs": {"n": {"type": "boolean"}}}, [{"x": true, "y": false}], [{"x": true}, {"x": true, "y": null}]]
[{"anyOf": [{"type": "object", "properties": {"a": {"type": "null"}}}], "allOf": [{"type": "object", "properties": {"b": {"type": "null"}}}]}, [{"a": null, "b": null}], [{"b": 1}, {"a": 1}]]
[{"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": true}, [[1, 2], []], [[1, 1]]]
[{"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}}, [[2, 1]], [[2], []]]
[{"type": "integer", "not": {"const": 1}}, [2, 11], [1]]
[{"not": {}}, [], [1, null]]
[{"oneOf": [{"minimum": 3}, {"type": "integer"}]}, [2, 3.5], [3]]
[{"if": {"const": 1}, "then": {"type": "string"}}, [2], [1]]
[{"type": "string", "pattern": "a\"b"}, ["a\"b"], ["ab"]]
[{"type": "string", "pattern": "^a\\\\b$"}, ["a\\b"], ["ab"]]
[{"type": "string", "pattern": "^\\p{L}$"}, ["é"], ["5"]]
[{"type": "object", "patternProperties": {"^\\p{L}$": {"type": "null"}}}, [{"é": null}], [{"é": 1}, {"5": null}]]
[{"type": "object", "additionalProperties": {"type": "null"}, "propertyNames": {"maxLength": 2}}, [{"ab": null}], [{"abc": null}]]
[{"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, [{"b": 1}], [{"a": 1}]]
[{"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, [0.25], [0, 0.5]]
[{"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, [-1.25, -1.5], [-1]]
[{"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]}, [0.5], [0]]
[{"type": "number", "minimum": 3, "exclusiveMinimum": true}, [4], [3]]
[{"const": 9007199254740993}, [], [9007199254740992, 9007199254740993]]
[{"type": "string", "format": "time"}, ["23:59:59Z"], ["23:59:60Z"]]
"""


@pytest.mark.parametrize("schema, good, bad", parsed(GENERATED), ids=str)
def test_what_generators_write(schema, good, bad):
    as_text = lambda v: json.dumps(v, ensure_ascii=False, separators=(",", ":"))
    assert [v for v in good if not takes(as_text(v), json=schema)] == []
    assert [v for v in bad if takes(as_text(v), json=schema)] == []


LISTED = r"""
{"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "boolean"}}
{"allOf": [{"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": true}, {"type": "object", "properties": {"c": {}}}]}
"""


@pytest.mark.parametrize("schema", parsed(LISTED), ids=str)
def test_a_listed_name_is_not_written_with_escapes(schema):
    assert takes('{"a":null}', json=schema)
    for text in (r'{"\u0061":true}', r'{"a":null,"\u0061":true}'):
        assert not takes(text, json=schema)


@pytest.mark.parametrize("seed", range(12))
def test_schemas_of_pydantic_are_held(seed):
    "Of a model with fields of all kinds, one in another."
    import datetime, decimal, typing, uuid
    from typing import Annotated, Literal

    pydantic = pytest.importorskip("pydantic", reason="schemas of pydantic models need pydantic")
    field, rng = pydantic.Field, random.Random(seed)
    plain = [int, float, bool, str, None, datetime.date, datetime.datetime, uuid.UUID]
    kinds = [
        *(*plain, decimal.Decimal, typing.Any, Literal["a", "b <eos>", 3]),
        Annotated[int, field(ge=-(2**63), le=2**63 - 1)],
        Annotated[int, field(gt=2, lt=9, multiple_of=2)],
        Annotated[float, field(ge=0.5, lt=3)],
        Annotated[str, field(min_length=1, max_length=4)],
        Annotated[str, field(pattern=r"^\w{2}\S$|^x")],
    ]

    def model(kinds, **fixed):
        config = dict(extra=rng.choice(["ignore", "forbid", "allow"]))
        fields = {f"f{i}": (kind, rng.choice([..., None])) for i, kind in enumerate(kinds)}
        return pydantic.create_model("M", __config__=config, **fixed, **fields)

    a, b, *few = rng.sample(kinds, 5)
    both = typing.Union[tuple(model([a], kind=(Literal[k], ...)) for k in "xy")]
    nested = [
        list[a],
        typing.Optional[a],
        dict[str, b],
        tuple[a, b],
        dict[Literal["k", "l"], b],
        model(few),
    ]
    nested += [Annotated[list[b], field(min_length=1, max_length=2)]]
    nested += [Annotated[both, field(discriminator="kind")]]
    schema = model(rng.sample(nested, 3)).model_json_schema()
    text = walk(schema, rng, most=100, disable_any_whitespace=True)
    assert text is None or valid(text, schema)


def test_answers_cut_in_a_form_are_said_once(caplog):
    params = [wish(json=PERSON, max_tokens=4), SamplingParams(max_tokens=2), wish(choice=["y"])]
    outs = llm().generate(["a", "b", "c"], params)
    assert [o.outputs[0].finish_reason for o in outs] == ["length", "length", "stop"]
    [said] = [r.getMessage() for r in caplog.records if "cut off by max_tokens" in r.getMessage()]
    assert said.startswith("1 of 2 answers held to a form") and "first: outputs[0]" in said


def test_forms_of_response_format():
    from batchlab.jobs.settings import structured_of

    s = dict(properties=dict(a=dict(const=1)), required=["a"])
    object_ = dict(json=dict(type="object") | s)
    for form, want in (
        (dict(type="json_schema", json_schema=dict(name="n", schema=s, strict=True)), dict(json=s)),
        (dict(type="json_schema", schema=s, name="n"), dict(json=s)),
        (dict(type="json_object", schema=s), object_),
        (dict(type="json_object", json_schema=dict(schema=s)), object_),
        (dict(type="json_object"), dict(json_object=True)),
        (dict(type="text"), None),
    ):
        assert structured_of(form) == want
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
    from batchlab.cli.flags import json_argument

    (tmp_path / "form.json").write_text(json.dumps(dict(json=PERSON)), encoding="utf-8")
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    assert json_argument(f"@{tmp_path / 'form.json'}") == dict(json=PERSON)
    assert json_argument('{"regex": "a"}') == dict(regex="a")
    for bad, why in (
        (f"@{tmp_path / 'none.json'}", "can not be read"),
        (f"@{tmp_path / 'bad.json'}", "not JSON"),
        ("{", "not JSON"),
    ):
        with pytest.raises(Exception, match=why):
            json_argument(bad)
