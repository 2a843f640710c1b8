"Answers held to a form: every schema that is taken is kept, by any writer, and no other row notices."
import copy, functools, json, re, sys

import jsonschema, pytest, torch
from hypothesis import HealthCheck, given, settings, strategies as st

pytest.importorskip('llguidance', reason='structured outputs need llguidance, the extra `structured`')
from batchlab.llm import LLM
from batchlab.work.jobs import Job
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.errors import ModelError
from batchlab.sampling import ParamError, SamplingParams, StructuredOutputsParams
from batchlab.structured import Grammars, WHITESPACE, check_schema

PERSON = dict(type='object', required=['name', 'age', 'tags'], properties=dict(
    name=dict(type='string', minLength=1, maxLength=6), age=dict(type='integer', minimum=0, maximum=130),
    tags=dict(type='array', items=dict(enum=['a', 'b"c', None, 7]), maxItems=2)))


pytestmark = pytest.mark.usefixtures('one_thread')


@functools.cache
def model(): return tiny_model('llama', num_hidden_layers=1)

def engine(**kw): return LLM(copy.deepcopy(model()), tiny_tokenizer(), **{'max_num_seqs': 8, 'compile': False} | kw)

@functools.cache
def llm(): return engine()

@functools.cache
def grammars(): return Grammars(tiny_tokenizer(), llm().vocab_size, llm().eos_ids)


def wish(seed=0, n=1, max_tokens=400, temperature=1., **form):
    form = dict(disable_any_whitespace=True) | form if {'json', 'json_object'} & {*form} else form
    return SamplingParams(seed=seed, n=n, max_tokens=max_tokens, temperature=temperature, structured_outputs=form)

def valid(text, schema):
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    return True


def walk(schema, draw, most=400, **form):
    "Text written by choosing among the allowed ids with `draw`, which favours short ways out; None if there was no end."
    g, words = grammars().of(wish(json=schema, **form)), words_of()
    ids = []
    for _ in range(most):
        x = g.mask_(torch.zeros(1, len(words)), ids)
        some = x[0].isfinite().nonzero()[:, 0].tolist()
        assert some, f'nothing may follow {bytes(b"".join(words[i] for i in ids))!r}'
        more = [i for i in some if i not in llm().eos_ids]
        if not more or len(more) < len(some) and draw(3) != 1: return b''.join(words[i] for i in ids).decode()
        some = more
        out = [i for i in some if words[i] in (b'"', b'}', b']', b',', b':')]
        ids.append(out[draw(len(out))] if out and draw(2) else some[draw(len(some))])

@functools.cache
def words_of():
    return [grammars().vocabulary.decode_bytes([i]) for i in range(llm().vocab_size)]


names = st.text('abc"\\é 😀', min_size=1, max_size=4)
numbers = st.integers(-30, 30)
leaves = st.one_of(
    st.just(dict(type='null')), st.just(dict(type='boolean')),
    st.tuples(numbers, st.integers(0, 40)).map(lambda t: dict(type='integer', minimum=t[0], maximum=t[0] + t[1])),
    st.tuples(numbers, st.integers(1, 40)).map(lambda t: dict(type='number', minimum=t[0], exclusiveMaximum=t[0] + t[1])),
    st.sampled_from([3, 5]).map(lambda n: dict(type='integer', multipleOf=n)),
    st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda t: dict(type='string', minLength=t[0], maxLength=sum(t))),
    st.sampled_from(['^[a-c]{1,3}$', '^(x|yz)+$', r'^\d{2}-\w$', '^[^a]{1,2}$', '^.{1,3}$', '^[ -~]{1,2}$', r'^\s?\S$']).map(lambda p: dict(type='string', pattern=p)),
    st.sampled_from(['date', 'uuid', 'ipv6', 'unheard-of']).map(lambda f: dict(type='string', format=f)),
    st.lists(st.one_of(names, numbers, st.none(), st.booleans()), min_size=1, max_size=4).map(lambda v: dict(enum=v)),
    st.one_of(names, numbers, st.none()).map(lambda v: dict(const=v)), st.just(dict(type=['string', 'null'], maxLength=3)))

