"Answers held to a form: every schema that is taken is kept, by any writer, and no other row notices."

import copy, functools, json, random, re, sys
from unittest import mock

import jsonschema, pytest, torch
from hypothesis import HealthCheck, given, settings, strategies as st

from helpers import ids, json_lines, needs, one_thread, texts

needs("llguidance")
from batchlab import LLM, SamplingParams
from batchlab.jobs.job import Job
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.errors import ModelError, ParamError
from batchlab.core.params import StructuredOutputsParams
from batchlab.core.sampling import SamplingRow, sample
from batchlab.tasks import structured
from batchlab.tasks.structured import Grammars, WHITESPACE, check_schema, grammars_of

PERSON = dict(
    type="object",
    required=["name", "age", "tags"],
    properties=dict(
        name=dict(type="string", minLength=1, maxLength=6),
        age=dict(type="integer", minimum=0, maximum=130),
        tags=dict(type="array", items=dict(enum=["a", 'b"c', None, 7]), maxItems=2),
    ),
)

pytestmark = one_thread


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


@pytest.mark.parametrize("bad", [*json_lines(REFUSED), '{"type":', "5", "[]"], ids=str)
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


# Of models of pydantic with a field of each kind that must be there and one that may.
OF_PYDANTIC = r"""
{"properties": {"a": {"anyOf": [{"type": "number"}, {"type": "string"}], "title": "A"}, "b": {"anyOf": [{"type": "number"}, {"type": "string"}], "default": null, "title": "B"}}, "required": ["a"], "title": "M", "type": "object"}
{"additionalProperties": false, "properties": {"a": {"enum": ["a", "b <eos>", 3], "title": "A"}, "b": {"default": null, "enum": ["a", "b <eos>", 3], "title": "B"}}, "required": ["a"], "title": "M", "type": "object"}
{"additionalProperties": true, "properties": {"a": {"maximum": 9223372036854775807, "minimum": -9223372036854775808, "title": "A", "type": "integer"}, "b": {"default": null, "maximum": 9223372036854775807, "minimum": -9223372036854775808, "title": "B", "type": "integer"}}, "required": ["a"], "title": "M", "type": "object"}
{"properties": {"a": {"exclusiveMaximum": 9, "exclusiveMinimum": 2, "multipleOf": 2, "title": "A", "type": "integer"}, "b": {"default": null, "exclusiveMaximum": 9, "exclusiveMinimum": 2, "multipleOf": 2, "title": "B", "type": "integer"}}, "required": ["a"], "title": "M", "type": "object"}
{"additionalProperties": false, "properties": {"a": {"exclusiveMaximum": 3, "minimum": 0.5, "title": "A", "type": "number"}, "b": {"default": null, "exclusiveMaximum": 3, "minimum": 0.5, "title": "B", "type": "number"}}, "required": ["a"], "title": "M", "type": "object"}
{"additionalProperties": true, "properties": {"a": {"maxLength": 4, "minLength": 1, "title": "A", "type": "string"}, "b": {"default": null, "maxLength": 4, "minLength": 1, "title": "B", "type": "string"}}, "required": ["a"], "title": "M", "type": "object"}
{"properties": {"a": {"pattern": "^\\w{2}\\S$|^x", "title": "A", "type": "string"}, "b": {"default": null, "pattern": "^\\w{2}\\S$|^x", "title": "B", "type": "string"}}, "required": ["a"], "title": "M", "type": "object"}
{"additionalProperties": false, "properties": {"a": {"items": {"type": "boolean"}, "maxItems": 2, "minItems": 1, "title": "A", "type": "array"}, "b": {"default": null, "items": {"type": "boolean"}, "maxItems": 2, "minItems": 1, "title": "B", "type": "array"}}, "required": ["a"], "title": "M", "type": "object"}
{"$defs": {"M_1": {"additionalProperties": false, "properties": {"a": {"title": "A", "type": "integer"}, "kind": {"const": "x", "title": "Kind", "type": "string"}}, "required": ["a", "kind"], "title": "M", "type": "object"}, "M_2": {"additionalProperties": false, "properties": {"a": {"title": "A", "type": "integer"}, "kind": {"const": "y", "title": "Kind", "type": "string"}}, "required": ["a", "kind"], "title": "M", "type": "object"}}, "additionalProperties": true, "properties": {"a": {"discriminator": {"mapping": {"x": "#/$defs/M_1", "y": "#/$defs/M_2"}, "propertyName": "kind"}, "oneOf": [{"$ref": "#/$defs/M_1"}, {"$ref": "#/$defs/M_2"}], "title": "A"}, "b": {"default": null, "discriminator": {"mapping": {"x": "#/$defs/M_1", "y": "#/$defs/M_2"}, "propertyName": "kind"}, "oneOf": [{"$ref": "#/$defs/M_1"}, {"$ref": "#/$defs/M_2"}], "title": "B"}}, "required": ["a"], "title": "M", "type": "object"}
{"properties": {"a": {"items": {"format": "uuid", "type": "string"}, "title": "A", "type": "array"}, "b": {"default": null, "items": {"format": "uuid", "type": "string"}, "title": "B", "type": "array"}}, "required": ["a"], "title": "M", "type": "object"}
{"additionalProperties": false, "properties": {"a": {"anyOf": [{"format": "date-time", "type": "string"}, {"type": "null"}], "title": "A"}, "b": {"anyOf": [{"format": "date-time", "type": "string"}, {"type": "null"}], "default": null, "title": "B"}}, "required": ["a"], "title": "M", "type": "object"}
{"additionalProperties": true, "properties": {"a": {"additionalProperties": {"type": "boolean"}, "title": "A", "type": "object"}, "b": {"additionalProperties": {"type": "boolean"}, "default": null, "title": "B", "type": "object"}}, "required": ["a"], "title": "M", "type": "object"}
{"properties": {"a": {"maxItems": 2, "minItems": 2, "prefixItems": [{"type": "integer"}, {"type": "null"}], "title": "A", "type": "array"}, "b": {"default": null, "maxItems": 2, "minItems": 2, "prefixItems": [{"type": "integer"}, {"type": "null"}], "title": "B", "type": "array"}}, "required": ["a"], "title": "M", "type": "object"}
{"additionalProperties": false, "properties": {"a": {"additionalProperties": {"type": "number"}, "propertyNames": {"enum": ["k", "l"]}, "title": "A", "type": "object"}, "b": {"additionalProperties": {"type": "number"}, "default": null, "propertyNames": {"enum": ["k", "l"]}, "title": "B", "type": "object"}}, "required": ["a"], "title": "M", "type": "object"}
{"$defs": {"M": {"additionalProperties": false, "properties": {"a": {"title": "A", "type": "boolean"}, "b": {"default": null, "items": {"type": "integer"}, "title": "B", "type": "array"}}, "required": ["a"], "title": "M", "type": "object"}}, "additionalProperties": true, "properties": {"a": {"$ref": "#/$defs/M"}, "b": {"$ref": "#/$defs/M", "default": null}}, "required": ["a"], "title": "M", "type": "object"}
{"properties": {"a": {"format": "date", "title": "A", "type": "string"}, "b": {"default": null, "format": "date", "title": "B", "type": "string"}}, "required": ["a"], "title": "M", "type": "object"}
{"properties": {"a": {"title": "A"}, "b": {"default": null, "title": "B"}}, "required": ["a"], "title": "M", "type": "object", "additionalProperties": false}
"""


