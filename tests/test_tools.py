"Functions that a model calls: what a request may say of them, calls held to their schemas by any writer, and read from the answer however it is cut."

import copy, functools, json, random, re, sys

import jsonschema, pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tokenizers import AddedToken

from batchlab.core.text import Detokenizer
from batchlab.models import encode_chat, tiny_model, tiny_tokenizer
from batchlab.core.params import SamplingParams
from batchlab.jobs.job import Job
from batchlab.jobs.lines import parse_line
from batchlab.jobs.schema import BadRequest, as_messages, error_body
from batchlab.jobs.tools import (
    FORMATS,
    ID,
    KIND,
    NUMBER,
    ToolParser,
    check_tools,
    conversation_with,
    format_of,
    messages_for,
    parse_answer,
    take_tools,
    tool_grammar,
    tool_params,
    whole_message,
)

pytestmark = pytest.mark.usefixtures("one_thread")
llguidance = pytest.importorskip(
    "llguidance", reason="tool calls are held by llguidance, the extra `structured`"
)

CITY = dict(
    type="object",
    required=["city", "days"],
    properties=dict(
        city=dict(type="string", maxLength=6),
        days=dict(type="integer", minimum=1, maximum=9),
        unit=dict(enum=["C", "F"]),
    ),
)
XML_CITY = dict(CITY, properties=CITY["properties"] | dict(city=dict(type="string")))


def function(name, parameters=None, **kw):
    return dict(
        type="function",
        function=dict(name=name, **{} if parameters is None else dict(parameters=parameters), **kw),
    )


def tools(fmt=None):
    return [
        function(
            "weather", XML_CITY if fmt and fmt.style == "xml" else CITY, description="The weather."
        ),
        function("now"),
    ]


# Templates in the manner of the families: the tools, the messages, and calls as the family writes them.
TALK = "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}{% if m.tool_calls %}CALLS{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
LIST = "{% for c in m.tool_calls %}{{ ', ' if not loop.first }}{{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' + (c.function.arguments | tojson) + '}' }}{% endfor %}"
EACH = "{% for c in m.tool_calls %}{{ 'A' + c.function.name + 'B' + JSON + 'C' }}{% endfor %}"
JSON, TOOLS = "(c.function.arguments | tojson)", "{% if tools %}SAY{{ tools | tojson }}{% endif %}"


def each(begin, middle, end, args=JSON):
    return (
        EACH.replace("'A'", repr(begin))
        .replace("'B'", repr(middle))
        .replace("'C'", repr(end))
        .replace("JSON", args)
    )


def template(say, calls, tools=TOOLS):
    return tools.replace("SAY", say) + TALK.replace("CALLS", calls)


def tagged(head, middle, param, end, tail="", between="\n", first="", last="", kind="''"):
    before, inside, after = map(repr, param)
    return (
        f"{{{{ {first!r} }}}}{{% for c in m.tool_calls %}}{{{{ {head!r} + c.function.name + {middle!r} }}}}{{% for k, v in c.function.arguments.items() %}}{{{{ {before} + k + {inside} + {kind} }}}}"
        f"{{{{ v if v is string else v | tojson }}}}{{{{ {after} }}}}{{% endfor %}}{{{{ {end + tail!r} + ('' if loop.last else {between!r}) }}}}{{% endfor %}}{{{{ {last!r} }}}}"
    )


def dsml(around):
    d = "｜DSML｜"
    return tagged(
        f'<{d}invoke name="',
        '">\n',
        (f'<{d}parameter name="', '" string="', f"</{d}parameter>\n"),
        f"</{d}invoke>",
        first=f"<{d}{around}>\n",
        last=f"\n</{d}{around}>",
        kind="('true' if v is string else 'false') + '\">'",
    )


