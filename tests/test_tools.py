"Functions that a model calls: what a request may say of them, calls held to their schemas by any writer, and read from the answer however it is cut."

import copy, csv, functools, json, random, re, subprocess, sys

import jsonschema, pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tokenizers import AddedToken

from batchlab.api import LLM
from batchlab.core.params import SamplingParams
from batchlab.core.text import Detokenizer
from batchlab.jobs.job import Job
from batchlab.jobs.lines import parse_line
from batchlab.jobs.responses import ResponseParts
from batchlab.jobs.schema import as_messages, error_body, usage_of
from batchlab.jobs.settings import BadRequest
from batchlab.jobs.tools import (
    FORMATS,
    ToolParser,
    check_tools,
    conversation_with,
    format_of,
    messages_for,
    parse_answer,
    take_tools,
    tool_grammar,
    tool_params,
)
from batchlab.llm.outputs import CompletionOutput
from batchlab.models import encode_chat, tiny_model, tiny_tokenizer
from helpers import assistant, grow, junk, needs, one_thread, user, write_lines

pytestmark = one_thread
[llguidance] = needs("llguidance")

CITY = dict(
    type="object",
    required=["city", "days"],
    properties=dict(
        city=dict(type="string", maxLength=6),
        days=dict(type="integer", minimum=1, maximum=9),
        unit=dict(enum=["C", "F"]),
    ),
)


def function(name, parameters=None, **kw):
    own = {} if parameters is None else dict(parameters=parameters)
    return dict(type="function", function=dict(name=name, **own, **kw))


def allowed(mode, *names):
    tools = [function(name) for name in names]
    return dict(type="allowed_tools", allowed_tools=dict(mode=mode, tools=tools))


TOOLS = [function("weather", CITY, description="The weather."), function("now")]

# Templates in the manner of the families: the tools, the messages, and calls as the family writes them.
TALK = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% if m.tool_calls %}CALLS"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def template(call, first="", between="", last="", say="", args="tojson"):
    "A template that says `say` of the tools it is given, and writes calls as `call`, with N, A and I in it."
    parts = dict(N="c.function.name", A=f"c.function.arguments | {args}", I="c.id")
    text = re.sub("«([NAI])»", lambda m: "{{ " + parts[m[1]] + " }}", call)
    calls = (
        f"{{% for c in m.tool_calls %}}{{{{ {between!r} if not loop.first }}}}{text}{{% endfor %}}"
    )
    tools = f"{{% if tools %}}{{{{ {say!r} }}}}{{{{ tools | tojson }}}}{{% endif %}}"
    return tools + TALK.replace("CALLS", f"{{{{ {first!r} }}}}{calls}{{{{ {last!r} }}}}")


OBJECT = '{"name": "«N»", "arguments": «A»}'
TEMPLATES = dict(
    hermes=template(f"<tool_call>\n{OBJECT}\n</tool_call>\n", say="<tool_call>…</tool_call>"),
    llama=template('{"name": "«N»", "parameters": «A»}', say="Respond with name and parameters. "),
    mistral=template(OBJECT[:-1] + ', "id": "«I»"}', "[TOOL_CALLS] [", ", ", "]"),
    mistral_args=template("[TOOL_CALLS]«N»[ARGS]«A»"),
    mistral_ids=template("[TOOL_CALLS]«N»[CALL_ID]«I»[ARGS]«A»"),
    as_text=template(
        f"<tool_call>\n{OBJECT}\n</tool_call>\n", say="<tool_call>…</tool_call>", args="string"
    ),  # which takes arguments as a string
)
LAYOUT = dict(as_text="hermes")  # of a template of another name
MARKERS = """<tool_call> </tool_call> <think> </think> [TOOL_CALLS] [ARGS] [CALL_ID] <|python_tag|> <|other|>""".split()


@functools.cache
def tokenizer(special=False):
    "With the markers as tokens of their own, special ones but those that are written like tags."
    tok = tiny_tokenizer()
    if special:
        tags = {m: bool(re.fullmatch("</?\\w+>", m)) for m in MARKERS}
        tok.add_tokens([AddedToken(m, special=not t, normalized=False) for m, t in tags.items()])
    return tok


def found(text, tok=None):
    return format_of(tok or tokenizer(), text)


@functools.cache
def fmt_of(name, special=False):
    return found(TEMPLATES[name], tokenizer(special))


each_format = pytest.mark.parametrize("name", TEMPLATES)
both = pytest.mark.parametrize("special", [False, True])


def written(f, *calls):
    "`calls`, each `(name, arguments)`, as a model of format `f` writes them."
    head, middle, tail = f.parts
    each = (head + name + middle + json.dumps(a) + tail for name, a in calls)
    return (f.first + f.between.join(each) + f.last).replace("§", "call00000")


def calls_of(*named):
    return [
        dict(id=f"call_{i}", type="function", function=dict(name=n, arguments=json.dumps(a)))
        for i, (n, a) in enumerate(named)
    ]


def plain(calls):
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


AUTO, MUST, NONE = [check_tools(TOOLS, choice) for choice in (None, "required", "none")]
HERMES = fmt_of("hermes")


# --- what a request says