@pytest.mark.parametrize("schema", json_lines(KEPT + OF_PYDANTIC), ids=str)
def test_more_that_is_kept(schema):
    rng, ends = random.Random(0), 0
    for _ in range(8):
        text = walk(schema, rng, disable_any_whitespace=True)
        ends += text is not None and valid(text, schema)
    assert ends >= 4


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


def test_n_seeds_logprobs_and_stop():
    def asked(regex, **more):
        how = dict(max_tokens=20, temperature=0) | more
        return llm().generate("pick", SamplingParams(**how, structured_outputs=dict(regex=regex)))[
            0
        ]

    out = asked("[ab]{4,8}", n=4, seed=3, temperature=1, logprobs=2)
    assert len({c.text for c in out.outputs}) > 1
    for c in out.outputs:  # log probabilities are of the model itself, before any mask
        assert re.fullmatch("[ab]{4,8}", c.text) and c.finish_reason == "stop"
        assert all(i in d and len(d) >= 2 for i, d in zip(c.token_ids, c.logprobs))
    again = asked("[ab]{4,8}", seed=5, temperature=1).outputs[0]
    assert again.token_ids == out.outputs[2].token_ids
    cut = asked("a{9}", max_tokens=3).outputs[0]
    assert (cut.text, cut.finish_reason) == ("aaa", "length")
    stopped = asked("aaaab{3}", stop="aab").outputs[0]
    assert (stopped.text, stopped.stop_reason) == ("aa", "aab")
    assert "structured_outputs" in asked("a", min_tokens=5).error