KEYWORDS = (
    "{% for c in m.tool_calls %}{{ ', ' if not loop.first }}{{ c.function.name + '(' }}{% for k, v in c.function.arguments.items() %}"
    "{{ ', ' if not loop.first }}{{ k + '=' }}{{ v | tojson }}{% endfor %}){% endfor %}"
)
XML = tagged(
    "<tool_call>\n<function=",
    ">\n",
    ("<parameter=", ">\n", "\n</parameter>\n"),
    "</function>",
    "\n</tool_call>",
)
CALLS, CALL, SEP, DONE, ALL = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
AS_TEXT = "c['function']['arguments']"
TEMPLATES = dict(
    hermes=template(
        '<tool_call>{"name": …, "arguments": …}</tool_call>',
        each('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>\n"),
    ),
    qwen3_coder=template(
        "<tool_call><function=…><parameter=…>…</parameter></function></tool_call>", XML
    ),
    llama=template(
        "Respond with name and parameters, a dictionary of argument name and its value. ",
        each('{"name": "', '", "parameters": ', "}"),
    ),
    mistral=template("", "[TOOL_CALLS] [" + LIST + "]"),
    mistral_args=template("", each("[TOOL_CALLS]", "[ARGS]", "")),
    granite=template("Answer with <|tool_call|> and a JSON list. ", "<|tool_call|>[" + LIST + "]"),
    phi4_mini=template(
        "", "", "{% if messages[0].tools %}<|tool|>{{ messages[0].tools }}<|/tool|>{% endif %}"
    ).replace("{% if m.tool_calls %}{% endif %}", ""),
    functools=template("Prefix with functools[", "functools[" + LIST + "]"),
    deepseek_v3=template(
        f"{CALLS}…```json",
        CALLS + each(CALL + "function" + SEP, "\n```json\n", "\n```" + DONE, AS_TEXT) + ALL,
    ),
    deepseek_v31=template(CALLS, CALLS + each(CALL, SEP, DONE, AS_TEXT) + ALL),
    kimi_k2=template(
        "",
        "<|tool_calls_section_begin|>{% for c in m.tool_calls %}{{ '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' + JSON + '<|tool_call_end|>' }}{% endfor %}<|tool_calls_section_end|>".replace(
            "JSON", JSON
        ),
    ),
    mistral_ids=template(
        "[ARGS]",
        "{% for c in m.tool_calls %}{{ '[TOOL_CALLS]' + c.function.name + '[CALL_ID]' + c.id + '[ARGS]' + JSON }}{% endfor %}".replace(
            "JSON", JSON
        ),
    ),
    apertus=template(
        "",
        "<|tools_prefix|>[{% for c in m.tool_calls %}{{ ', ' if not loop.first }}{{ '{\"' + c.function.name + '\": ' + JSON + '}' }}{% endfor %}]<|tools_suffix|>".replace(
            "JSON", JSON
        ),
    ),
    gigachat=template(
        "",
        each('<|function_call|>{"name": "', '", "arguments": ', "}").replace(
            "m.tool_calls", "m.tool_calls[:1]"
        ),
    ),
    nemotron=template("", "<TOOLCALL>[" + LIST + "]</TOOLCALL>"),
    apriel=template(
        "",
        "<tool_calls>["
        + LIST.replace("+ '}'", """+ ', "id": "' + c.id + '"}'""")
        + "]</tool_calls>",
    ),
    minimax_m1=template("", "<tool_calls>\n" + LIST.replace("', '", "'\n'") + "\n</tool_calls>"),
    function_tags=template("", each("<function=", ">", "</function>")),
    seed_oss=template(
        "",
        tagged(
            "<seed:tool_call>\n<function=",
            ">\n",
            ("<parameter=", ">", "</parameter>\n"),
            "</function>",
            "\n</seed:tool_call>",
        ),
    ),
    glm=template(
        "",
        tagged(
            "<tool_call>",
            "\n",
            ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
            "</tool_call>",
        ),
    ),
    minimax_m2=template(
        "",
        tagged(
            '<invoke name="',
            '">\n',
            ('<parameter name="', '">', "</parameter>\n"),
            "</invoke>",
            first="<minimax:tool_call>\n",
            last="\n</minimax:tool_call>",
        ),
    ),
    deepseek_v32=template("", dsml("function_calls")),
    deepseek_v4=template("", dsml("tool_calls")),
    lfm2=template("", "<|tool_call_start|>[" + KEYWORDS + "]<|tool_call_end|>"),
    pythonic=template(
        "Use exact format: [func_name1(param1=value1), func_name2(...)]", "[" + KEYWORDS + "]"
    ),
    harmony=template(
        "",
        "{% for c in m.tool_calls %}{{ '<|channel|>commentary to=functions.' + c.function.name + ' <|constrain|>json<|message|>' + JSON + '<|call|>' }}{% endfor %}".replace(
            "JSON", JSON
        ),
    ),
)
MARKERS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<|python_tag|>",
    CALLS,
    CALL,
    SEP,
    DONE,
    ALL,
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "[CALL_ID]",
    "<|tools_prefix|>",
    "<|tools_suffix|>",
    "<|function_call|>",
    "<TOOLCALL>",
    "</TOOLCALL>",
    "<tool_calls>",
    "</tool_calls>",
    "<seed:tool_call>",
    "</seed:tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "｜DSML｜",
    "<|tool_call_start|>",
    "<|python_start|>",
]


@functools.cache
def tokenizer(special=False):
    "With the markers as tokens of their own, special ones but those that are written like tags."
    tok = tiny_tokenizer()
    if special:
        tok.add_tokens(
            [
                AddedToken(m, special=not re.fullmatch("</?\\w+>", m), normalized=False)
                for m in MARKERS
            ]
        )
    return tok


@functools.cache
def fmt_of(name, special=False):
    return format_of(tokenizer(special), TEMPLATES[name])


HELD = [name for name in TEMPLATES if name != "harmony"]
BOTH = [(name, special) for name in HELD for special in (False, True)]
each_format = pytest.mark.parametrize("name", HELD)


def plain_layout(text):
    return text.replace(NUMBER, "0").replace(ID, "call00000")


def given_as(f, arguments):
    "`arguments` as a model of format `f` writes them, up to their end."
    if f.style == "json":
        return json.dumps(arguments)
    if f.style == "python":
        return ", ".join(f"{k}={json.dumps(v)}" for k, v in arguments.items()) + f.end
    before, between, after = f.param
    return (
        "".join(
            before
            + k
            + between.replace(KIND, json.dumps(isinstance(v, str)))
            + (v if isinstance(v, str) else json.dumps(v))
            + after
            for k, v in arguments.items()
        )
        + f.end
    )


def call_as(f, name, arguments):
    return plain_layout(
        f"{f.first}{f.head}{name}{f.middle}{given_as(f, arguments)}{f.tail}{f.last}"
    )


# --- what a request says


@pytest.mark.parametrize(
    "choice,mode,names,parallel",
    [
        (None, "auto", ["weather", "now"], True),
        ("auto", "auto", ["weather", "now"], True),
        ("none", "none", [], True),
        ("required", "required", ["weather", "now"], True),
        (function("now"), "required", ["now"], False),
        (
            dict(type="allowed_tools", allowed_tools=dict(mode="auto", tools=[function("now")])),
            "auto",
            ["now"],
            True,
        ),
        (
            dict(
                type="allowed_tools",
                allowed_tools=dict(
                    mode="required", tools=[function("now"), function("now"), function("weather")]
                ),
            ),
            "required",
            ["now", "weather"],
            True,
        ),
    ],
)
def test_choices(choice, mode, names, parallel):
    found = check_tools(tools(), choice)
    assert (found.mode, [*found.names], found.parallel) == (mode, names, parallel)
    assert (
        not check_tools(tools(), choice, False).parallel
        and check_tools(tools(), choice, True).parallel == parallel
    )
    assert [t["function"]["name"] for t in found.tools] == ["weather", "now"] and found.schema(
        "now"
    )["properties"] == {}
    assert check_tools(tools(), choice) is found, "the same request is looked at once"


def test_no_tools():
    for none in (None, []):
        assert (
            check_tools(none)
            is check_tools(none, "auto", True)
            is check_tools(none, "none")
            is None
        )