@pytest.mark.parametrize(
    "choice, mode, names, parallel",
    [
        (None, "auto", "weather now", True),
        ("auto", "auto", "weather now", True),
        ("none", "none", "", True),
        ("required", "required", "weather now", True),
        (function("now"), "required", "now", False),
        (allowed("auto", "now"), "auto", "now", True),
        (allowed("required", "now", "now", "weather"), "required", "weather now", True),
    ],
)
def test_choices(choice, mode, names, parallel):
    got = check_tools(TOOLS, choice)
    assert (got.mode, " ".join(got.schemas), got.parallel) == (mode, names, parallel)
    assert not check_tools(TOOLS, choice, False).parallel
    assert check_tools(TOOLS, choice, True).parallel == parallel
    assert [t["function"]["name"] for t in got.tools] == ["weather", "now"]
    assert got.tools[1]["function"]["parameters"] == dict(type="object", properties={})
    assert check_tools(TOOLS, choice) is got, "the same request is looked at once"


@pytest.mark.parametrize("none", [None, []])
@pytest.mark.parametrize("rest", [(), ("auto", True), ("none",)])
def test_no_tools(none, rest):
    assert check_tools(none, *rest) is None


def with_schema(**own):
    return [function("f", dict(properties=dict(a=own)))]


BAD_TOOLS = [
    ("x", "tools "),
    ({}, "tools "),
    ([function("f")] * 129, "at most 128"),
    ([5], "tools[0] "),
    ([dict(type="custom")], "tools[0].type"),
    ([dict(type="function")], "tools[0].function "),
    ([function("f"), function("")], "tools[1].function.name"),
    *(([function(name)], "function.name") for name in ("a b", "x" * 129, "f\n", 5)),
    ([function("f")] * 2, "'f'"),
    ([function("f", description=5)], "function.description"),
    ([function("f", strict="yes")], "function.strict"),
    ([function("f", [])], "function.parameters"),
    ([function("f", dict(type="string"))], "parameters.type"),
    ([function("f", dict(properties=5))], "function.parameters.properties"),
    ([function("f", dict(required=5))], "function.parameters.required"),
    ([function("f", dict(x=float("nan")))], "NaN"),
    ([function("f", {"properties": {"a": {"$ref": "#x"}}}, strict=True)], "strict"),
]
BAD_CHOICES = [
    ("any", "'required'"),
    ("a\nb", "tool_choice"),
    (5, "tool_choice"),
    (dict(type="function"), "tool_choice.function "),
    (function("g"), "'g'"),
    (dict(type="allowed_tools"), "tool_choice.allowed_tools "),
    (allowed("none", "now"), "allowed_tools.mode"),
    (allowed("auto"), "allowed_tools.tools"),
    (allowed("auto", "g"), "'g'"),
]


@pytest.mark.parametrize(
    "given, words",
    [
        *((dict(tools=tools), words) for tools, words in BAD_TOOLS),
        *((dict(tools=TOOLS, tool_choice=choice), words) for choice, words in BAD_CHOICES),
        (dict(tool_choice="required"), "needs tools"),
        (dict(tool_choice="required", tools=with_schema(type="thing")), "parameters"),
        (
            dict(tool_choice=function("f"), tools=with_schema(unevaluatedItems=False)),
            "unevaluatedItems",
        ),
        (dict(tools=TOOLS, parallel_tool_calls="yes"), "parallel_tool_calls"),
    ],
)
def test_what_is_wrong_is_said_by_field(given, words):
    with pytest.raises(BadRequest) as e:
        take_tools(given)
    said, param = str(e.value), e.value.param
    assert words in said and "\n" not in said and len(said) < 400
    assert param in ("tools", "tool_choice", "parallel_tool_calls") and said.startswith(param)
    assert error_body(said, e.value.code, param)[1]["error"]["param"] == param


KEYS = "type function name parameters properties required mode tools allowed_tools x".split()
JUNK = junk("function", "auto", "f", "object", "allowed_tools", keys=KEYS, max_leaves=12)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(JUNK, JUNK, JUNK)
def test_junk_is_refused_in_one_line(a, b, c):
    for some in (a, [a], [function("f", a)]):
        try:
            check_tools(some, b, c)
        except BadRequest as e:
            assert "\n" not in str(e) and len(str(e)) < 500


@pytest.mark.parametrize("depth", [150, 450, 5000, 100_000])
def test_deep_schemas_are_refused_or_held(depth):
    deep = {"type": "null"}
    for _ in range(depth):
        deep = dict(type="array", items=deep)
    try:
        check_tools([function("f", dict(properties=dict(a=deep)))])
    except BadRequest as e:
        assert e.param == "tools"
    else:
        assert depth <= 5000  # Python 3.13 reads deeper than 3.11


def test_what_no_grammar_holds_is_held_to_names_and_types():
    properties = dict(
        a=dict(type="array", unevaluatedItems=False), b=dict(enum=[1]), c=dict(type="thing")
    )
    own = dict(type="object", properties=properties, required=["a"])
    choice = check_tools([function("f", own)])
    assert choice.schemas["f"]["properties"] == dict(a=dict(type="array"), b=dict(enum=[1]), c={})
    assert choice.schemas["f"]["required"] == ["a"] and not choice.strict
    assert choice.tools[0]["function"]["parameters"] == own, "the prompt has what the client wrote"
    assert check_tools([function("f", {"$ref": "#x"})]).schemas["f"] == dict(type="object")