def test_verify_knows_the_grammar():
    outs = llm().generate(PROMPTS, mixed_params())
    report = llm().verify(outs)
    assert report.ok and report.tokens > 20
    changed = outs[FORMS.index(dict(regex="[a-z]{3,9}"))]
    changed.outputs[0].token_ids[1] = tokens_of("7")[0]
    assert not llm().verify([changed]).ok


def test_a_grammar_is_a_function_of_the_tokens():
    make = lambda: grammars().of(wish(regex="(ab|ac)*d"))
    g, x = make(), lambda: logits().repeat(2, 1)[:1]
    for text in ("", "a", "ab", "abac", "ab", "aca", "a", "abacd", "", "acabab", "x", "ab"):
        tokens = tokens_of(text)
        assert torch.equal(g.mask_(x(), tokens), make().mask_(x(), tokens)), text
    wide = g.mask_(logits(40), tokens_of("a"))  # logits beyond the vocabulary are no tokens
    assert wide[0].isfinite().nonzero()[:, 0].tolist() == sorted(tokens_of("bc"))
    assert g.mask_(x(), tokens_of("d") + [*llm().loaded.eos_ids]).isfinite().sum() == 0


SENSELESS = r"""
[{}, "structured_outputs"]
[{"regex": "a", "choice": ["b"]}, "structured_outputs"]
[{"regex": 5}, "structured_outputs"]
[{"choice": []}, "structured_outputs"]
[{"choice": [1]}, "structured_outputs"]
[{"json": 5}, "structured_outputs"]
[{"xml": "a"}, "structured_outputs"]
["json", "structured_outputs"]
[{"json_object": "yes"}, "structured_outputs"]
[{"jsn": {}}, "'jsn'.*did you mean 'json'"]
"""


@pytest.mark.parametrize("bad, words", json_lines(SENSELESS), ids=str)
def test_wishes_that_make_no_sense(bad, words):
    with pytest.raises(ParamError, match=words):
        SamplingParams(structured_outputs=bad)


def test_other_ways_to_wish():
    with pytest.raises(ParamError, match="ignore_eos"):
        SamplingParams(structured_outputs=dict(regex="a"), ignore_eos=True)
    with pytest.raises(TypeError, match="'jsn'. Did you mean 'json'"):
        StructuredOutputsParams(jsn={})
    params = SamplingParams.of(dict(structured_outputs=dict(regex="a")))
    assert params.structured_outputs == StructuredOutputsParams(regex="a")
    [pydantic] = needs("pydantic")

    class Pet(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=5)
        legs: int = pydantic.Field(ge=0, le=9)

    assert 0 <= Pet.model_validate_json(one(json=Pet).outputs[0].text).legs <= 9