@pytest.mark.parametrize(
    "given,field",
    [
        (dict(tools="x"), "tools must be a list"),
        (dict(tools={}), "tools must"),
        (dict(tools=[function("f")] * 129), "at most 128"),
        (dict(tools=[5]), "tools[0] must be of type"),
        (dict(tools=[dict(type="custom")]), "tools[0] must be of type 'function'"),
        (dict(tools=[dict(type="function")]), "tools[0].function must be an object"),
        (dict(tools=[function("f"), function("")]), "tools[1].function.name"),
        (dict(tools=[function("a b")]), "function.name"),
        (dict(tools=[function("x" * 65)]), "function.name"),
        (dict(tools=[function("f\n")]), "function.name"),
        (dict(tools=[function(5)]), "function.name"),
        (dict(tools=[function("f"), function("f")]), "tools[1].function.name"),
        (dict(tools=[function("f", description=5)]), "function.description"),
        (dict(tools=[function("f", strict="yes")]), "function.strict"),
        (dict(tools=[function("f", [])]), "parameters must be a JSON schema"),
        (dict(tools=[function("f", dict(type="string"))]), "parameters must be of type 'object'"),
        (
            dict(tools=[function("f", dict(properties=5))], tool_choice="required"),
            "tools[0].function.parameters",
        ),
        (
            dict(tools=[function("f", dict(properties=dict(a={"if": {}})), strict=True)]),
            "function.parameters",
        ),
        (
            dict(
                tools=[function("f", dict(properties=dict(a=dict(type="thing"))))],
                tool_choice="required",
            ),
            "function.parameters",
        ),
        (
            dict(tools=[function("f", dict(required=5))], tool_choice=function("f")),
            "function.parameters",
        ),
        (
            dict(
                tools=[
                    function("f", dict(properties=dict(a=dict(type="array", uniqueItems=True))))
                ],
                tool_choice="required",
            ),
            "uniqueItems",
        ),
        (dict(tools=[function("f", dict(x=float("nan")))]), "tools is no JSON"),
        (dict(tool_choice="required"), "tool_choice needs tools"),
        (dict(tools=tools(), tool_choice="any"), "tool_choice must be"),
        (dict(tools=tools(), tool_choice=5), "tool_choice must be"),
        (
            dict(tools=tools(), tool_choice=dict(type="function")),
            "tool_choice must be an object like",
        ),
        (dict(tools=tools(), tool_choice=function("g")), "function 'g'"),
        (dict(tools=tools(), tool_choice=dict(type="allowed_tools")), "tool_choice.allowed_tools"),
        (dict(tools=tools(), parallel_tool_calls="yes"), "parallel_tool_calls must be"),
        (
            dict(
                tools=tools(),
                tool_choice=dict(
                    type="allowed_tools", allowed_tools=dict(mode="none", tools=[function("now")])
                ),
            ),
            "allowed_tools.mode",
        ),
        (
            dict(
                tools=tools(),
                tool_choice=dict(
                    type="allowed_tools", allowed_tools=dict(mode="auto", tools=[function("g")])
                ),
            ),
            "allowed_tools.tools[0]",
        ),
    ],
)
def test_what_is_wrong_is_said_by_field(given, field):
    with pytest.raises(BadRequest) as e:
        take_tools(dict(given))
    said = str(e.value)
    assert field in said and "\n" not in said and len(said) < 400
    assert e.value.param in ("tools", "tool_choice", "parallel_tool_calls") and said.startswith(
        e.value.param
    )
    assert error_body(said, e.value.code, e.value.param)[1]["error"]["param"] == e.value.param


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["function", "auto", "f", "object", "allowed_tools"]),
    lambda v: (
        st.lists(v, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "function",
                    "name",
                    "parameters",
                    "properties",
                    "mode",
                    "tools",
                    "allowed_tools",
                    "required",
                    "x",
                ]
            ),
            v,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(JUNK, JUNK, JUNK)
def test_junk_is_refused_in_one_line(a, b, c):
    for some in (a, [a], [function("f", a)]):
        try:
            check_tools(some, b, c)
        except BadRequest as e:
            assert "\n" not in str(e) and len(str(e)) < 500


def test_deep_schemas_are_refused():
    deep = {"type": "null"}
    for _ in range(5000):
        deep = dict(type="array", items=deep)
    with pytest.raises(BadRequest, match="tools"):
        check_tools([function("f", dict(properties=dict(a=deep)))])


# --- formats


@pytest.mark.parametrize("name,special", BOTH)
def test_the_format_is_found_from_the_template(name, special):
    f = fmt_of(name, special)
    assert f.name == name and f.special == tuple(sorted(f.special, key=lambda p: p[1]))
    assert f.arguments_as_text == (name in ("deepseek_v3", "deepseek_v31")) and f.route == (
        "message" if name == "phi4_mini" else "tools"
    )
    assert {t for t, _ in f.special} == {
        m
        for m in MARKERS
        if special
        and m
        in "".join(
            (f.prefix, f.first, f.head, f.middle, *f.param, f.end, f.tail, f.between, f.last)
        )
    }
    if special:
        assert tokenizer(True).convert_tokens_to_ids("<think>") in f.visible


def test_every_format_has_a_template_here():
    assert {*FORMATS} == {*TEMPLATES}


def test_templates_without_tools():
    assert format_of(tiny_tokenizer()) is None and format_of(tiny_tokenizer(chat=False)) is None
    assert format_of(TEMPLATES["hermes"]).name == "hermes"
    assert format_of('{# no word of them #}<tool_call></tool_call>"arguments"' + TALK) is None, (
        "the tools would not reach the prompt"
    )
    assert format_of(template("call <weird>name</weird>", "")) is None, (
        "tools, but calls of an unknown form"
    )
    assert format_of("{% if %}<tool_call></tool_call>arguments") is None, "no template at all"
    assert format_of(TEMPLATES["hermes"].replace("tools", "xml_tools")).route == "xml_tools"
    with pytest.raises(BadRequest, match="its chat template takes none") as e:
        tool_params(SamplingParams(), None, check_tools(tools()))
    assert e.value.param == "tools"