def grown(inner):
    objects = st.tuples(st.dictionaries(names, inner, min_size=1, max_size=3), st.integers(0, 3)).map(
        lambda t: dict(type='object', properties=t[0], required=[*t[0]][:t[1]], additionalProperties=False))
    return st.one_of(objects, st.lists(inner, min_size=1, max_size=3).map(lambda v: dict(anyOf=v)),
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(lambda t: dict(type='array', items=t[0], minItems=t[1], maxItems=t[1] + t[2])),
        st.lists(inner, min_size=1, max_size=2).map(lambda v: dict(type='array', prefixItems=v, items=False)),
        inner.map(lambda s: dict(type='object', additionalProperties=s, maxProperties=2)))

schemas = st.recursive(leaves, grown, max_leaves=5)


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=schemas, seed=st.integers(0, 2**32), tight=st.booleans())
def test_a_schema_that_is_taken_is_kept(schema, seed, tight):
    "Whatever writer: one that chooses at random among what the mask allows."
    import random
    rng = random.Random(seed)
    check_schema(schema)
    for _ in range(3):
        text = walk(schema, lambda n: rng.randrange(n), disable_any_whitespace=tight)
        assert text is None or valid(text, schema)


@pytest.mark.parametrize('bad', [
    dict(type='array', items={}, uniqueItems=True), dict(type='array', items={}, contains={}), {'not': {}}, dict(oneOf=[dict(minimum=3), dict(type='integer')]),
    {'if': {}, 'then': {}}, {'$ref': 'http://x/y'}, {'$ref': '#x'}, dict(type='string', pattern='a"b'), dict(type='string', pattern=r'a\\b'), dict(type='string', pattern='a\nb'),
    dict(type='string', pattern=r'\x22'), dict(type='object', patternProperties={'a"': {}}),
    dict(type='integer', enum=[True]), dict(type='object', properties=dict(a={}), required=['b']), dict(type='object', properties=dict(a={}, b={}, c={}), minProperties=2), dict(type='object', propertyNames=dict(maxLength=2)),
    dict(type='object', properties=dict(a={}), dependentRequired=dict(a=['b'])), dict(anyOf=[dict(type='null')], type='string'), dict(type='array', items=[{}]),
    dict(type='object', properties=dict(a=dict(type='null')), additionalProperties=True),                     # a key may be written "\\u0061"
    dict(type='object', properties=dict(ab=dict(type='null')), patternProperties={'^a': dict(enum=[None, 1])}, additionalProperties=False),
    dict(type='object', additionalProperties=dict(type='null'), minProperties=2),                             # {"a":null,"a":null}
    dict(oneOf=[dict(type='object', properties=dict(a={})), dict(type='object', properties=dict(a={}, b={}), required=['b'])]),      # both fit
    dict(type='number', exclusiveMinimum=0, exclusiveMaximum=.5), dict(type='number', minimum=-1.5, exclusiveMaximum=-1), dict(exclusiveMinimum=0, anyOf=[dict(maximum=.5)]),
    dict(allOf=[dict(type='number', exclusiveMinimum=0), dict(maximum=.5)]),
    dict(type='thing'), dict(type='integer', minimum=5, maximum=3), dict(enum=[]), {'$ref': '#/nowhere'}, dict(type='string', pattern='(a'), '{"type":', '5', '[]',
    dict(properties=5), dict(type='object', required=5), dict(type={}), dict(enum=3), dict(anyOf=3), dict(type='object', properties=dict(a=3)), dict(type=5),
    dict(type='string', pattern=5), dict(type='string', maxLength='x'), dict(type='array', items={}, maxItems=-1)])
def test_what_is_not_kept_is_refused_alone(bad):
    outs = llm().generate(['bad', 'good'], [wish(json=bad), SamplingParams(max_tokens=2)])
    assert 'structured_outputs' in outs[0].error and '\n' not in outs[0].error and '/project' not in outs[0].error
    assert outs[1].error is None and len(outs[1].outputs[0].token_ids) == 2