def test_without_library_or_tokenizer(monkeypatch):
    bare, held = LLM(copy.deepcopy(model()), None, compile=False), wish(regex="a")
    with pytest.raises(ModelError, match="needs a tokenizer"):
        bare.generate([[5, 6], [7]], held)
    outs = bare.generate([[5, 6], [7]], [held, SamplingParams(max_tokens=1, detokenize=False)])
    assert "needs a tokenizer" in outs[0].error and outs[1].error is None  # those that can run do
    for name in ("llguidance", "llguidance.hf"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModelError, match=r"pip install 'batchlab\[structured\]'"):
        engine().generate(["a", "b"], held)


POINTS = [  # between quotes, in a set and in a comment a point is a point
    ('root ::= "a" . "b"', ["axb", "a\nb", "aéb", "a😀b", 'a"b', "a.b"], ["ab", "axxb", "ax"]),
    (r'root ::= "." | [.] | "\"." | [\].]   # any .', ["."], ["x", "\n"]),
    ('root ::= "a" .* "b"', ["a\n\n x\nb"], ["a"]),
    ('root ::= ( "x" | . )+', ["x\n"], [""]),
    (r'root ::= "\"." | [\].]', ['".', "]"], ["x"]),
    ("root ::= [.]", ["."], ["x"]),
]


@pytest.mark.parametrize("grammar, good, bad", POINTS)
def test_any_character_of_a_gbnf_grammar_may_be_a_line_break(grammar, good, bad):
    fits = [takes(text, grammar=grammar) for text in good + bad]
    assert fits == [True] * len(good) + [False] * len(bad)


def test_the_other_family_of_tokenizers():
    "Pieces with a space as `▁`, and bytes as a way out."
    from test_text import sentencepiece

    e = over(sentencepiece(), 2)
    how = lambda i: dict(max_tokens=900, disable_any_whitespace=i % 2 == 0)
    asked = [wish(seed=i, json=PERSON, **how(i)) for i in range(6)]
    outs = e.generate(["abc", "a", "12 ab"] * 2, asked)
    assert {o.outputs[0].finish_reason for o in outs} == {"stop"}
    assert all(valid(text, PERSON) for text in texts(outs))
    assert not re.search(f"[ \\n]{{{WHITESPACE + 1}}}", "".join(texts(outs)))
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