def test_the_layout_is_what_the_template_writes():
    "Marks alone are not enough: a call in an earlier message is rendered, and read again."
    seed = TEMPLATES["seed_oss"].replace("seed:tool_call", "other:tool_call")
    assert "<parameter=" in seed and format_of(seed) is None, (
        "marks of one family, and calls of another"
    )
    tight = format_of(
        template(
            "",
            tagged(
                "<tool_call>",
                "",
                ("<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
                "</tool_call>",
                between="",
            ),
        )
    )
    assert (tight.name, tight.middle, tight.param[1:], tight.between) == (
        "glm",
        "",
        ("</arg_key><arg_value>", "</arg_value>"),
        "",
    ), "white space is as it has it"
    assert fmt_of("glm").param[1:] == ("</arg_key>\n<arg_value>", "</arg_value>\n")
    assert format_of(TEMPLATES["hermes"].replace("m.content or ''", "m.content | trim")).blank, (
        "a template that writes None"
    )
    assert not format_of(
        TEMPLATES["hermes"].replace(
            "m.tool_calls %}", "m.tool_calls and m.tool_calls | length < 2 %}", 1
        )
    ).parallel, "that drops the second call"
    assert not fmt_of("harmony").parallel or fmt_of("harmony").refused


def test_kimi_knows_calls_by_their_number():
    talk = [dict(role="user", content="?")] + 2 * [
        dict(role="assistant", content=None, tool_calls=calls_of(("now", {}))),
        dict(role="tool", tool_call_id="call_0", content="5"),
    ]
    talk[3] = dict(talk[3], tool_calls=[dict(talk[3]["tool_calls"][0], id="call_1")])
    talk[4] = dict(talk[4], tool_call_id="call_1")
    found = messages_for(fmt_of("kimi_k2"), as_messages(talk))
    assert (
        [m["tool_call_id"] for m in found if m["role"] == "tool"]
        == [m["tool_calls"][0]["id"] for m in found if m["role"] == "assistant"]
        == ["functions.now:0", "functions.now:1"]
    )


@pytest.mark.parametrize(
    "text,found",
    [
        ('city="a", days=3', '{"city": "a", "days": 3}'),
        ("city='it\\'s', unit = None", '{"city": "it\'s", "unit": null}'),
        (
            "city=Oslo,days=[1, (2), {\"k\": True, 'j': false}],",
            '{"city": "Oslo", "days": [1, 2, {"k": true, "j": false}]}',
        ),
        ('city="\\ud83d\\ude00)"', '{"city": "😀)"}'),
        ("", "{}"),
    ],
)
def test_keywords_of_python(text, found):
    f, choice = fmt_of("pythonic"), check_tools(tools())
    assert [
        c["function"]["arguments"] for c in parse_answer(f, choice, f"[weather({text})]")[1]
    ] == [found]
    for bad in ("days=open(1)", "days=", '"a"'):
        content, [call] = parse_answer(f, choice, f"[weather(days=1, {bad})]")
        assert content and call["function"]["arguments"].startswith('{"days": 1')


def test_values_of_tags_as_json_or_python():
    f, choice = (
        fmt_of("glm"),
        check_tools(
            [
                function(
                    "f",
                    dict(
                        properties=dict(
                            a=dict(type="boolean"), b=dict(type="array"), c=dict(type="string")
                        )
                    ),
                )
            ]
        ),
    )
    text = '<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>True</arg_value>\n<arg_key>b</arg_key>\n<arg_value>["</arg_value>", null]</arg_value>\n<arg_key>c</arg_key>\n<arg_value>True\n</arg_value>\n</tool_call>'
    assert plain(parse_answer(f, choice, text)[1]) == [
        ("f", dict(a=True, b=["</arg_value>", None], c="True\n"))
    ]


ARGUMENTS = dict(city='a"}{\\ é\n</x>', days=3, unit="C")


def calls_of(*named):
    return [
        dict(id=f"call_{i}", type="function", function=dict(name=n, arguments=json.dumps(a)))
        for i, (n, a) in enumerate(named)
    ]


def plain(calls):
    return [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]


@pytest.mark.parametrize("name,special", BOTH)
def test_what_a_template_writes_is_read_again(name, special):
    "A call of a message before, rendered by the template, is text that the parser reads as that call, and that the grammar takes."
    f, tok, choice = fmt_of(name, special), tokenizer(special), check_tools(tools(fmt_of(name)))
    named = [("weather", ARGUMENTS)] + [("now", {})] * f.parallel
    talk = [
        dict(role="user", content="?"),
        dict(role="assistant", content=None, tool_calls=calls_of(*named)),
    ]
    messages = conversation_with(f, None, dict(messages=as_messages(talk)))["messages"]
    text = tok.decode(
        encode_chat(tok, messages, chat_template=TEMPLATES[name], add_generation_prompt=False)
    ).partition("<|assistant|>")[2]
    content, calls = parse_answer(f, choice, text)
    assert content is None and plain(calls) == named
    assert all(
        re.fullmatch("call_[0-9a-f]{24}", c["id"]) and c["type"] == "function" for c in calls
    ) and len({c["id"] for c in calls}) == len(calls)


@each_format
def test_tools_reach_the_prompt(name):
    f, talk = fmt_of(name), dict(messages=[dict(role="user", content="Hi")])

    def prompt(choice):
        return tokenizer().decode(
            encode_chat(
                tokenizer(),
                **conversation_with(f, check_tools(tools(), choice), talk),
                chat_template=TEMPLATES[name],
            )
        )

    assert "weather" in prompt("auto") and "weather" not in prompt("none")


def test_ids_and_tools_as_templates_want_them():
    talk = as_messages(
        [
            dict(role="user", content="?"),
            dict(role="assistant", content=None, tool_calls=calls_of(("now", {}))),
            dict(role="tool", tool_call_id="call_0", content="5"),
        ]
    )
    assert messages_for(fmt_of("hermes"), talk) == talk
    cut = messages_for(fmt_of("mistral"), talk)
    assert (
        cut[1]["tool_calls"][0]["id"] == cut[2]["tool_call_id"]
        and re.fullmatch("[0-9a-z]{9}", cut[2]["tool_call_id"])
        and messages_for(fmt_of("mistral"), cut) == cut
    )
    assert (
        messages_for(fmt_of("deepseek_v31"), talk)[1]["tool_calls"][0]["function"]["arguments"]
        == "{}"
    )
    assert talk[1]["tool_calls"][0]["function"]["arguments"] == {}, "what was given stays as it was"
    assert (
        messages_for(fmt_of("phi4_mini"), talk)[1]["content"]
        == '<|tool_call|>[{"name": "now", "arguments": {}}]<|/tool_call|>'
    ), "whose template writes no calls"
    xml = format_of(TEMPLATES["hermes"].replace("tools", "xml_tools"))
    got = conversation_with(
        xml, check_tools(tools()), dict(messages=talk, chat_template_kwargs=dict(a=1))
    )
    assert (
        got["chat_template_kwargs"]["a"] == 1
        and got["chat_template_kwargs"]["xml_tools"][0]["function"]["name"] == "weather"
    )


# --- the grammar


@functools.cache
def vocabulary(special):
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer(special), n_vocab=len(tokenizer(special)), eos_token=[2])