# --- formats


@each_format
@both
def test_the_format_is_found_from_the_template(name, special):
    f = fmt_of(name, special)
    assert (f.name, f.route, f.writes_calls) == (LAYOUT.get(name, name), "tools", True)
    assert f.arguments_as_text == (name == "as_text")
    layout = "".join((f.prefix, f.first, f.call, f.between, f.last))
    assert {t for t, _ in f.special} == {m for m in MARKERS if special and m in layout}
    assert all(tokenizer(special).convert_tokens_to_ids(t) == i for t, i in f.special)
    if special:
        assert tokenizer(True).convert_tokens_to_ids("<think>") in f.visible


def test_every_format_has_a_template_here():
    assert {*FORMATS} == {LAYOUT.get(name, name) for name in TEMPLATES}
    assert all((f.first + f.parts[0]).startswith(f.trigger) for f in FORMATS.values())


TAGS = "<tool_call>\n<function=«N»>\n<parameter=where>\nprobed\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    "text",
    [
        TALK,
        '{# no word of them #}<tool_call></tool_call>"arguments"' + TALK,
        template("", say="call <weird>name</weird>"),
        template(TAGS, say="<tool_call>"),
        template(
            "<tool_call>«N»\n<arg_key>where</arg_key>\n<arg_value>probed</arg_value></tool_call>"
        ),
        template("<|channel|>commentary to=functions.«N» <|constrain|>json<|message|>«A»<|call|>"),
        template('<tool_call>\n{"call": "«N»", "arguments": «A»}\n</tool_call>', say="<tool_call>"),
        "{% if %}<tool_call></tool_call>arguments",
    ],
    ids="none unsaid untold tags keys channels names broken".split(),
)
def test_templates_whose_calls_are_not_known(text):
    assert found(text) is None


def test_models_without_tools():
    assert format_of(tiny_tokenizer()) is None and format_of(tiny_tokenizer(chat=False)) is None
    named = tiny_tokenizer()
    named.chat_template = dict(default=named.chat_template, tool_use=TEMPLATES["hermes"])
    assert format_of(named) == HERMES
    with pytest.raises(BadRequest, match="not supported") as e:
        tool_params(SamplingParams(), None, AUTO)
    assert e.value.param == "tools"
    assert parse_answer(None, AUTO, written(FORMATS["hermes"], ("now", {})))[1] == []


def test_the_layout_is_what_the_template_writes():
    hermes = TEMPLATES["hermes"]
    single = hermes.replace("m.tool_calls %}", "m.tool_calls and m.tool_calls | length < 2 %}", 1)
    assert HERMES.parallel and not found(single).parallel, "that drops the second call"
    thinks = hermes.replace("<|assistant|>{% endif", "<|assistant|><think>{% endif")
    assert found(thinks).name == "hermes", "a prompt that begins to think, where a call would begin"
    assert found(hermes.replace("m.content or ''", "m.content | trim")).name == "hermes"
    assert found(hermes.replace("tools", "xml_tools")).route == "xml_tools"


@pytest.mark.parametrize("name", ["hermes", "as_text"])
def test_templates_that_write_no_calls(name):
    "The calls of earlier messages become content there, in the layout that the prompt tells."
    text = TEMPLATES[name].replace("{% if m.tool_calls %}", "{% if false %}")
    f = found(text)
    assert (f.name, f.writes_calls, f.parallel) == ("hermes", False, True)
    got = messages_for(f, as_messages(CALLED))[1]["content"]
    assert plain(parse_answer(f, AUTO, got)[1]) == [("now", dict(a=1))]


CALLED = [
    user("?"),
    assistant(None, tool_calls=calls_of(("now", dict(a=1)))),
]
ARGUMENTS = dict(city='a"}{\\ é\n</x>', days=3, unit="C")


@each_format
@both
def test_what_a_template_writes_is_read_again(name, special):
    "A call of a message before, rendered by the template, is text that the parser reads as that call."
    f, tok, choice = fmt_of(name, special), tokenizer(special), AUTO
    named = [("weather", ARGUMENTS)] + [("now", {})] * f.parallel
    talk = [CALLED[0], dict(CALLED[1], tool_calls=calls_of(*named))]
    messages = conversation_with(f, None, dict(messages=as_messages(talk)))["messages"]
    ids = encode_chat(tok, messages, chat_template=TEMPLATES[name], add_generation_prompt=False)
    content, calls = parse_answer(f, choice, tok.decode(ids).partition("<|assistant|>")[2])
    assert content is None and plain(calls) == named
    assert {c["type"] for c in calls} == {"function"}
    ids = {c["id"] for c in calls if re.fullmatch("call_[0-9a-f]{24}", c["id"])}
    assert len(ids) == len(calls)


@each_format
def test_tools_reach_the_prompt(name):
    def prompt(choice):
        talk = dict(messages=[user("Hi")])
        given = conversation_with(fmt_of(name), check_tools(TOOLS, choice), talk)
        return tokenizer().decode(encode_chat(tokenizer(), **given, chat_template=TEMPLATES[name]))

    assert "weather" in prompt("auto") and "weather" not in prompt("none")