BARE = ["positive", "negative", "neutral", "mixed"]
WORDS = [
    *BARE,
    *(f" {word}" for word in BARE),
    "label",
    '{"',
    '":"',
    '"}',
    " re",
    "ab",
    "abc",
    "ba",
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


LABEL = '{"label":"'
labelled = lambda d: dict(type="object", required=["label"], properties=dict(label=d))
named = dict(type="object", properties={w: dict(type="null") for w in BARE})
FORMS_OF_VALUES = dict(  # what stands before one of `BARE`, and the form
    choice=("", dict(choice=BARE)),
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
def test_a_value_is_the_likeliest(before, form):
    "As `choose` finds it behind what stands before it. By a grammar of characters alone a choice is that of 25 of these 60."
    outs = cutting().generate(ASKED, greedily(**form))
    n = len(cut(before))
    assert [i[:n] for i in ids(outs)] == [cut(before)] * len(ASKED)
    asked = [cutting().tokenizer(p)["input_ids"] + cut(before) for p in ASKED]
    best = [c.best for c in cutting().choose(asked, [cut(w) for w in BARE])]
    assert [(i[n],) for i in ids(outs)] == best and len({*best}) > 1


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


def over(tok, eos):
    "An `LLM` of tokenizer `tok`, whose model has logits beyond its tokens."
    size = len(tok) + 21
    model = tiny_model("llama", num_hidden_layers=1, vocab_size=size, eos_token_id=eos)
    model.generation_config.eos_token_id = eos
    return LLM(model, tok, compile=False)


@pytest.mark.parametrize("keeps", [True, False])
def test_a_choice_that_the_tokenizer_would_change(keeps):
    "A character that it takes for a space is written by its bytes."
    from test_text import sentencepiece

    labels, e = ["▁", " the", "the", "<s>", "<0x41>", "é\n"], over(sentencepiece(keeps), 2)
    for label in labels:
        [out] = e.generate("the", greedily(choice=[label]))
        assert out.error is None and out.outputs[0].text == label
    asked = [wish(seed=i, choice=labels) for i in range(12)]
    assert {*texts(e.generate(["the", "a", "12 ab"] * 4, asked))} <= {*labels}


def test_a_choice_that_the_tokenizer_lacks():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    few = Tokenizer(models.BPE(vocab={"<eos>": 0, "a": 1}, merges=[]))
    few.decoder = decoders.ByteLevel()
    few.add_special_tokens(["<eos>"])
    e = over(PreTrainedTokenizerFast(tokenizer_object=few, eos_token="<eos>"), 0)
    outs = e.generate(["a", "a"], [greedily(choice=["a"]), greedily(choice=["aa", "ab"])])
    assert texts(outs)[0] == "a" and "'ab', which this tokenizer can't write" in outs[1].error


def chat_line(i, form):
    talk = [dict(role="user", content="who? " * (1 + i % 4))]
    body = dict(model="m", messages=talk, max_tokens=500, seed=i, response_format=form)
    return dict(custom_id=f"r{i}", method="POST", url="/v1/chat/completions", body=body)


def test_a_batch_file_with_response_formats(tmp_path):
    schema, never, bad = (
        dict(type="json_schema", json_schema=dict(name="s", strict=True, schema=s))
        for s in (PERSON, NEVER, dict(type="thing"))
    )
    wanted = [schema, dict(type="json_object"), dict(type="text"), never, schema, bad] * 3
    of, to = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    of.write_text("\n".join(json.dumps(chat_line(i, f)) for i, f in enumerate(wanted)))
    Job(of, to, any_model=True, ordered=True).run(llm())
    for asked, got in zip(wanted, json_lines(to.read_text()), strict=True):
        status, body = got["response"]["status_code"], got["response"]["body"]
        if asked in (bad, never):
            words, code = ("thing", 400) if asked == bad else ("non-unique", 500)
            assert status == code and words in got["error"]["message"]
            continue
        [choice] = body["choices"]
        if asked == schema:
            assert valid(choice["message"]["content"], PERSON)
        elif asked == wanted[1] and choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)


# --- what generators of schemas write


def takes(text, **form):
    "Whether an answer of `text` fits."
    g, tokens = grammars().of(wish(**form)), grammars().vocabulary.tokenize_str(text)
    return g.follow(tokens) and may_end(g, tokens)


def nested(n, wrap):
    "`wrap` of `wrap`, `n` times, of a schema that takes a string."
    schema = dict(type="string")
    for _ in range(n):
        schema = wrap(schema)
    return schema


def wide(n):
    return dict(type="object", properties={f"c{i}": {} for i in range(n)})


REF = "#/$defs/x"
CHAIN = {f"x{i}": dict(properties=dict(a={"$ref": f"{REF}{i + 1}"})) for i in range(5000)}
TOO_LARGE = (
    dict(enum=[f"value {i}" for i in range(200_000)]),
    nested(15, lambda s: dict(anyOf=[s, s])),
)
TOO_MUCH = [
    (dict(json=nested(3000, lambda s: dict(type="array", items=s))), "structured_outputs"),
    (dict(json='{"type":"array","items":' * 9000 + "{}" + "}" * 9000), "structured_outputs"),
    (dict(json=dict(enum=["x" * 2**18])), "structured_outputs"),
    (dict(json={"$defs": CHAIN | dict(x5000={}), "$ref": f"{REF}0"}), "levels"),
    (dict(json=wide(5000)), "over 4,000 properties"),
    *((dict(json=schema), "over 524,288 characters") for schema in TOO_LARGE),
    *((dict(json=json.dumps(schema)), "over 524,288 characters") for schema in TOO_LARGE),
    *(
        (dict(regex=text), "structured_outputs")
        for text in ("(" * 9000 + "a" + ")" * 9000, "a" * 2**18)
    ),
    *(
        (dict(grammar=f"root ::= {text}"), "grammar")
        for text in ("[" * 2**16, '"' + '\\"' * 2**15, '"a" [b' * 2**13)
    ),
]
WRONG_WITHIN = r"""
[{"json": {"type": "object", "properties": {"a": {"type": "array", "items": {"unevaluatedProperties": false}}}}}, "unevaluatedProperties at #/properties/a/items"]
[{"json": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "bool"}}}}}, "json at #/properties/a/items can not be compiled: Invalid type: bool"]
[{"json": {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string", "pattern": "(a"}}}}}, "json at #/properties/a/items can not be compiled: regex parse error"]
[{"json": {"type": "object", "properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/x"}}}}}, "json at #/properties/a/items can not be compiled: Pointer '/$defs/x' does not"]
[{"json": {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "string", "maxLength": -1}}}}, "at #/$defs/x can not"]
[{"grammar": "root ::= foo\nfoo ::= \"a\"\nfoo ::= \"b\""}, "'foo'"]
"""


@pytest.mark.parametrize("form, words", [*TOO_MUCH, *json_lines(WRONG_WITHIN)])
def test_what_is_not_taken_is_refused_at_once_and_says_where(form, words, monkeypatch):
    """In time that grows with its length, not with its square: else some would run for minutes. What is too large is known before its
    parts are read."""
    if "characters" in words:
        monkeypatch.setattr(structured, "check_schema", None)
    with pytest.raises(ParamError) as e:
        grammars().of(wish(**form))
    assert words in str(e.value) and "\n" not in str(e.value)


LABELS = [f"label {i} / of {i % 97}" for i in range(20_000)]
CHEAP = dict(
    long=dict(json=dict(type="string", maxLength=10**6)),
    repeated=dict(regex="(x{0,1000}){0,1000}"),
    choice=dict(choice=LABELS),
    enum=dict(json=dict(enum=LABELS)),
    gbnf=dict(grammar="root ::= " + " | ".join(f'"c{i}"' for i in range(3000))),
    properties=dict(json=wide(2500)),
)


def test_levels_up_to_the_limit_are_taken_and_checked():
    n = structured.DEEPEST - 1
    assert n == 99
    schema = nested(n, lambda s: dict(type="array", items=s))
    grammars().of(wish(json=schema))
    assert structured.Validity(schema)("[" * n + "]" * n) == ""


@pytest.mark.parametrize("form", CHEAP.values(), ids=CHEAP)
def test_what_looks_large_and_is_cheap_is_taken(form):
    out = one(max_tokens=60, **form)
    assert out.error is None
    if "choice" in form:
        assert out.outputs[0].text in LABELS and out.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "text", [r'root ::= "\u00e9" [\u0041-\u0043]', r"root ::= [a\-z]+", r'root ::= "\\u0041"']
)
def test_escapes_as_llama_cpp_writes_them(text):
    assert grammars().of(wish(grammar=text))