def writer(name, special, choice, rng, begin="", most=600):
    "Text written by choosing at random among the tokens that the grammar allows, after `begin`; None if it came to no end."
    f, tok = fmt_of(name, special), tokenizer(special)
    m = llguidance.LLMatcher(
        vocabulary(special),
        llguidance.LLMatcher.grammar_from_lark(tool_grammar(f, choice)),
        log_level=0,
    )
    assert not m.is_error(), m.get_error()
    ids = tok(begin)["input_ids"]
    assert m.try_consume_tokens(ids) == len(ids), "the grammar takes a beginning that it should"
    out = [3 + b for b in b'"}]']
    for _ in range(most):
        some = [i for i, ok in enumerate(m.compute_logit_bias()) if ok]
        assert some
        if 2 in some and (len(some) == 1 or rng.random() < 0.5):
            return tok.decode(ids)
        some = [i for i in some if i != 2]
        short = [i for i in some if i in out]
        closing = tok(f.param[2])["input_ids"]
        if f.style == "xml" and rng.random() < 0.3 and m.validate_tokens(closing) == len(closing):
            some, short = closing[:1], []
        step = [rng.choice(short if short and rng.random() < 0.5 else some)]
        if step == closing[:1] and len(some) == 1:
            step = closing if m.validate_tokens(closing) == len(closing) else step
        assert m.try_consume_tokens(step) == len(step)
        ids += step


@pytest.mark.parametrize("name,special", BOTH)
@pytest.mark.parametrize("mode", ["auto", "required", "named"])
def test_calls_are_held_to_their_schemas(name, special, mode):
    "Whatever writer, one that chooses at random among what the grammar allows: each call is to a function of the request, with arguments that fit."
    rng, f, ended, most = random.Random(f"{name}{special}{mode}"), fmt_of(name, special), 0, 0
    for k in range(6):
        choice = check_tools(tools(f), function("weather") if mode == "named" else mode, k % 2 == 0)
        begin = "Well, " * (k % 3 == 1) + f.trigger if mode == "auto" and f.trigger else ""
        text = writer(name, special, choice, rng, begin)
        if text is None:
            continue
        content, calls = parse_answer(f, choice, text)
        for c in calls:
            jsonschema.validate(
                json.loads(c["function"]["arguments"]), choice.schema(c["function"]["name"])
            )
        ended, most = ended + 1, max(most, len(calls))
        if mode != "auto":
            assert content is None and calls
        elif begin:
            assert calls and (content or "") == begin[: -len(f.trigger)]
        if mode == "named" or not choice.parallel or not f.parallel:
            assert len(calls) <= 1
        if mode == "named":
            assert calls[0]["function"]["name"] == "weather"
    assert ended >= 4 and (most or not f.trigger)


def takes(name, choice, text, special=False):
    "`(tokens taken, tokens, whether the answer may end there)`."
    m = llguidance.LLMatcher(
        vocabulary(special),
        llguidance.LLMatcher.grammar_from_lark(tool_grammar(fmt_of(name, special), choice)),
        log_level=0,
    )
    ids = tokenizer(special)(text)["input_ids"]
    n = m.try_consume_tokens(ids)
    return n == len(ids) and m.is_accepting()


def test_what_the_grammar_takes():
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for special in (False, True):
        auto, one, must = (
            check_tools(tools()),
            check_tools(tools(), None, False),
            check_tools(tools(), "required"),
        )
        for text in ("", 'plain {"name": 1} text', call, "Well.\n" + call, call + "\n" + call):
            assert takes("hermes", auto, text, special), text
        for text in (
            "<tool_call>",
            call[:-1],
            call + " more",
            call + call,
            call.replace("now", "then"),
            call.replace("{}", '{"a": 1}'),
        ):
            assert not takes("hermes", auto, text, special), text
        assert takes("hermes", one, call, special) and not takes(
            "hermes", one, call + "\n" + call, special
        )
        assert (
            takes("hermes", must, call + "\n" + call, special)
            and not takes("hermes", must, "", special)
            and not takes("hermes", must, "Well.\n" + call, special)
        )
    assert takes("hermes", auto, "<think>hm</think>" + call, special=True), (
        "a model may think before it calls"
    )
    spelled = [i for b in "<tool_call>".encode() for i in [3 + b]]
    m = llguidance.LLMatcher(
        vocabulary(True),
        llguidance.LLMatcher.grammar_from_lark(tool_grammar(fmt_of("hermes", True), auto)),
        log_level=0,
    )
    assert m.try_consume_tokens(spelled) == len(spelled) - 1, (
        "the trigger is one token, and can not be spelled in others"
    )
    llama = check_tools(tools())
    for text in ("", "plain", '{"x": 1}', '{"name": "now", "parameters": {}}'):
        assert takes("llama", llama, text), text
    for text in ('{"name": 5}', ' {"name": "now"}', "<|python_tag|>x"):
        assert not takes("llama", llama, text), text


def test_names_that_begin_alike():
    choice = check_tools(
        [function("get", CITY), function("get_all"), function("get-it")], "required"
    )
    for name in HELD:
        if fmt_of(name).style == "xml":
            continue
        for special in (False, True):
            text = writer(name, special, choice, random.Random(3))
            assert text and parse_answer(fmt_of(name, special), choice, text)[1]


@pytest.mark.parametrize(
    "bad,word",
    [
        (dict(properties=dict(a=dict(type="string", pattern="^a+$"))), "pattern"),
        (dict(properties=dict(a=dict(type="string", maxLength=3))), "maxLength"),
        (dict(additionalProperties=dict(type="integer"), properties={}), "additionalProperties"),
        ({"properties": {"a b": {}}}, "'a b'"),
        (
            dict(
                anyOf=[
                    dict(properties=dict(a=dict(type="null"))),
                    dict(properties=dict(b=dict(type="null"))),
                ]
            ),
            "anyOf",
        ),
    ],
)
def test_schemas_that_xml_can_not_hold_are_refused(bad, word):
    choice = check_tools([function("f", bad)], "required")
    assert tool_grammar(fmt_of("hermes"), choice)
    with pytest.raises(BadRequest, match="XML") as e:
        tool_grammar(fmt_of("qwen3_coder"), choice)
    assert word in str(e.value) and e.value.param == "tools"