def test_ids_and_tools_as_templates_want_them():
    talk = as_messages([*CALLED, dict(role="tool", tool_call_id="call_0", content="5")])
    before = copy.deepcopy(talk)
    _, called, answer = messages_for(HERMES, talk)
    assert called["tool_calls"] == talk[1]["tool_calls"] and answer == talk[2]
    _, called, answer = cut = messages_for(fmt_of("mistral"), talk)
    assert called["tool_calls"][0]["id"] == answer["tool_call_id"]
    assert re.fullmatch("[0-9a-z]{9}", answer["tool_call_id"])
    assert messages_for(fmt_of("mistral"), cut) == cut
    _, called, _ = messages_for(fmt_of("as_text"), talk)
    assert called["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert talk == before, "what was given stays as it was"
    xml = found(TEMPLATES["hermes"].replace("tools", "xml_tools"))
    given = dict(messages=talk, chat_template_kwargs=dict(a=1))
    options = conversation_with(xml, AUTO, given)["chat_template_kwargs"]
    assert options["a"] == 1 and options["xml_tools"][0]["function"]["name"] == "weather"


# --- the grammar


@functools.cache
def vocabulary(special):
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer(special), n_vocab=len(tokenizer(special)), eos_token=[2])


def matcher(name, special, choice):
    grammar = llguidance.LLMatcher.grammar_from_lark(tool_grammar(fmt_of(name, special), choice))
    m = llguidance.LLMatcher(vocabulary(special), grammar, log_level=0)
    assert not m.is_error(), m.get_error()
    return m


def writer(name, special, choice, rng, begin="", most=600):
    "Text written by choosing at random among the tokens that the grammar allows, after `begin`; None if it came to no end."
    m, tok = matcher(name, special, choice), tokenizer(special)
    ids = tok(begin)["input_ids"]
    assert m.try_consume_tokens(ids) == len(ids), "the grammar takes a beginning that it should"
    out = {3 + b for b in b'"}]'}
    for _ in range(most):
        some = [i for i, ok in enumerate(m.compute_logit_bias()) if ok]
        assert some
        if 2 in some and (len(some) == 1 or rng.random() < 0.5):
            return tok.decode(ids)
        some = [i for i in some if i != 2]
        short = [i for i in some if i in out]
        step = rng.choice(short if short and rng.random() < 0.5 else some)
        assert m.try_consume_tokens([step]) == 1
        ids.append(step)


@each_format
@both
@pytest.mark.parametrize("mode", ["auto", "required", "named"])
def test_calls_are_held_to_their_schemas(name, special, mode):
    "Whatever writer, one that chooses at random among what the grammar allows: each call is to a function of the request, with arguments that fit."
    rng, f, ended, most = random.Random(f"{name}{special}{mode}"), fmt_of(name, special), 0, 0
    for k in range(6):
        choice = check_tools(TOOLS, function("weather") if mode == "named" else mode, k % 2 == 0)
        begin = "Well, " * (k % 3 == 1) + f.trigger if mode == "auto" and f.trigger else ""
        text = writer(name, special, choice, rng, begin)
        if text is None:
            continue
        content, calls = parse_answer(f, choice, text)
        for called, arguments in plain(calls):
            jsonschema.validate(arguments, choice.schemas[called])
        ended, most = ended + 1, max(most, len(calls))
        if mode != "auto":
            assert content is None and calls
        elif begin:
            assert calls and (content or "") == begin[: -len(f.trigger)]
        if mode == "named" or not choice.parallel or not f.parallel:
            assert len(calls) <= 1
    assert ended >= 4 and (most or not f.trigger)


def takes(name, choice, text, special=False):
    "Whether the grammar takes `text` as a whole answer."
    m, ids = matcher(name, special, choice), tokenizer(special)(text)["input_ids"]
    return m.try_consume_tokens(ids) == len(ids) and m.is_accepting()


@both
def test_what_the_grammar_takes(special):
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    wrong = (call.replace("now", "then"), call.replace("{}", '{"a": 1}'))
    pair, after = f"{call}\n{call}", f"Well.\n{call}"
    for name, choice, good, bad in (
        (
            "hermes",
            AUTO,
            ("", 'plain {"name": 1} text', call, after, pair),
            ("<tool_call>", call[:-1], call + " more", call + call, *wrong),
        ),
        ("hermes", check_tools(TOOLS, None, False), (call,), (pair,)),
        ("hermes", MUST, (pair,), ("", after)),
        (  # calls at the start only
            "llama",
            AUTO,
            ("", "plain", '{"x": 1}', '{"name": "now", "parameters": {}}'),
            ('{"name": "5"}', ' {"name": "now"}', *["<|python_tag|>x"] * (not special)),
        ),
    ):
        for text in (*good, *bad):
            assert takes(name, choice, text, special) == (text in good), text


def test_tokens_that_are_no_text():
    auto = AUTO
    call = written(FORMATS["hermes"], ("now", {}))
    assert takes("hermes", auto, "<think>hm</think>" + call, True), "a model may think first"
    spelled, m = [3 + b for b in b"<tool_call>"], matcher("hermes", True, auto)
    assert m.try_consume_tokens(spelled) == len(spelled) - 1, (
        "the trigger is one token, and can not be spelled in others"
    )