@pytest.mark.parametrize('schema', [
    dict(oneOf=[{}]), dict(oneOf=[dict(type='null'), dict(type='integer', maximum=9)]), dict(allOf=[{}, {}]), dict(allOf=[dict(type='integer'), dict(minimum=3), dict(maximum=9)]),
    {'$ref': '#/$defs/n', 'minimum': 3, '$defs': dict(n=dict(type='integer', maximum=12))}, dict(minimum=3), dict(type='string', pattern='^a+$', maxLength=3),
    dict(type='string', format='date', minLength=3), dict(type='number', multipleOf=2, minimum=0, maximum=30), dict(type='integer', multipleOf=7, minimum=2, maximum=99),
    dict(type='integer', multipleOf=.5, minimum=0, maximum=9), dict(type='integer', enum=[1, 'a']),
    dict(allOf=[dict(type='object', properties=dict(a=dict(type='null')), required=['a']), dict(properties=dict(b=dict(type='null')), required=['b'])]),
    dict(type='object', additionalProperties=dict(type='null'), minProperties=1), dict(type='number', exclusiveMinimum=0, maximum=1), dict(type='integer', exclusiveMinimum=0, maximum=1),
    dict(oneOf=[dict(type='object', properties=dict(k=dict(const=k), v={'type': t}), required=['k', 'v']) for k, t in (('a', 'null'), ('b', 'boolean'))]),
    dict(type='array', items=dict(type='boolean'), uniqueItems=False, maxItems=3), {'type': 'string', 'maxLength': 2, 'x-guidance': dict(lenient=True)}], ids=str)
def test_more_that_is_kept(schema):
    import random
    rng, ends = random.Random(0), 0
    for _ in range(8):
        text = walk(schema, lambda n: rng.randrange(n), disable_any_whitespace=True)
        ends += text is not None and valid(text, schema)
    assert ends >= 4


def test_bombs_are_refused_or_cheap():
    deep = {'type': 'null'}
    for _ in range(3000): deep = dict(type='array', items=deep)
    for form in (dict(json=deep), dict(json='{"type":"array","items":' * 9000 + '{}' + '}' * 9000), dict(regex='(' * 9000 + 'a' + ')' * 9000),
                 dict(regex='a' * 2**18), dict(json=dict(enum=['x' * 2**18]))):
        assert 'structured_outputs' in llm().generate('x', wish(max_tokens=2, **form))[0].error
    for form in (dict(json=dict(type='string', maxLength=10**6)), dict(regex='(x{0,1000}){0,1000}')):
        assert llm().generate('x', wish(max_tokens=2, **form))[0].error is None


FORMS = [None, dict(json=PERSON), dict(regex='[a-z]{3,9}'), None, dict(choice=['one', 'two "2"\n', 'dréi']), dict(json_object=True),
         dict(grammar='root ::= "a" root | "b"'), None, dict(json=dict(type='string', pattern='^[0-9]{4}$'))]
PROMPTS = [f'{"word " * (i % 5)}{i}' for i in range(len(FORMS))]

def mixed_params(**kw): return [wish(seed=i, **(f or {}), **kw) if f else SamplingParams(seed=i, max_tokens=40, temperature=1.) for i, f in enumerate(FORMS)]

@functools.cache
def alone():
    "Each request by itself, without an engine's company; those without a form by an engine that never saw one."
    fresh = engine()
    free = [i for i, f in enumerate(FORMS) if f is None]
    outs = {i: fresh.generate([PROMPTS[i]], [mixed_params()[i]])[0] for i in free}
    assert fresh.grammars is None
    return [outs[i] if i in outs else llm().generate([PROMPTS[i]], [mixed_params()[i]])[0] for i in range(len(FORMS))]


@pytest.mark.parametrize('how', [dict(), dict(strategy='loop'), dict(strategy='static'), dict(strategy='bucketed'), dict(strategy='prefix'),
                                 dict(max_num_seqs=3, max_num_batched_tokens=8), dict(compile='auto')], ids=str)
def test_rows_beside_are_unchanged(how):
    "In any strategy, few slots, chunks: the tokens of a request alone, structured or free."
    e = engine(**how)
    outs = e.generate(PROMPTS, mixed_params())
    assert [o.outputs[0].token_ids for o in outs] == [o.outputs[0].token_ids for o in alone()]
    for form, o in zip(FORMS, outs):
        text, c = o.outputs[0].text, o.outputs[0]
        if form is None or c.finish_reason != 'stop': continue
        if 'json' in form: assert valid(text, form['json'])
        if 'regex' in form: assert re.fullmatch(form['regex'], text)
        if 'choice' in form: assert text in form['choice']
        if 'grammar' in form: assert re.fullmatch('a*b', text)
        if 'json_object' in form: assert isinstance(json.loads(text), dict)