def test_what_goes_with_tools():
    choice, f = check_tools(tools()), fmt_of("hermes")
    p = tool_params(SamplingParams(seed=3, max_tokens=9), f, choice)
    assert (p.seed, p.max_tokens, p.skip_special_tokens, p.structured_outputs.grammar) == (
        3,
        9,
        False,
        tool_grammar(f, choice),
    )
    none = check_tools(tools(), "none")
    plain = SamplingParams(structured_outputs=dict(json_object=True))
    assert tool_params(plain, None, none) is plain and tool_grammar(f, none) is None
    with pytest.raises(BadRequest, match="tools and"):
        tool_params(plain, f, choice)
    with pytest.raises(BadRequest, match="channels"):
        tool_params(SamplingParams(), fmt_of("harmony"), choice)
    stops = SamplingParams(stop=["x", "<"])
    assert tool_params(stops, f, choice).stop == ["x", "<"] and tool_params(
        stops, f, choice
    ).stop_until == ["<tool_call>"]
    assert not tool_params(stops, f, check_tools(tools(), "required")).stop, (
        "such an answer has no content"
    )
    assert tool_params(stops, fmt_of("pythonic"), choice).stop_until == ["[weather(", "[now("]


@pytest.mark.parametrize("name,special", [("hermes", False), ("hermes", True), ("llama", False)])
def test_a_stop_string_ends_content_and_no_call(name, special):
    "Whatever is cut off by a stop string is content; a call with the same letters in it is whole."
    f, tok, choice = fmt_of(name, special), tokenizer(special), check_tools(tools())
    p = tool_params(SamplingParams(stop=["a", '"', "<"], max_tokens=None), f, choice)

    def text(answer):
        d = Detokenizer(tok, p)
        for i in tok(answer)["input_ids"]:
            d.add(i)
            if d.stopped:
                break
        d.finish()
        return d.text

    call = call_as(f, "weather", dict(city="a", days=3))
    assert text(call) == call and text("Well, a " + call) == "Well, " == text('Well, "') == text(
        "Well, <"
    ) == text("Well, <a")
    if f.trigger:
        assert text("Well." + call) == "Well." + call


def test_more_than_the_grammar_can_be():
    many = check_tools(
        [function(f"f{i}", dict(properties=dict(a=dict(enum=["x" * 2000])))) for i in range(100)]
    )
    with pytest.raises(BadRequest, match="give fewer"):
        tool_params(SamplingParams(), fmt_of("hermes"), many)


def test_without_the_library(monkeypatch):
    "A request can be read, and the engine says what is missing."
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    choice = check_tools(
        [function("f", dict(properties=dict(only_here=dict(type="null"))))], "required"
    )
    from batchlab.api import LLM

    fresh, f = LLM(copy.deepcopy(model()), tiny_tokenizer(), compile=False), fmt_of("hermes")
    outs = fresh.generate(
        ["x", "y"], [tool_params(SamplingParams(), f, choice), SamplingParams(max_tokens=2)]
    )
    assert "pip install 'batchlab[structured]'" in outs[0].error and outs[1].error is None


# --- the parser


def stream(f, choice, pieces):
    p = ToolParser(f, choice, "key")
    return [d for piece in pieces for d in p.feed(piece)] + p.close()


def cut(text, places):
    ends = sorted({min(p, len(text)) for p in places})
    return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)])]


def fragments(f):
    "Parts of answers in a format: whole calls, their pieces, and others' text."
    args = [
        given_as(f, a)
        for a in (dict(city='a}"{', days=3), {}, dict(x=[dict(y=1), 2]), dict(a="\\"))
    ]
    parts = re.findall("[^\n]+\n*|\n+", args[0])
    return st.sampled_from(
        [
            *map(
                plain_layout,
                (
                    f.first,
                    f.head,
                    f.middle,
                    f.tail,
                    f.between,
                    f.last,
                    f.trigger,
                    f.prefix,
                    *f.param,
                ),
            ),
            f.end,
            "weather",
            "now",
            "then",
            *args,
            *parts,
            " ",
            "\n",
            "}",
            "{",
            '"',
            "<",
            "[",
            "Well. ",
            "é",
            *(
                call_as(f, n, a)
                for n in ("weather", "now", "then")
                for a in (dict(city="a<b", days=3), {})
            ),
            plain_layout(
                f"{f.first}{f.head}now{f.middle}{given_as(f, {})}{f.tail}{f.between}{f.head}weather{f.middle}{args[0]}{f.tail}{f.last}"
            ),
        ]
    )


def cut_at_will(name, data):
    "The deltas of any pieces add up to the whole text's, index by index; and each call's first delta has its id and name."
    f, choice = fmt_of(name), check_tools(tools(fmt_of(name)), None, data.draw(st.booleans()))
    text = "".join(data.draw(st.lists(fragments(f), max_size=8)))
    whole = parse_answer(f, choice, text, "key")
    for pieces in (cut(text, data.draw(st.lists(st.integers(0, 200), max_size=12))), [*text]):
        deltas = stream(f, choice, pieces)
        assert whole_message(deltas) == whole
        assert all(len(d) == 1 and [*d][0] in ("content", "tool_calls") for d in deltas)
        assert "" not in [d.get("content") for d in deltas]
        firsts = [c for d in deltas for c in d.get("tool_calls", ()) if "id" in c]
        assert [c["index"] for c in firsts] == [*range(len(firsts))] and all(
            c["function"]["arguments"] == "" for c in firsts
        )
    assert all(c["function"]["name"] in choice.names for c in whole[1])


LIKE_OTHERS = [
    "mistral_ids",
    "apertus",
    "gigachat",
    "nemotron",
    "apriel",
    "minimax_m1",
    "function_tags",
    "seed_oss",
    "minimax_m2",
    "deepseek_v4",
]  # other words, the same steps