SPELLED = r"""
[{"json": {"const": "a <eos> b"}}, "\"a <eos> b\""]
[{"json": {"type": "object", "properties": {"tag": {"enum": ["<eos>"]}}, "required": ["tag"]}}, "{\"tag\":\"<eos>\"}"]
[{"json": {"type": "object", "properties": {"<pad>": {"type": "null"}}, "required": ["<pad>"]}}, "{\"<pad>\":null}"]
[{"choice": ["<eos>x"]}, "<eos>x"]
[{"regex": "tag: <bos>[a-z]"}, "tag: <bos>."]
[{"grammar": "root ::= \"<\" \"eos>\" \"!\""}, "<eos>!"]
[{"grammar": "%llguidance {}\nstart: \"<bos>\" /<pad>/"}, "<bos><pad>"]
[{"json": {"type": "string", "pattern": "^<eos>$"}}, "\"<eos>\""]
[{"regex": ""}, ""]
"""


@pytest.mark.parametrize("form, want", json_lines(SPELLED), ids=str)
def test_a_form_is_answered_by_a_text_of_it_and_what_spells_a_control_token_is_one(form, want):
    out = one(max_tokens=60, **form)
    assert out.error is None and out.outputs[0].finish_reason == "stop"
    assert re.fullmatch(want, out.outputs[0].text)


