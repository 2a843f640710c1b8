"Text in and out: what a token adds to a text and its bytes, words as tokens, and a tokenizer of the engine's own; for byte-level BPE, SentencePiece and WordPiece."

import json, os, random, sys, threading
from dataclasses import replace
from functools import cache

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from batchlab import LLM, SamplingParams
from batchlab.core.text import Detokenizer, IncrementalDecoder, StopScanner
from batchlab.llm.outputs import CompletionOutput
from batchlab.core.sampling import Logprob
from batchlab.models.tiny import tiny_model, tiny_tokenizer
from batchlab.core.tokens import ids_of_text, make_twin, vocabulary_of, word_ids
from batchlab.jobs.schema import (
    Parts,
    chat_logprobs,
    echoed,
    text_logprobs,
    token_names,
    token_offsets,
)
from helpers import greedy, python

WORDS = "▁", "▁the", "▁cat", "▁sat", "s", "a", "t", "e", "!", "cat", "é"


@cache
def sentencepiece(strip=True):
    "Llama 2's kind, which drops the first space of a text, or Gemma's, which keeps it; with a byte for each token, and added ones."
    vocab = {}
    for w in ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *WORDS]:
        vocab.setdefault(w, len(vocab))
    t = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
            ignore_merges=True,
        )
    )
    t.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if strip else "never"
    )
    end = [decoders.Strip(" ", 1, 0)] if strip else []
    t.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *end]
    )
    t.add_special_tokens(
        [AddedToken(x, normalized=False, special=True) for x in ("<unk>", "<s>", "</s>", "<|end|>")]
    )
    t.add_tokens([AddedToken("<tool>", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=t, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@cache
def wordpiece():
    t = Tokenizer(
        models.WordPiece(
            {w: i for i, w in enumerate(["[UNK]", "[SEP]", "the", "cat", "##s", "a", "!", "\n"])},
            unk_token="[UNK]",
        )
    )
    t.pre_tokenizer, t.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    t.add_special_tokens([AddedToken("[SEP]", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=t, unk_token="[UNK]", eos_token="[SEP]")


@cache
def engine(name):
    t = dict(
        byte=tiny_tokenizer,
        llama=sentencepiece,
        gemma=lambda: sentencepiece(False),
        wordpiece=wordpiece,
    )[name]()
    return LLM(tiny_model("llama", vocab_size=300), t, max_num_seqs=4, max_num_batched_tokens=20)


ALL = "byte", "llama", "gemma", "wordpiece"
bytes_of = lambda t, text: [t.convert_tokens_to_ids(f"<0x{b:02X}>") for b in text.encode()]


def one(llm, prompt, max_tokens=1, **more):
    "The greedy answer to a prompt."
    params = SamplingParams(temperature=0, max_tokens=max_tokens, **more)
    return llm.generate([prompt], params)[0]


def answered(llm, prompt, ids, **kw):
    "What an answer to the ids `prompt` comes to that takes just the tokens `ids`."
    params = SamplingParams(temperature=0, max_tokens=len(ids), ignore_eos=True, **kw)
    d, told = Detokenizer(llm.tokenizer, params, prompt), []
    v = vocabulary_of(llm.tokenizer)
    for i in ids:
        step = {i: Logprob(-1.0, 1, v.text(i), v.bytes_of(i))}
        d.add(i, False, step[i])
        told.append(step)
    d.finish()
    return CompletionOutput(0, d.text, [*ids], -1.0, told, "length")


# --- words


@pytest.mark.parametrize("name", ["byte", "llama", "gemma"])
@pytest.mark.parametrize("word", ["\n", "\t", " ", "\nx", "cat", " cat", "  ", "é", "\r\n"])
def test_a_bad_word_is_the_tokens_that_spell_it(name, word):
    t = engine(name).tokenizer
    if "\nx" == word and name != "byte":
        word = "\na"
    core = word.lstrip(" ") or word
    found, v = word_ids(t, word), vocabulary_of(t)
    spelled = {b"".join(map(v.bytes_of, ids)).decode() for ids in found}
    assert core in spelled and spelled <= {core, " " + core} and len({*found}) == len(found)
    if core.isspace():
        assert spelled == {core}
    else:
        assert len(spelled) == 2


@pytest.mark.parametrize("name", ["byte", "llama", "gemma"])
def test_a_line_break_is_forbidden_and_the_space_is_not(name):
    llm = engine(name)
    v = vocabulary_of(llm.tokenizer)
    id_of = {v.bytes_of(i).decode("latin-1"): i for i in range(3, 259)}
    can = lambda c, *words: (
        not one(llm, [5, 6], allowed_token_ids=[id_of[c]], bad_words=words).error
    )
    for word, other in (("\n", " "), ("\t", " "), ("\n", "x"), ("\nx", "x"), ("\nx", "\n")):
        assert can(other, word), (word, other)
        assert len(word) > 1 or not can(word, word)
    end, x = id_of["\n"], id_of["x"]
    how = dict(allowed_token_ids=[end, x], bad_words=["\nx"], logit_bias={x: 1.0})
    assert tuple(one(llm, [5, 6, end], 2, **how).outputs[0].token_ids) != (end, x)


def test_words_of_a_vocabulary_that_joins_and_one_that_has_none():
    t = wordpiece()
    assert word_ids(t, "cats") == [tuple(t.convert_tokens_to_ids(["cat", "##s"]))]
    said = engine("wordpiece").generate([[2]], SamplingParams(bad_words=["dog"]))[0].error
    assert "no tokens for" in said and "dog" in said


# --- bytes and texts


def test_an_answer_goes_on_with_its_prompt():
    llm = engine("llama")
    t = llm.tokenizer
    the, cat, a = t.convert_tokens_to_ids(["▁the", "▁cat", "a"])
    params = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=[cat], logprobs=0)
    [out], [begun] = llm.generate(["the"], params), llm.generate([[t.bos_token_id]], params)
    assert out.outputs[0].text == " cat" == "".join(e.text for e in llm.stream(["the"], params))
    assert out.outputs[0].logprobs[0][cat].decoded_token == " cat"
    assert begun.outputs[0].text == "cat"  # at the beginning of a text
    chili, many, book = (bytes_of(t, text) for text in ("🌶", "日" * 40, "本"))
    for before, after, want in (
        ([the, *chili[:3]], chili[3:], "🌶"),
        ([the, *chili[:1]], [a], "a"),
        ([the, *chili[:2]], chili[3:], ""),
        (many, book, "本"),  # characters of bytes alone: the window begins with one
    ):
        d = IncrementalDecoder(t, True, before)
        assert "".join([*map(d.add, after), d.finish()]).strip("\ufffd") == want


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("name", ALL)
def test_prompt_and_answer_together_are_the_decoding_of_all_tokens(name, skip):
    t, rng = engine(name).tokenizer, random.Random(1)
    whole = lambda i: "\ufffd" not in vocabulary_of(t).text(i)
    is_byte = lambda i: t.convert_ids_to_tokens(i).startswith("<0x")
    safe = [i for i in range(len(t)) if whole(i) and not is_byte(i)]
    how = dict(skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    for _ in range(60):
        prompt, ids = (rng.choices(safe, k=rng.randrange(k)) for k in (20, 30))
        d = IncrementalDecoder(t, skip, prompt)
        answer = "".join([*map(d.add, ids), d.finish()])
        assert t.decode(prompt, **how) + answer == t.decode(prompt + ids, **how)


@pytest.mark.parametrize("text, cut", [("the cat é😀!", 0), ("é😀", 1), ("日本", 4), ("cat\n", 0)])
@pytest.mark.parametrize("name", ["byte", "llama", "gemma"])
def test_texts_of_log_probabilities_are_the_text_and_bytes_their_own(name, text, cut):
    llm = engine(name)
    t, v = llm.tokenizer, vocabulary_of(llm.tokenizer)
    ids = ids_of_text(t, text, False)
    ids = ids[: len(ids) - cut]
    c, bytes_told = answered(llm, [5, t.eos_token_id, 6], ids), b"".join(map(v.bytes_of, ids))
    assert cut or bytes_told.decode() in (text, " " + text)
    told = [step[i] for i, step in zip(ids, c.logprobs)]
    assert "".join(l.decoded_token for l in told) == c.text
    assert b"".join(l.token_bytes for l in told) == bytes_told
    chat, plain = chat_logprobs(c, 0), text_logprobs(c)
    assert bytes(b for x in chat["content"] for b in x["bytes"]) == bytes_told
    assert "".join(plain["tokens"]) == c.text
    ends = [*plain["text_offset"][1:], len(c.text)]
    assert [c.text[a:b] for a, b in zip(plain["text_offset"], ends)] == plain["tokens"]


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize(
    "name, words",
    [
        ("wordpiece", "the cat ##s !"),
        ("byte", "t h e Ġ c"),
        ("llama", "<0x0A> ▁the ▁cat ▁sat ! <0xC3> <0xA9>"),
        ("gemma", "▁the ▁cat !"),
        ("byte", "Ģ " * 50),  # no character, over several steps
    ],
)
def test_tokens_of_a_prompt_are_its_text(name, words, start):
    llm = engine(name)
    t = llm.tokenizer
    ids = [5, *t.convert_tokens_to_ids(words.split())]
    out = one(llm, ids, prompt_logprobs=1, prompt_logprob_start=start)
    told = [step[i].decoded_token for i, step in zip(ids, out.prompt_logprobs) if step]
    assert t.decode(ids[: start + 1]) + "".join(told) == t.decode(ids)


def test_no_two_candidates_have_one_name():
    c = one(engine("byte"), [5, 6], 3, allowed_token_ids=[*range(131, 259)], logprobs=5).outputs[0]
    found = text_logprobs(c)
    columns = (found[key] for key in ("tokens", "top_logprobs", "token_logprobs"))
    for name, top, value, step in zip(*columns, c.logprobs):
        assert top[name] == value and len(top) == len(step)
    named = (
        ("", -1.0, 1, "", b"\xf0"),
        ("bytes:\\x9f", -2.0, 2, "\ufffd", b"\x9f"),
        ("a", -2.0, 2, "a", b"a"),
        ("bytes:\\x61", -3.0, 3, "a", b"a"),
        ("token_id:11", -3.0, 3, "a", b"a"),
        ("token_id:12", -4.0, 4, "", b""),
        ("13", -4.0, 4, None),
    )
    candidates = {i: Logprob(*of) for i, (_, *of) in enumerate(named, 7)}
    assert token_names(candidates) == {i: name for i, (name, *_) in enumerate(named, 7)}
    top = chat_logprobs(c, 5)["content"][0]["top_logprobs"]
    assert len({x["token"] for x in top}) == 5 and all(len(x["bytes"]) <= 1 for x in top)


KEYS = "tokens", "text_offset"


def test_offsets_point_into_an_echo_and_a_stream():
    llm = engine("llama")
    t = llm.tokenizer
    cat = t.convert_tokens_to_ids("▁cat")
    prompt = [t.bos_token_id, t.convert_tokens_to_ids("▁the"), *bytes_of(t, "😀")]
    how = dict(allowed_token_ids=[cat], logprobs=1)
    out = one(llm, prompt, 2, **how, prompt_logprobs=1)
    whole = echoed(out, "the😀").outputs[0]
    found = text_logprobs(whole, first="<s>")
    assert whole.text == "the😀 cat cat"
    assert found["tokens"] == ["<s>", "the", "", "", "", "😀", " cat", " cat"]
    assert found["text_offset"] == [0, 0, 3, 3, 3, 3, 4, 8]
    parts, told, all_steps = Parts("text", "x", "m", 1), [], out.outputs[0].logprobs
    for n, end in ((1, None), (2, "length")):
        more = dict(text=" cat" * n, token_ids=[cat] * n, logprobs=all_steps[:n], finish_reason=end)
        lines = parts.since([replace(out.outputs[0], **more)]).decode().split("\n\n")[:-1]
        choices = [c for x in lines for c in json.loads(x.removeprefix("data: "))["choices"]]
        told += [pair for c in choices for pair in zip(*map(c["logprobs"].get, KEYS))]
    assert told == [(" cat", 0), (" cat", 4)]
    assert token_offsets("ab<eos>c", ["ab", "<eos>", "c"]) == [0, 2, 7, 8]
    assert token_offsets("abc", ["<s>", "ab", "<eos>", "c"]) == [0, 0, 2, 2, 3]
    stopped = one(llm, prompt, 4, **how, stop="t ca").outputs[0]
    assert stopped.text == " ca" and all(at <= 3 for at in text_logprobs(stopped)["text_offset"])


# --- a tokenizer of one's own


def test_what_others_do_with_the_tokenizer_reaches_no_prompt():
    t, stop, every = tiny_tokenizer(), threading.Event(), sys.getswitchinterval()
    llm = LLM(tiny_model("llama"), t, max_num_seqs=64)

    def cut():
        while not stop.is_set():
            t(["hello world, this is long", "a"], truncation=True, max_length=3, padding=True)

    threads = [threading.Thread(target=cut) for _ in range(2)]
    sys.setswitchinterval(1e-5)
    for x in threads:
        x.start()
    counts = lambda outs: [len(o.prompt_token_ids) for o in outs]
    try:
        texts = [f"prompt number {i} of some length" for i in range(40)]
        for _ in range(4):
            nine = dict(truncate_prompt_tokens=9)
            assert counts(llm.generate(texts, greedy(1))) == [*map(len, texts)]
            assert counts(llm.embed(texts, pooling_params=nine)) == [9] * 40
            assert counts(llm.embed(texts)) == [*map(len, texts)]
    finally:
        stop.set()
        for x in threads:
            x.join()
        sys.setswitchinterval(every)
    assert llm.get_tokenizer() is t is llm.tokenizer


@pytest.mark.parametrize("name", ALL)
def test_a_twin_encodes_the_same(name):
    t = engine(name).tokenizer
    twin = make_twin(t)
    assert twin is not t and twin._tokenizer.to_str() == t._tokenizer.to_str()
    for text in ("the cat", " a!\n", "<tool> é😀</s>", ""):
        assert ids_of_text(t, text) == t(text)["input_ids"] == twin(text)["input_ids"]


def test_tokens_and_a_template_that_a_user_gives_his_tokenizer_later_count():
    t = tiny_tokenizer()
    llm = LLM(tiny_model("llama", vocab_size=300), t)
    assert len(one(llm, "<tool>").prompt_token_ids) == 6
    t.add_tokens(["<tool>"])
    assert len(one(llm, "<tool>").prompt_token_ids) == 1
    t.chat_template = "{{ messages[0]['content'] }}#"
    assert llm.chat([dict(role="user", content="ab")], greedy(1))[0].prompt == "ab#"


# --- stop strings, and processes that are forked


def test_a_long_stop_string_costs_no_more_than_the_text_is_long():
    class Counting(str):
        looks = 0

        def startswith(self, *a):
            Counting.looks += len(a[0])
            return super().startswith(*a)

    scanner = StopScanner([Counting("ab" * 50_000)])
    given = ["x", "a", "b", "aa", "y"] * 20
    assert "".join([*map(scanner.add, given), scanner.finish()]) == "".join(given)
    assert Counting.looks < 10_000


def test_a_stop_string_that_did_not_count_is_not_found_later():
    scanner = StopScanner(["ab", "abcd"])
    assert scanner.add("ab", armed=False) + scanner.add("ce") == "abce"


def test_text_is_held_back_where_it_may_be_the_beginning_of_a_stop_string():
    rng = random.Random(0)
    draw = lambda least, most: "".join(rng.choices("ab", k=rng.randrange(least, most)))
    for _ in range(3000):
        text, words = draw(0, 12), [draw(1, 8) for _ in "12"]
        begun = (k for w in words for k in range(1, len(w)) if text.endswith(w[:k]))
        if not any(w in text for w in words):
            assert StopScanner(words).add(text) == text[: len(text) - max(begun, default=0)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_gets_an_error_at_once():
    "In a process of its own, as pytest's has threads; the thread that holds the locks runs when it forks."
    code = """
import asyncio, faulthandler, os
from batchlab import AsyncLLM, LLM
from batchlab.errors import EngineError
from batchlab.models.tiny import tiny_model, tiny_tokenizer
llm = LLM(tiny_model('llama'), tiny_tokenizer())
shared = AsyncLLM(llm)
async def one(): return [o async for o in shared.generate('x')]
calls = [lambda: llm.generate('x'), lambda: llm.embed('x'), lambda: next(llm.stream('x')), llm.step, llm.start, llm.stop, llm.close, llm.pause, llm.resume,
         lambda: llm.add_request('x'), lambda: llm.cancel('0'), lambda: asyncio.run(one()), lambda: asyncio.run(shared.shutdown())]
asyncio.run(one())
for held in (False, True):
    if held: llm.loop.progress.acquire()
    if not (pid := os.fork()):
        faulthandler.dump_traceback_later(60, exit=True)
        said = []
        for call in calls:
            try: call()
            except EngineError as e: said.append('forked' in str(e))
        os._exit(said != [True] * len(calls))
    if held: llm.loop.progress.release()
    assert os.waitpid(pid, 0)[1] == 0, held
assert len(llm.generate('x')[0].outputs[0].token_ids) and not asyncio.run(shared.shutdown())
"""
    done = python(code, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-3000:]


class Stripping(PreTrainedTokenizer):
    "A tokenizer in Python that strips what it decodes."

    words = ["<unk>", "<s>", "</s>", *"▁ abcdefghij.,\n", "▁the", "▁sea", "é", "日"]
    vocab_size = property(lambda self: len(self.words))

    def get_vocab(self):
        return {w: i for i, w in enumerate(self.words)}

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.get_vocab().get(token, 0)

    def _convert_id_to_token(self, index):
        return self.words[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens).replace("▁", " ").strip()


@pytest.mark.parametrize("name", ["byte", "llama", "python"])
def test_a_stream_of_drawn_ids_is_their_decoding(name):
    "Bytes that form no character, special tokens in the middle, and characters of a token for each byte."
    special = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    t = Stripping(**special) if name == "python" else engine(name).tokenizer
    rng, size = random.Random(1), len(t)
    # SentencePiece reads a run of bytes as one, and a broken byte breaks the whole ones before it
    pieces = [[i] for i in range(size) if not t.convert_ids_to_tokens(i).startswith("<0x")]
    pieces += [bytes_of(t, c) for c in "aé日😀"] if name == "llama" else []
    for trial in range(150):
        skip, n = trial % 2 == 0, rng.randrange(120)
        drawn = [sum(rng.choices(pieces, k=n), [])]
        if name == "byte":  # and no byte of these is a letter
            drawn.append([rng.randrange(131, 259) for _ in range(3 * n)])
        for ids in drawn:
            d = IncrementalDecoder(t, skip)
            whole = t.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert "".join([*map(d.add, ids), d.finish()]) == whole


def test_bytes_after_a_whole_character_break_it_in_the_decoding_and_not_in_a_stream():
    t = engine("llama").tokenizer
    ids = [*bytes_of(t, "日"), bytes_of(t, "é")[0]]
    d = IncrementalDecoder(t)
    assert "日" not in t.decode(ids)
    assert "".join([*map(d.add, ids), d.finish()]).startswith("日")