def test_put_off_and_computed_again():
    "Preempted in the middle, and after a step that broke off, a request goes on where its form was."
    e, outs = engine(), {}
    for k, event in enumerate(e.stream(PROMPTS, mixed_params())):
        if event.finished: outs[event.index] = event.output
        scheduler, runner = e.engines['packed'].scheduler, e.engines['packed'].runner
        if k % 9 == 5 and scheduler.running: scheduler.preempt(scheduler.running[-1])
        if k == 40:
            execute = runner.execute
            def broken(batch):
                runner.execute = execute
                raise MemoryError
            runner.execute = broken
    assert e.stats().preemptions > 3 and e.stats().recomputed > 50
    assert [outs[i].outputs[0].token_ids for i in range(len(outs))] == [o.outputs[0].token_ids for o in alone()]


def test_every_answer_is_valid():
    params = [wish(seed=i, json=PERSON, disable_any_whitespace=i % 2 == 0, temperature=[0, .7, 1.5][i % 3], max_tokens=900) for i in range(60)]
    outs = [o.outputs[0] for o in llm().generate([f'person {i}' for i in range(60)], params)]
    assert {o.finish_reason for o in outs} == {'stop'}
    assert sum(valid(o.text, PERSON) for o in outs) == 60
    assert not re.search(f'[ \n]{{{WHITESPACE + 1}}}', ''.join(o.text for o in outs))


def test_n_seeds_logprobs_and_stop():
    out = llm().generate('pick', SamplingParams(n=4, seed=3, max_tokens=20, logprobs=2, temperature=1., structured_outputs=dict(regex='[ab]{4,8}')))[0]
    assert len({c.text for c in out.outputs}) > 1 and all(re.fullmatch('[ab]{4,8}', c.text) and c.finish_reason == 'stop' for c in out.outputs)
    again = llm().generate('pick', SamplingParams(seed=5, max_tokens=20, temperature=1., structured_outputs=dict(regex='[ab]{4,8}')))[0]
    assert again.outputs[0].token_ids == out.outputs[2].token_ids
    for c in out.outputs:                              # of the model itself, before any mask
        assert all(i in d and len(d) >= 2 for i, d in zip(c.token_ids, c.logprobs))
    cut = llm().generate('x', SamplingParams(max_tokens=3, temperature=0, structured_outputs=dict(regex='a{9}')))[0].outputs[0]
    assert (cut.text, cut.finish_reason) == ('aaa', 'length')
    stopped = llm().generate('x', SamplingParams(max_tokens=30, temperature=0, stop='aab', structured_outputs=dict(regex='aaaab{3}')))[0].outputs[0]
    assert (stopped.text, stopped.stop_reason) == ('aa', 'aab')
    stuck = llm().generate(['x', 'y'], [SamplingParams(min_tokens=5, structured_outputs=dict(choice=['a'])), SamplingParams(max_tokens=1)])
    assert 'structured_outputs' in stuck[0].error and stuck[1].error is None


def test_verify_knows_the_grammar():
    outs = llm().generate(PROMPTS, mixed_params())
    report = llm().verify(outs)
    assert report.ok and report.tokens > 20
    i = next(i for i, f in enumerate(FORMS) if f and 'regex' in f)
    outs[i].outputs[0].token_ids[1] = tiny_tokenizer().convert_tokens_to_ids('7')
    assert not llm().verify([outs[i]]).ok


@pytest.mark.parametrize('text', ['[' * 2**16, '"' + '\\"' * 2**15, '"a" [b' * 2**13])
def test_a_grammar_that_does_not_close_is_refused_at_once(text):
    "In time that grows with its length, not with its square: else this would run for minutes."
    with pytest.raises(ParamError, match='grammar'): grammars().of(wish(grammar='root ::= ' + text))


def test_a_grammar_is_a_function_of_the_tokens():
    ids = lambda s: [tiny_tokenizer().convert_tokens_to_ids(c) for c in s]
    make = lambda: grammars().of(wish(regex='(ab|ac)*d'))
    g, x = make(), lambda: torch.zeros(2, llm().vocab_size)[:1]
    for text in ('', 'a', 'ab', 'abac', 'ab', 'aca', 'a', 'abacd', '', 'acabab', 'x', 'ab'):
        assert torch.equal(g.mask_(x(), ids(text)), make().mask_(x(), ids(text))), text
    wide = g.mask_(torch.zeros(1, llm().vocab_size + 40), ids('a'))          # logits beyond the vocabulary are no tokens
    assert wide[0].isfinite().nonzero()[:, 0].tolist() == sorted(ids('bc'))
    assert g.mask_(x(), ids('d') + [*llm().eos_ids]).isfinite().sum() == 0