def test_a_grammar_of_ones_own_names_control_tokens():
    g = grammars().of(wish(grammar='%llguidance {}\nstart: "a<bos>" <bos> "b"'))
    spelled = grammars().vocabulary.tokenize_str
    assert g.follow([*spelled("a<bos>"), tiny_tokenizer().bos_token_id, *spelled("b")])


def narrow():
    "A grammar that has too many alternatives for its parser behind an `a`."
    from llguidance import LLMatcher, LLParserLimits

    rows = 'start: "a" ("b"' + "".join(f' | "c{i}"' for i in range(200)) + ")"
    limits, vocabulary = LLParserLimits(max_items_in_row=100), grammars().vocabulary
    matcher = LLMatcher(vocabulary, rows, log_level=0, limits=limits)
    return structured.Grammar(vocabulary, matcher, llm().loaded.eos_ids)


def test_a_grammar_that_can_not_go_on_says_why():
    "Too many alternatives: said when it is compiled; later, by the row."
    g, a = narrow(), tokens_of("a")
    assert g.mask_(logits(), []).isfinite().any() and not g.mask_(logits(), a).isfinite().any()
    greedy = SamplingParams(temperature=0)
    row = SamplingRow(greedy, [5], frozenset(), None, output_ids=a, grammar=g)
    said = sample(logits(), [row]).errors[0]
    assert "can not go on after 1 tokens" in said and "max is 100" in said


def test_looking_ahead_leaves_the_grammar_as_it_is():
    "Where a draft leads to what is too wide, the tokens before it are still allowed."
    plain, g = narrow(), narrow()
    for draft in map(tokens_of, ("ab", "ac1", "zz")):
        g.forced([]), g.fitting([], draft)
        assert not g.matcher.is_error()
        assert torch.equal(g.mask_(logits(), []), plain.mask_(logits(), []))


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