@each_format
@both
def test_names_that_begin_alike(name, special):
    tools = [function("get", CITY), function("get_all"), function("get-it")]
    choice = check_tools(tools, "required")
    text = writer(name, special, choice, random.Random(3))
    assert text and parse_answer(fmt_of(name, special), choice, text)[1]


def test_what_goes_with_tools():
    p = tool_params(SamplingParams(seed=3, max_tokens=9), HERMES, AUTO)
    assert (p.seed, p.max_tokens, p.skip_special_tokens) == (3, 9, False)
    assert p.structured_outputs.grammar == tool_grammar(HERMES, AUTO)
    held = SamplingParams(structured_outputs=dict(json_object=True))
    assert tool_params(held, None, NONE) is held and tool_grammar(HERMES, NONE) is None
    with pytest.raises(BadRequest, match="response_format"):
        tool_params(held, HERMES, AUTO)
    stops = SamplingParams(stop=["x", "<"], include_stop_str_in_output=True)
    p = tool_params(stops, HERMES, AUTO)
    assert (p.stop, p.stop_until) == (["x", "<"], ["<tool_call>"])
    assert not p.include_stop_str_in_output
    assert not tool_params(stops, HERMES, MUST).stop, "such an answer has no content"
    until = tool_params(stops, fmt_of("llama"), AUTO).stop_until
    assert until == [f'{{"name": "{name}", "parameters": ' for name in ("weather", "now")]


@pytest.mark.parametrize("name,special", [("hermes", False), ("hermes", True), ("llama", False)])
def test_a_stop_string_ends_content_and_no_call(name, special):
    "Whatever is cut off by a stop string is content; a call with the same letters in it is whole."
    f, tok, choice = fmt_of(name, special), tokenizer(special), AUTO
    p = tool_params(SamplingParams(stop=["a", '"', "<"], max_tokens=None), f, choice)

    def text(answer):
        d = Detokenizer(tok, p)
        for i in tok(answer)["input_ids"]:
            d.add(i)
            if d.stopped:
                break
        d.finish()
        return d.text

    call = written(f, ("weather", dict(city="a", days=3)))
    assert text(call) == call
    for end in ("a " + call, '"', "<", "<a"):
        assert text("Well, " + end) == "Well, "
    if f.trigger:
        assert text("Well." + call) == "Well." + call


def test_more_than_the_grammar_can_be():
    schema = dict(properties=dict(a=dict(enum=["x" * 2000])))
    many = check_tools([function(f"f{i}", schema) for i in range(100)])
    with pytest.raises(BadRequest, match="give fewer"):
        tool_params(SamplingParams(), HERMES, many)


def test_without_the_library(monkeypatch):
    "A request can be read, and the engine says what is missing."
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    schema = dict(properties=dict(only_here=dict(type="null")))
    choice = check_tools([function("f", schema)], "required")
    fresh = LLM(copy.deepcopy(model()), tiny_tokenizer(), compile=False)
    params = tool_params(SamplingParams(), HERMES, choice)
    outs = fresh.generate(["x", "y"], [params, SamplingParams(max_tokens=2)])
    assert "pip install 'batchlab[structured]'" in outs[0].error and outs[1].error is None


# --- the parser


def whole_of(deltas):
    "`(content, calls)` that `deltas` add up to, as a client adds them. A call begins without arguments, and only the last goes on."
    whole = {}
    for d in deltas:
        assert [*d] in (["content"], ["tool_calls"]) and d.get("content") != ""
        for c in d.get("tool_calls", ()):
            if c["index"] == len(whole.get("tool_calls", ())):
                assert c["function"]["arguments"] == ""
            else:
                assert [*c] == ["index", "function"]
                assert c["index"] == len(whole["tool_calls"]) - 1
        grow(whole, d)
    calls = [*whole.get("tool_calls", {}).values()]
    for c in calls:
        del c["index"]
    return whole.get("content") or (None if calls else ""), calls


def stream(f, choice, pieces):
    p = ToolParser(f, choice, "key")
    return [d for piece in pieces for d in p.feed(piece)] + p.close()


def fragments(f):
    "Parts of answers in a format: whole calls, their pieces, and others' text."
    some = (dict(city='a}"{', days=3), {}, dict(x=[dict(y=1), 2]), dict(a="\\"))
    layout = (f.first, f.between, f.last, f.trigger, f.prefix, *f.parts)
    words = ("weather", "now", "then", " ", "\n", "}", "{", '"', "<", "[", "Well. ", "é")
    named = ("weather", "now", "then")
    calls = [written(f, (n, a)) for n in named for a in (dict(city="a<b", days=3), {})]
    pair = written(f, ("now", {}), ("weather", some[0]))
    return st.sampled_from([*layout, *words, *map(json.dumps, some), *calls, pair])


@each_format
@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_however_it_is_cut(name, data):
    "The deltas of any pieces add up to the whole text's, and each call's first delta has its id and name."
    f, choice = fmt_of(name), check_tools(TOOLS, None, data.draw(st.booleans()))
    text = "".join(data.draw(st.lists(fragments(f), max_size=8)))
    whole = parse_answer(f, choice, text, "key")
    places = data.draw(st.lists(st.integers(0, 200), max_size=12))
    ends = sorted({min(p, len(text)) for p in places})
    for pieces in ([text[a:b] for a, b in zip([0, *ends], [*ends, len(text)])], [*text]):
        assert whole_of(stream(f, choice, pieces)) == whole
    assert all(c["function"]["name"] in choice.schemas for c in whole[1])