def test_compiled_once(monkeypatch):
    e = engine()
    e.generate('x', wish(json=PERSON, max_tokens=2))
    e.generate(['a', 'b', 'c'], [wish(seed=i, json=json.loads(json.dumps(PERSON)), max_tokens=2) for i in range(3)])
    assert e.grammars.compiled.cache_info().misses == 1


def test_wishes_that_make_no_sense():
    for bad in ({}, dict(regex='a', choice=['b']), dict(regex=5), dict(choice=[]), dict(choice=[1]), dict(json=5), dict(xml='a'), 'json', dict(json_object='yes')):
        with pytest.raises(ParamError, match='structured_outputs'): SamplingParams(structured_outputs=bad)
    with pytest.raises(ParamError, match='ignore_eos'): SamplingParams(structured_outputs=dict(regex='a'), ignore_eos=True)
    assert SamplingParams.of(dict(structured_outputs=dict(regex='a'))).structured_outputs == StructuredOutputsParams(regex='a')
    pydantic = pytest.importorskip('pydantic', reason='a pydantic model as a schema needs pydantic')
    class Pet(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=5)
        legs: int = pydantic.Field(ge=0, le=9)
    out = llm().generate('x', wish(json=Pet))[0].outputs[0]
    assert 0 <= Pet.model_validate_json(out.text).legs <= 9


def test_without_library_or_tokenizer(monkeypatch):
    bare = LLM(copy.deepcopy(model()), None, compile=False)
    with pytest.raises(ModelError, match='needs a tokenizer'): bare.generate([[5, 6], [7]], wish(regex='a'))
    held, free = bare.generate([[5, 6], [7]], [wish(regex='a'), SamplingParams(max_tokens=1, detokenize=False)])      # those that can run do
    assert 'needs a tokenizer' in held.error and free.error is None
    monkeypatch.setitem(sys.modules, 'llguidance', None)
    monkeypatch.setitem(sys.modules, 'llguidance.hf', None)
    with pytest.raises(ModelError, match=r"pip install 'batchlab\[structured\]'"): engine().generate(['a', 'b'], wish(regex='a'))