# A schema, values that fit, values that do not. A list of values that has an integer which no double is, is never answered by its
# neighbour; such a bound goes to the double inside.
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
[{"type": "object", "patternProperties": {"^a": {"type": "null"}}, "additionalProperties": {"type": "boolean"}}, [{"a": null, "b": true}], [{"a": true}, {"b": null}]]
[{"type": "object", "additionalProperties": {"type": "null"}, "propertyNames": {"maxLength": 2}}, [{"ab": null}], [{"abc": null}]]
[{"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}}, [{"b": 1}], [{"a": 1}]]
[{"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, [0.25], [0, 0.5]]
[{"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, [-1.25, -1.5], [-1]]
[{"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]}, [0.5], [0]]
[{"type": "number", "minimum": 3, "exclusiveMinimum": true}, [4], [3]]
[{"const": 9007199254740993}, [], [9007199254740992, 9007199254740993]]
[{"const": 9007199254740992}, [9007199254740992], [9007199254740993]]
[{"const": -1152921504606846976}, [-1152921504606846976], [-1152921504606846975]]
[{"const": 10000000000000000000000}, [10000000000000000000000], [10000000000000000000001]]
[{"type": "integer", "minimum": -9223372036854775808, "maximum": 9223372036854775807}, [4611686018427387904, -5], [9223372036854775808, -9223372036854775809]]
[{"type": "number", "minimum": -9223372036854775808, "maximum": 9223372036854775807}, [4611686018427387904, -5], [9223372036854775808, -9223372036854775809]]
[{"type": "integer", "maximum": 9007199254740993}, [9007199254740992], [9007199254740994]]
[{"type": "number", "maximum": 9007199254740993}, [9007199254740992], [9007199254740994]]
[{"type": "integer", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, [12], []]
[{"type": "number", "minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308}, [12], []]
[{"type": "integer", "minimum": 3, "exclusiveMinimum": true}, [4], [3]]
[{"type": "integer", "minimum": 3, "exclusiveMinimum": false}, [3], []]
[{"type": "number", "minimum": 3, "exclusiveMinimum": false}, [3], []]
[{"type": "string", "format": "time"}, ["23:59:59Z"], ["23:59:60Z"]]
"""


@pytest.mark.parametrize("schema, good, bad", json_lines(GENERATED), ids=str)
def test_what_generators_write(schema, good, bad):
    as_text = lambda v: json.dumps(v, ensure_ascii=False, separators=(",", ":"))
    assert [v for v in good if not takes(as_text(v), json=schema)] == []
    assert [v for v in bad if takes(as_text(v), json=schema)] == []


LISTED = r"""
{"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "boolean"}}
{"allOf": [{"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": true}, {"type": "object", "properties": {"c": {}}}]}
"""


@pytest.mark.parametrize("schema", json_lines(LISTED), ids=str)
def test_a_listed_name_is_not_written_with_escapes(schema):
    assert takes('{"a":null}', json=schema)
    for text in (r'{"\u0061":true}', r'{"a":null,"\u0061":true}'):
        assert not takes(text, json=schema)


def test_answers_cut_in_a_form_are_said_once(caplog):
    params = [wish(json=PERSON, max_tokens=4), SamplingParams(max_tokens=2), wish(choice=["y"])]
    outs = llm().generate(["a", "b", "c"], params)
    assert [o.outputs[0].finish_reason for o in outs] == ["length", "length", "stop"]
    [said] = [r.getMessage() for r in caplog.records if "cut off by max_tokens" in r.getMessage()]
    assert "1 of 2 answers held to a form" in said and "outputs[0]" in said


RESPONSE_FORMATS = r"""
[{"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 1}, "strict": true}}, {"json": {"const": 1}}]
[{"type": "json_schema", "schema": {"const": 1}, "name": "n"}, {"json": {"const": 1}}]
[{"type": "json_object", "schema": {"required": ["a"]}}, {"json": {"type": "object", "required": ["a"]}}]
[{"type": "json_object", "json_schema": {"schema": {"required": ["a"]}}}, {"json": {"type": "object", "required": ["a"]}}]
[{"type": "json_object"}, {"json_object": true}]
[{"type": "text"}, null]
[{"type": "text", "schema": {}}, "type text has a schema"]
[{"type": "json_object", "shema": {}}, "no 'shema'"]
[{"type": "json_schema"}, "needs the schema"]
[{"type": "json_object", "schema": 5}, "needs the schema"]
[{"type": "json_schema", "schema": {}, "json_schema": {"schema": {}}}, "needs the schema"]
[{"type": "json_schema", "json_schema": 5}, "must be an object"]
"""


@pytest.mark.parametrize("form, want", json_lines(RESPONSE_FORMATS), ids=str)
def test_forms_of_response_format(form, want):
    from batchlab.jobs.settings import structured_of

    if isinstance(want, str):
        with pytest.raises(ParamError, match=want):
            structured_of(form)
    else:
        assert structured_of(form) == want


def test_a_form_from_a_file(tmp_path):
    from batchlab.cli.flags import json_argument

    file = tmp_path / "form.json"
    for text, read in (json.dumps(dict(json=PERSON)), dict(json=PERSON)), ("{", "not JSON"):
        file.write_text(text, encoding="utf-8")
        for argument in (text, f"@{file}"):
            if text != "{":
                assert json_argument(argument) == read
            else:
                with pytest.raises(Exception, match=read):
                    json_argument(argument)
    with pytest.raises(Exception, match="can not be read"):
        json_argument(f"@{tmp_path / 'none.json'}")