@each_format
@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=st.text(st.sampled_from('<tol_ca>[TOLSARG]{"name: f}\n|x'), max_size=40))
def test_text_without_a_call_is_content(name, text):
    f, choice, none = fmt_of(name), AUTO, NONE
    for fmt, asked in ((f, choice), (None, choice), (f, none), (f, None)):
        assert parse_answer(fmt, asked, text) == (text, [])


@each_format
def test_as_it_streams(name):
    "Text comes at once, but what may begin a call; arguments come as they are written, before their end."
    f = fmt_of(name)
    p, (head, middle, tail) = ToolParser(f, AUTO), f.parts
    if f.trigger:
        assert p.feed("Well. ") == [dict(content="Well. ")]
        assert p.feed(f.trigger[:-1]) == []
        assert p.feed("!") == [dict(content=f.trigger[:-1] + "!")]
    begin = (f.first + head + "weather" + middle).replace("§", "call00000")
    assert [d for c in begin for d in p.feed(c)] == [], "whether these are arguments is to be seen"
    first, *parts = [
        d["tool_calls"][0] for s in ('{"city":', ' "Oslo", "da', 'ys": 3}') for d in p.feed(s)
    ]
    assert first["index"] == 0 and first["id"].startswith("call_")
    assert (first["type"], first["function"]) == ("function", dict(name="weather", arguments=""))
    assert [x["function"]["arguments"] for x in parts] == ['{"city":', ' "Oslo", "da', 'ys": 3}']
    assert p.feed(tail) == [] == p.feed(f.last) == p.close()


@each_format
def test_little_is_held_back(name):
    f = fmt_of(name)
    called = written(f, ("now", {})).partition("now")
    head = called[0] + "now" + f.parts[1].replace("§", "call00000")
    for text in (
        "<" * 5000,
        " " * 5000,
        f.trigger * 400 + "x" * 900,
        called[0] + "n" * 5000,
        head + " " * 5000 + "!",
    ):
        p, said = ToolParser(f, AUTO), 0
        for i, c in enumerate(text, 1):
            said += sum(len(d.get("content", "")) for d in p.feed(c))
            assert i - said <= 300, text[:40]


@each_format
def test_bad_calls_are_content(name):
    f = fmt_of(name)
    unknown, good = written(f, ("then", {})), written(f, ("now", {}))
    for text in (unknown, f.first + f.parts[0] + "now"):
        assert parse_answer(f, AUTO, text) == (text, [])
    if f.trigger:
        content, calls = parse_answer(f, AUTO, unknown + good)
        assert content.startswith(f.trigger) and plain(calls) == [("now", {})]
        assert parse_answer(f, AUTO, good + "Bye")[0] == "Bye"


@each_format
def test_an_answer_that_was_cut_off(name):
    "By max_tokens, in the middle of arguments: what there is of them is given out."
    f = fmt_of(name)
    text = written(f, ("weather", dict(city="Oslo", days=3))).partition(' "days')[0]
    content, [call] = parse_answer(f, AUTO, text)
    assert (content, call["function"]["arguments"]) == (None, '{"city": "Oslo",')


@pytest.mark.parametrize("end", ["", "]" * 4000 + "}\n</tool_call>"])
def test_brackets_without_end_are_passed_on(end):
    "A model that repeats itself may nest deeper than Python reads: at all endpoints it is the answer, and no error of the server."
    tools = [function("f")]
    text = '<tool_call>\n{"name": "f", "arguments": {"a": ' + "[" * 4000 + end
    for choice in (check_tools(tools), check_tools(tools, "required")):
        [call] = parse_answer(HERMES, choice, text)[1]
        assert call["function"]["arguments"].startswith('{"a": [[[')
        response = dict(id="resp_1", output=[])
        parts = ResponseParts(response, tools=choice, tool_format=HERMES)
        parts.since(CompletionOutput(0, text, finish_reason="length"))
        parts.end("length", usage_of())
        assert response["output"][0]["type"] == "function_call"
    f = fmt_with("open")
    deep = call_as("now", {}).replace("{}}", '{"a": ' + "[" * 4000 + "]" * 4000 + "}}")
    assert parse_answer(f, AUTO, deep) == (deep, [])


def test_ids_are_those_of_the_key():
    text = written(HERMES, ("now", {}), ("now", {}))
    ids = lambda key=None: [c["id"] for c in parse_answer(HERMES, AUTO, text, key)[1]]
    assert ids("a") == ids("a") and not {*ids("a")} & {*ids("b")} and len({*ids(), *ids()}) == 4