@pytest.mark.parametrize("name", [n for n in HELD if n not in LIKE_OTHERS])
@settings(
    max_examples=250, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(data=st.data())
def test_however_it_is_cut(name, data):
    cut_at_will(name, data)


@pytest.mark.parametrize("name", LIKE_OTHERS)
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_however_one_like_it_is_cut(name, data):
    cut_at_will(name, data)


@each_format
@settings(max_examples=60, deadline=None, derandomize=True)
@given(text=st.text(st.sampled_from('<tol_ca>[TOLSARG]{"name: f}\n|x'), max_size=40))
def test_text_without_a_call_is_content(name, text):
    choice = check_tools(tools())
    assert parse_answer(fmt_of(name), choice, text) == (text, [])
    assert (
        parse_answer(None, choice, text)
        == parse_answer(fmt_of(name), check_tools(tools(), "none"), text)
        == parse_answer(fmt_of(name), None, text)
        == (text, [])
    )


@each_format
def test_as_it_streams(name):
    "Text comes at once, but what may begin a call; arguments come as they are written, before their end."
    f = fmt_of(name)
    p = ToolParser(f, check_tools(tools(f)))
    if f.trigger:
        assert p.feed("Well. ") == [dict(content="Well. ")]
        assert p.feed(f.trigger[:-1]) == [] and p.feed("!") == [dict(content=f.trigger[:-1] + "!")]
    said = [d for c in plain_layout(f"{f.first}{f.head}weather{f.middle}") for d in p.feed(c)]
    assert said == []  # whether these are arguments is still to be seen
    before, between, after = f.param
    parts = dict(
        json=('{"city":', ' "Oslo", "da', 'ys": 3}'),
        python=('city="Oslo",', " days=3", ")"),
        xml=(
            f"{before}city{between.replace(KIND, 'true')}Oslo{after}",
            f"{before}days{between.replace(KIND, 'false')}3{after}",
            f.end,
        ),
    )[f.style]
    fed = [p.feed(part) for part in parts]
    [[first, a], b, c] = fed
    call = first["tool_calls"][0]
    assert (call["index"], call["type"], call["function"]) == (
        0,
        "function",
        dict(name="weather", arguments=""),
    ) and call["id"].startswith("call_")
    parts = [d["tool_calls"][0] for d in (a, *b, *c)]
    assert a["tool_calls"][0]["function"]["arguments"]
    assert all([*x] == ["index", "function"] for x in parts) and json.loads(
        "".join(x["function"]["arguments"] for x in parts)
    ) == dict(city="Oslo", days=3)
    assert p.feed(f.tail) == [] == p.feed(f.last) == p.close()


def test_little_is_held_back():
    for name in HELD:
        f = fmt_of(name)
        for text in (
            "<" * 5000,
            " " * 5000,
            f.trigger * 400 + "x" * 900,
            plain_layout(f"{f.first}{f.head}") + "n" * 5000,
            plain_layout(f"{f.first}{f.head}now{f.middle}") + " " * 5000 + "!",
        ):
            p, said = ToolParser(f, check_tools(tools(f))), 0
            for i, c in enumerate(text, 1):
                said += sum(len(d.get("content", "")) for d in p.feed(c))
                assert i - said <= 300, (name, text[:40])


@each_format
def test_bad_calls_are_content(name):
    f, choice = fmt_of(name), check_tools(tools(fmt_of(name)))
    unknown = call_as(f, "then", {})
    assert parse_answer(f, choice, unknown) == (unknown, [])
    begun = f"{f.first}{f.head}now"
    assert parse_answer(f, choice, begun) == (begun, [])
    if f.trigger:
        good = unknown.replace("then", "now")
        content, calls = parse_answer(f, choice, unknown + good)
        assert content.startswith(f.trigger) and plain(calls) == [("now", {})], (
            "a good one after it is read"
        )
        assert parse_answer(f, choice, good + "Bye")[0] == "Bye"


@each_format
def test_an_answer_that_was_cut_off(name):
    "By max_tokens, in the middle of arguments: what there is of them stands there, and the finish reason stays 'length'."
    f, choice = fmt_of(name), check_tools(tools(fmt_of(name)))
    text = call_as(f, "weather", dict(city="Oslo", days=3))
    cut = re.search(".*?Oslo.*?(?=.days)", text, re.S)[0]
    content, [call] = parse_answer(f, choice, cut)
    assert call["function"]["arguments"] == '{"city": "Oslo"' + ", " * (
        f.style == "json" and cut.endswith(" ")
    ), (cut, content)


def test_ids_are_those_of_the_key():
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    ids = lambda key=None: [
        c["id"] for c in parse_answer(fmt_of("hermes"), check_tools(tools()), text, key)[1]
    ]
    assert ids("a") == ids("a") and not {*ids("a")} & {*ids("b")} and len({*ids(), *ids()}) == 4


# --- messages

CALLED = [
    dict(role="user", content="?"),
    dict(role="assistant", content=None, tool_calls=calls_of(("now", dict(a=1)))),
]


def test_messages_with_calls():
    found = as_messages(
        [*CALLED, dict(role="tool", tool_call_id="call_0", content=[dict(type="text", text="5")])]
    )
    assert (
        found[1]["tool_calls"][0]["function"] == dict(name="now", arguments=dict(a=1))
        and found[1]["content"] is None
    )
    assert found[2] == dict(role="tool", tool_call_id="call_0", content="5", name="now")
    assert CALLED[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}', (
        "what was given stays as it was"
    )
    assert (
        "tool_calls" not in as_messages([dict(role="assistant", content="x", tool_calls=None)])[0]
    )
    assert as_messages([dict(role="tool", content="x")])[0]["content"] == "x", (
        "a template of its own may know such messages"
    )