def sentencepiece_like():
    "A tokenizer of the other family: pieces with a space as `▁`, and bytes as a way out."
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast
    pieces = ['<unk>', '<s>', '</s>', *(f'<0x{b:02X}>' for b in range(256)), '▁', *'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,.-', '▁a', '▁{', 'ab', 'true', '▁null', '▁12']
    tok = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token='<unk>', byte_fallback=True, fuse_unk=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend('▁'), normalizers.Replace(' ', '▁')])
    tok.decoder = decoders.Sequence([decoders.Replace('▁', ' '), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(' ', 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tok, unk_token='<unk>', bos_token='<s>', eos_token='</s>')


def test_any_character_of_a_gbnf_grammar_may_be_a_line_break():
    "Between quotes, in a set and in a comment a point is a point."
    def takes(grammar, text):
        g, ids = grammars().of(wish(grammar=grammar)), tiny_tokenizer()(text)['input_ids']
        return g.follow(ids) and bool(g.mask_(torch.zeros(1, llm().vocab_size), ids)[0, [*llm().eos_ids]].isfinite().all())
    for text in ('axb', 'a\nb', 'aéb', 'a😀b', 'a"b', 'a.b'): assert takes('root ::= "a" . "b"', text), text
    for text in ('ab', 'axxb', 'ax'): assert not takes('root ::= "a" . "b"', text), text
    assert takes('root ::= "a" .* "b"', 'a\n\n x\nb') and takes('root ::= ( "x" | . )+', 'x\n')
    for text in ('x', '\n'): assert not takes(r'root ::= "." | [.] | "\"." | [\].]   # any .', text)
    assert takes(r'root ::= "\"." | [\].]', '".') and takes(r'root ::= "\"." | [\].]', ']') and takes(r'root ::= [.]', '.')


def test_an_empty_pattern_is_a_pattern():
    out = llm().generate('x', wish(regex='', max_tokens=4))[0]
    assert out.error is None and (out.outputs[0].text, out.outputs[0].finish_reason) == ('', 'stop')


def test_the_other_family_of_tokenizers():
    tok = sentencepiece_like()
    e = LLM(tiny_model('llama', num_hidden_layers=1, vocab_size=len(tok) + 21, eos_token_id=tok.eos_token_id, bos_token_id=1), tok, compile=False)
    outs = e.generate(['abc', 'a', '12 ab'] * 4, [wish(seed=i, json=PERSON) for i in range(12)])
    for o in outs: assert o.outputs[0].finish_reason == 'stop' and valid(o.outputs[0].text, PERSON)
    for o in e.generate(['abc', 'a'] * 4, [wish(seed=i, regex='[a-z]{2,4} [0-9]é', max_tokens=40) for i in range(8)]):
        assert re.fullmatch('[a-z]{2,4} [0-9]é', o.outputs[0].text)


def test_special_tokens_are_no_text():
    tok = tiny_tokenizer()
    g = grammars().of(wish(regex='.{1,40}'))
    hidden = {*tok.all_special_ids} - {*llm().eos_ids}
    x = g.mask_(torch.zeros(1, llm().vocab_size), [tok.convert_tokens_to_ids('a')])
    assert hidden and not x[0, [*hidden]].isfinite().any() and x[0, [*llm().eos_ids]].isfinite().all()


def chat_line(i, **body):
    body = dict(model='m', messages=[dict(role='user', content='who? ' * (1 + i % 4))], max_tokens=500, seed=i) | body
    return dict(custom_id=f'r{i}', method='POST', url='/v1/chat/completions', body=body)

def test_a_batch_file_with_response_formats(tmp_path):
    "100% of JSON-schema requests parse and validate, and the lines beside them say what they say without them."
    schema = dict(type='json_schema', json_schema=dict(name='person', strict=True, schema=PERSON))
    wanted = [schema, None, dict(type='json_object'), None, dict(type='text'), schema, dict(type='json_schema', json_schema=dict(schema=dict(uniqueItems=True)))]
    lines = [chat_line(i, **{} if not (f := wanted[i % 7]) else dict(response_format=f), **dict(max_tokens=20) if not f else {}) for i in range(42)]
    free = [l for l in lines if 'response_format' not in l['body']]
    for name, some in dict(all=lines, free=free).items():
        (tmp_path/f'{name}.jsonl').write_text(''.join(json.dumps(l) + '\n' for l in some), encoding='utf-8')
        Job(tmp_path/f'{name}.jsonl', tmp_path/f'{name}.out.jsonl').run(llm())
    read = lambda name: {d['custom_id']: d for d in map(json.loads, (tmp_path/name).read_text(encoding='utf-8').splitlines())}
    got, same = read('all.out.jsonl'), read('free.out.jsonl')
    text = lambda d: d['response']['body']['choices'][0]['message']['content']
    held = [i for i in range(42) if wanted[i % 7] is schema]
    assert len(held) == 12 and sum(valid(text(got[f'r{i}']), PERSON) for i in held) == 12
    assert len(same) == 12 and {k: text(d) for k, d in same.items()} == {k: text(got[k]) for k in same}
    bad = [got[f'r{i}'] for i in range(42) if i % 7 == 6]
    assert all('uniqueItems' in d['error']['message'] and d['response']['status_code'] == 400 for d in bad)
    objects = [got[f'r{i}']['response']['body']['choices'][0] for i in range(42) if i % 7 == 2]
    assert all(isinstance(json.loads(c['message']['content']), dict) for c in objects if c['finish_reason'] == 'stop')


def test_an_inherited_object_gets_the_properties_of_both():
    base = dict(type='object', properties=dict(a=dict(type='null')), required=['a'])
    more = dict(type='object', properties=dict(b=dict(type='null')), required=['b'])
    for schema in ({'$defs': dict(base=base), 'allOf': [{'$ref': '#/$defs/base'}, more]}, {'$defs': dict(base=base), '$ref': '#/$defs/base', **more}):
        import random
        rng = random.Random(1)
        texts = [walk(schema, lambda n: rng.randrange(n), disable_any_whitespace=True) for _ in range(30)]
        ended = [t for t in texts if t is not None]
        assert ended and all(valid(t, schema) for t in ended)


def test_grammars_of_llama_cpp():
    "Escapes as they write them, and no rule twice."
    from batchlab.structured import grammar_text
    from batchlab.params import StructuredOutputsParams
    of = lambda text: grammar_text(StructuredOutputsParams(grammar=text))
    for text in (r'root ::= "\u00e9" [\u0041-\u0043]', r'root ::= [a\-z]+', r'root ::= "\\u0041"'): assert of(text)
    with pytest.raises(ParamError, match="'foo' is defined twice"): of('root ::= foo\nfoo ::= "a"\nfoo ::= "b"')