def test_a_strict_call_that_is_not_valid_is_an_error(tmp_path):
    "What no grammar holds is checked at the end, but for a call that is cut off, or that nobody promised."
    pair = dict(type="array", items=dict(const=1), minItems=2, maxItems=2, uniqueItems=True)
    tools = [function("f", dict(properties=dict(a=pair), required=["a"]))]
    must, call = check_tools(tools, "required"), written(FORMATS["hermes"], ("f", dict(a=[1, 1])))
    for choice, text in ((check_tools(tools), call), (must, call.partition("]")[0])):
        assert parse_answer(HERMES, choice, text)[1]
    with pytest.raises(BadRequest, match=r"call of f is not valid at \$.a \(.*non-unique") as e:
        parse_answer(HERMES, must, call)
    assert e.value.code == "server_error"
    [r] = run(tmp_path / "a", [ask(0, tools=tools, tool_choice="required")], llm())
    assert r["response"]["status_code"] == 500 and "non-unique" in r["error"]["message"]


# --- a layout that only the tokenizer's response_template knows


def response(**opening):
    function = dict(name="{content.fn}", arguments="{content.with}")
    call = dict(close="</call>", repeats=True, content="json", transform=dict(function=function))
    fields = dict(
        thinking=dict(open="<think>", close="</think>"), tool_calls=opening | call, content={}
    )
    return dict(start_anchor="<|assistant|>", fields=fields)


def call_as(name, arguments):
    return f"<call>{json.dumps({'fn': name, 'with': arguments})}</call>"


@functools.cache
def fmt_with(opening, text='<call>{"fn": "«N»", "with": «A»}</call>'):
    tok = tiny_tokenizer()
    tok.response_template = response(**{opening: "<call>"})
    return found(template(text, say="<call>"), tok)


each_opening = pytest.mark.parametrize("opening", ["open", "open_pattern"])


@each_opening
def test_calls_that_transformers_reads(opening):
    f, choice = fmt_with(opening), AUTO
    assert f.name == "response_template" and f.parallel
    assert f.trigger == ("<call>" if opening == "open" else "")
    text = "<think>Hm.</think>Let me look." + 2 * call_as("weather", dict(city="Oslo", days="3"))
    content, calls = parse_answer(f, choice, text)
    assert plain(calls) == [("weather", dict(city="Oslo", days=3))] * 2, "cast by the schema"
    assert "Let me look." in content and "Hm." in content
    assert fmt_with(opening, f"<tool_call>\n{OBJECT}\n</tool_call>").name == "hermes"
    assert fmt_with(opening, "<other>«N»</other>") is None
    assert fmt_with(opening, "") is None, "no table says how to write a call of this layout"


@each_opening
@pytest.mark.parametrize(
    "text",
    [
        "",
        "Well.",
        "<call>",
        "Well. <call>{",
        '<call>{"fn": 5}</call>',
        "<call>5</call>",
        '<call>{"fn": [1], "with": {}}</call>',
        call_as("then", {}),
        call_as("now", {}) + call_as("then", {}),
    ],
)
def test_what_transformers_can_not_read_is_content(opening, text):
    f = fmt_with(opening)
    assert parse_answer(f, AUTO, text) == (text, []) == whole_of(stream(f, AUTO, [*text]))


def test_content_streams_up_to_a_literal_beginning():
    p, call = ToolParser(fmt_with("open"), AUTO), call_as("now", {})
    assert p.feed("Well. <ca") == [dict(content="Well. ")] and p.feed(call[3:]) == []
    assert plain(whole_of(p.close())[1]) == [("now", {})]


def test_what_is_only_read_can_not_be_held():
    f = fmt_with("open")
    p = tool_params(SamplingParams(stop="x"), f, AUTO)
    assert p.structured_outputs is None and not p.skip_special_tokens and p.stop_until == ["<call>"]
    for choice in (MUST, check_tools([function("f", strict=True)])):
        with pytest.raises(BadRequest, match="held") as e:
            tool_params(SamplingParams(), f, choice)
        assert e.value.param == "tool_choice"


# --- messages


def test_messages_with_calls():
    answer = dict(role="tool", tool_call_id="call_0", content=[dict(type="text", text="5")])
    _, called, answered = as_messages([*CALLED, answer])
    assert called["tool_calls"][0]["function"] == dict(name="now", arguments=dict(a=1))
    assert called["content"] is None
    assert answered == dict(role="tool", tool_call_id="call_0", content="5", name="now")
    kept = CALLED[1]["tool_calls"][0]["function"]["arguments"]
    assert kept == '{"a": 1}', "what was given stays as it was"
    said = [assistant("x", tool_calls=None), dict(role="tool", content="x")]
    assert "tool_calls" not in as_messages(said[:1])[0]
    assert as_messages(said[1:])[0]["content"] == "x", (
        "a template of its own may know such messages"
    )


def saying(*calls, role="assistant"):
    return dict(role=role, content="", tool_calls=[*calls])


def answering(**own):
    return dict(role="tool", content="5") | own


@pytest.mark.parametrize(
    "talk, words",
    [
        ([*CALLED, answering(tool_call_id="call_9")], "'call_9'"),
        ([*CALLED, answering()], "tool_call_id None"),
        ([answering(tool_call_id="x"), *CALLED], "message 0"),
        ([saying(*calls_of(("f", {})), role="user")], "role assistant"),
        ([dict(role="assistant", tool_calls="x")], "must be a list"),
        ([saying(5)], "tool_calls[0] must be"),
        ([saying(dict(id=5, function=dict(name="f")))], "with an id"),
        ([saying(dict(id="a", function=dict(arguments="{}")))], "has a name"),
        ([saying(dict(function=dict(name="f", arguments="[1]")))], "arguments must be"),
    ],
)
def test_messages_that_make_no_sense(talk, words):
    with pytest.raises(BadRequest) as e:
        as_messages(talk)
    assert words in str(e.value) and "\n" not in str(e.value)