@pytest.mark.parametrize(
    "talk,words",
    [
        (
            [*CALLED, dict(role="tool", tool_call_id="call_9", content="5")],
            "message 2 has tool_call_id 'call_9'",
        ),
        ([*CALLED, dict(role="tool", content="5")], "message 2 has tool_call_id None"),
        ([dict(role="tool", tool_call_id="x", content="5"), *CALLED], "message 0 has"),
        ([dict(role="user", content="", tool_calls=calls_of(("f", {})))], "role assistant"),
        ([dict(role="assistant", tool_calls="x")], "must be a list"),
        ([dict(role="assistant", tool_calls=[5])], "tool_calls[0] must be"),
        ([dict(role="assistant", tool_calls=[dict(id=5, function=dict(name="f"))])], "with an id"),
        (
            [dict(role="assistant", tool_calls=[dict(id="a", function=dict(arguments="{}"))])],
            "has a name",
        ),
        (
            [dict(role="assistant", tool_calls=[dict(function=dict(name="f", arguments='{"a"'))])],
            "arguments must be a JSON object",
        ),
        (
            [dict(role="assistant", tool_calls=[dict(function=dict(name="f", arguments="[1]"))])],
            "arguments must be a JSON object",
        ),
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
    from batchlab.api import LLM

    tok = copy.deepcopy(tokenizer(special))
    tok.chat_template = TEMPLATES[name]
    return LLM(copy.deepcopy(model()), tok, max_num_seqs=8, compile=False)


def ask(i, talk=None, **body):
    body = (
        dict(
            messages=talk or [dict(role="user", content="Weather? " * (1 + i % 3))],
            max_tokens=400,
            seed=i,
            temperature=1.0,
        )
        | body
    )
    return dict(custom_id=f"r{i}", method="POST", url="/v1/chat/completions", body=body)


def run(path, lines, llm):
    path.mkdir()
    (path / "in.jsonl").write_text("".join(json.dumps(d) + "\n" for d in lines))
    job = Job(path / "in.jsonl", path / "out.jsonl", ordered=True)
    job.run(llm)
    return [json.loads(s) for s in (path / "out.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "name,special",
    [
        ("hermes", False),
        ("hermes", True),
        ("mistral", True),
        ("llama", False),
        ("deepseek_v31", True),
        ("phi4_mini", True),
    ],
)
def test_a_batch_file_with_tools(tmp_path, name, special):
    "By a model of random weights: whoever must call does, with arguments that fit, and the lines beside it say what they say alone."
    must = dict(tools=tools(), tool_choice="required", parallel_tool_calls=False)
    lines = [ask(i, **must) if i % 2 else ask(i, max_tokens=12) for i in range(12)]
    records = run(tmp_path / "a", lines, llm(name, special))
    assert [r["custom_id"] for r in records] == [d["custom_id"] for d in lines] and not any(
        r["error"] for r in records
    )
    ended = 0
    for i, r in enumerate(records):
        [choice] = r["response"]["body"]["choices"]
        message = choice["message"]
        if i % 2 == 0:
            assert "tool_calls" not in message and isinstance(message["content"], str)
        elif choice["finish_reason"] == "tool_calls":
            [call] = message["tool_calls"]
            jsonschema.validate(
                json.loads(call["function"]["arguments"]),
                check_tools(tools()).schema(call["function"]["name"]),
            )
            assert (
                message["content"] is None
                and r["response"]["body"]["usage"]["completion_tokens"] > 10
            )
            ended += 1
        else:
            assert choice["finish_reason"] == "length"
    assert ended >= 3
    alone = run(tmp_path / "b", lines[::2], llm(name, special))
    assert [r["response"]["body"]["choices"] for r in alone] == [
        r["response"]["body"]["choices"] for r in records[::2]
    ]
    again = run(tmp_path / "c", lines, llm(name, special))
    assert [r["response"]["body"]["choices"] for r in again] == [
        r["response"]["body"]["choices"] for r in records
    ], "and the ids are the same each time"


def test_a_conversation_goes_on_after_a_call(tmp_path):
    talk = [
        *CALLED,
        dict(role="tool", tool_call_id="call_0", content="5:12"),
        dict(role="user", content="Thanks."),
    ]
    for name in TEMPLATES:
        for i, r in enumerate(
            run(
                tmp_path / name,
                [
                    ask(0, talk, max_tokens=5),
                    ask(1, talk, max_tokens=5, tools=tools(fmt_of(name)), tool_choice="none"),
                ],
                llm(name),
            )
        ):
            assert (
                r["error"] is None
                and r["response"]["body"]["choices"][0]["finish_reason"] == "length"
            ), name


def test_lines_that_can_not_run(tmp_path):
    both = dict(tools=tools(), response_format=dict(type="json_object"))
    bad = [
        ask(0, **both),
        ask(1, tools=[dict(type="function")]),
        ask(2, tools=tools(), tool_choice="any"),
        ask(3, max_tokens=2),
        ask(4, tools=tools(), stop="x", max_tokens=2),
        ask(5, tools=tools(), n=2, max_tokens=2),
    ]
    found = run(tmp_path / "a", bad, llm())
    words = [
        "tools and response_format",
        "tools[0].function must be an object",
        "tool_choice must be",
        None,
        None,
        None,
    ]
    for w, r in zip(words, found):
        assert (r["error"] is None) == (w is None) and (w is None or w in r["error"]["message"]), r
    assert len(found[5]["response"]["body"]["choices"]) == 2
    from batchlab.api import LLM

    [r] = run(
        tmp_path / "b",
        [ask(0, tools=tools())],
        LLM(copy.deepcopy(model()), tiny_tokenizer(), compile=False),
    )
    assert (
        "its chat template takes none" in r["error"]["message"]
        and r["response"]["status_code"] == 400
    )
    text = dict(
        custom_id="t", method="POST", url="/v1/completions", body=dict(prompt="x", tools=tools())
    )
    assert "tools=" in parse_line(1, json.dumps(text).encode()).failure[1]


def test_a_table_shows_the_calls(tmp_path):
    (tmp_path / "in.jsonl").write_text(
        json.dumps(ask(1, tools=tools(), tool_choice=function("now"))) + "\n"
    )
    Job(tmp_path / "in.jsonl", tmp_path / "out.csv").run(llm())
    import csv

    [row] = csv.DictReader((tmp_path / "out.csv").open())
    assert row["finish_reason"] == "tool_calls" and json.loads(row["text"])["tool_calls"][0][
        "function"
    ] == dict(name="now", arguments="{}")


def test_reading_a_file_without_tools_needs_no_torch():
    import subprocess

    code = 'import sys, batchlab.jobs.lines as l; l.parse_line(1, b"{}"); sys.exit("torch" in sys.modules)'
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