# --- with a model


@functools.cache
def model():
    return tiny_model("llama", num_hidden_layers=1, max_position_embeddings=4096, vocab_size=280)


@functools.cache
def llm(name="hermes", special=False):
    tok = copy.deepcopy(tokenizer(special))
    tok.chat_template = TEMPLATES[name]
    return LLM(copy.deepcopy(model()), tok, max_num_seqs=8, compile=False)


def ask(i, talk=None, **body):
    talk = talk or [user("Weather? " * (1 + i % 3))]
    body = dict(messages=talk, max_tokens=400, seed=i, temperature=1.0) | body
    return dict(custom_id=f"r{i}", method="POST", url="/v1/chat/completions", body=body)


def run(path, lines, llm):
    path.mkdir()
    write_lines(path / "in.jsonl", lines)
    Job(path / "in.jsonl", path / "out.jsonl", ordered=True).run(llm)
    return [json.loads(s) for s in (path / "out.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "name, special",
    [("hermes", False), ("hermes", True), ("mistral", True), ("llama", False), ("as_text", True)],
)
def test_a_batch_file_with_tools(tmp_path, name, special):
    "By a model of random weights: whoever must call does, with arguments that fit, and the lines beside it say what they say alone."
    must = dict(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    must |= dict(thinking_token_budget=4)  # a tokenizer with marks of thoughts has one think first
    lines = [ask(i, **must) if i % 2 else ask(i, max_tokens=12) for i in range(12)]

    def choices(folder, lines):
        records = run(tmp_path / folder, lines, llm(name, special))
        assert [r["custom_id"] for r in records] == [d["custom_id"] for d in lines]
        assert not any(r["error"] for r in records)
        return [r["response"]["body"]["choices"][0] for r in records]

    all_of = choices("a", lines)
    for choice in all_of[::2]:
        assert "tool_calls" not in choice["message"]
        assert isinstance(choice["message"]["content"], str)
    ended = [c["message"] for c in all_of[1::2] if c["finish_reason"] == "tool_calls"]
    assert {c["finish_reason"] for c in all_of[1::2]} <= {"tool_calls", "length"}
    for message in ended:
        [(called, arguments)] = plain(message["tool_calls"])
        jsonschema.validate(arguments, AUTO.schemas[called])
        assert message["content"] is None
    assert len(ended) >= 3
    assert choices("b", lines[::2]) == all_of[::2]
    assert choices("c", lines) == all_of, "and the ids are the same each time"


@each_format
def test_a_conversation_goes_on_after_a_call(tmp_path, name):
    answer, short = (
        dict(role="tool", tool_call_id="call_0", content="5:12"),
        dict(max_tokens=5, temperature=0),
    )
    talk, none = [*CALLED, answer, user("Thanks.")], dict(tools=TOOLS, tool_choice="none")
    lines = [ask(0, talk, **short), ask(1, talk, **short, **none), ask(2, talk[:1], **short)]
    records = run(tmp_path / name, lines, llm(name))
    assert not any(r["error"] for r in records)
    one, other, plain = [r["response"]["body"] for r in records]
    assert one["choices"] == other["choices"]
    assert one["choices"][0]["finish_reason"] == "length"
    counts = [d["usage"]["prompt_tokens"] for d in (one, other, plain)]
    assert counts[0] == counts[1] > counts[2]


@pytest.mark.parametrize("more", [{}, dict(tools=TOOLS, stop="x"), dict(tools=TOOLS, n=2)])
def test_lines_that_run(tmp_path, more):
    [r] = run(tmp_path / "a", [ask(0, **dict(max_tokens=2) | more)], llm())
    assert r["error"] is None and len(r["response"]["body"]["choices"]) == more.get("n", 1)


def test_a_line_for_tools_that_can_not_run_says_why(tmp_path):
    own = ask(0, tools=TOOLS, response_format=dict(type="json_object"))
    [r] = run(tmp_path / "a", [own], llm())
    assert "response_format" in r["error"]["message"]


def test_a_line_of_text_has_no_tools():
    line = dict(
        custom_id="t", method="POST", url="/v1/completions", body=dict(prompt="x", tools=TOOLS)
    )
    assert "tools=" in parse_line(1, json.dumps(line).encode()).failure[1]


def test_a_table_shows_the_calls(tmp_path):
    line = ask(1, tools=TOOLS, tool_choice=function("now"))
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    Job(tmp_path / "in.jsonl", tmp_path / "out.csv").run(llm())
    [row] = csv.DictReader((tmp_path / "out.csv").open())
    [call] = json.loads(row["text"])["tool_calls"]
    assert row["finish_reason"] == "tool_calls"
    assert call["function"] == dict(name="now", arguments="{}")


def test_reading_a_file_without_tools_needs_no_torch():
    code = 'import sys, batchlab.jobs.lines as l; l.parse_line(1, b"{}"); sys.exit("torch" in sys.modules)'
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
