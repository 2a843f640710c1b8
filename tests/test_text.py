"Text in and out: what a token adds to a text and its bytes, words as tokens, and a tokenizer of the engine's own; for byte-level BPE, SentencePiece and WordPiece."

import json, os, random, subprocess, sys, threading
from dataclasses import replace
from functools import cache

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from batchlab import LLM, SamplingParams
from batchlab.core.text import Detokenizer, IncrementalDecoder
from batchlab.errors import ParamError
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
    return LLM(tiny_model("llama", vocab_size=300), t)


ALL = "byte", "llama", "gemma", "wordpiece"
bytes_of = lambda t, text: [t.convert_tokens_to_ids(f"<0x{b:02X}>") for b in text.encode()]


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
    one = {v.bytes_of(i): i for i in range(3, 259)}

    def can(ids, **kw):
        return not llm.generate(
            [[5, 6]], SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=ids, **kw)
        )[0].error

    for word, other in (("\n", b" "), ("\t", b" "), ("\n", b"x"), ("\nx", b"x"), ("\nx", b"\n")):
        if len(word) == 1:
            assert not can([one[word.encode()]], bad_words=[word])
        assert can([one[other]], bad_words=[word]), (word, other)
    seen = (
        llm.generate(
            [[5, 6, one[b"\n"]]],
            SamplingParams(
                temperature=0,
                max_tokens=2,
                allowed_token_ids=[one[b"\n"], one[b"x"]],
                bad_words=["\nx"],
                logit_bias={one[b"x"]: 1.0},
            ),
        )[0]
        .outputs[0]
        .token_ids
    )
    assert (one[b"\n"], one[b"x"]) != tuple(seen)


def test_words_of_a_vocabulary_that_joins_and_one_that_has_none():
    t = wordpiece()
    assert word_ids(t, "cats") == [tuple(t.convert_tokens_to_ids(["cat", "##s"]))]
    with pytest.raises(ParamError, match="no tokens for"):
        word_ids(t, "dog")
    said = engine("wordpiece").generate([[2]], SamplingParams(bad_words=["dog"]))[0].error
    assert "no tokens for" in said and "dog" in said


# --- bytes and texts


@pytest.mark.parametrize("name", ["byte", "llama", "gemma"])
def test_bytes_of_all_tokens_are_the_text(name):
    t, rng = engine(name).tokenizer, random.Random(0)
    v, space = vocabulary_of(t), " " if name == "llama" else ""
    for _ in range(50):
        text = "".join(
            rng.choices(
                ["cat", " cat", "é", "😀", "日", "\n", " ", "the", "!"], k=rng.randrange(1, 12)
            )
        )
        assert b"".join(map(v.bytes_of, ids_of_text(t, text, False))).decode() in (
            text,
            space + text,
        )
    assert v.bytes_of(t.eos_token_id).decode() == t.eos_token == v.text(
        t.eos_token_id
    ) and v.skipped(t.eos_token_id)


def test_an_answer_goes_on_with_its_prompt():
    llm = engine("llama")
    t = llm.tokenizer
    cat = t.convert_tokens_to_ids("▁cat")
    params = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=[cat], logprobs=0)
    out = llm.generate(["the"], params)[0]
    assert out.outputs[0].text == " cat" == "".join(e.text for e in llm.stream(["the"], params))
    assert out.outputs[0].logprobs[0][cat].decoded_token == " cat"
    assert (
        llm.generate([[t.bos_token_id]], params)[0].outputs[0].text == "cat"
    )  # at the beginning of a text
    chili = bytes_of(t, "🌶")
    for before, after, want in (
        (chili[:3], chili[3:], "🌶"),
        (chili[:1], [t.convert_tokens_to_ids("a")], "a"),
        (chili[:2], chili[3:], ""),
    ):
        d = IncrementalDecoder(t, True, [t.convert_tokens_to_ids("▁the"), *before])
        got = "".join([*map(d.add, after), d.finish()])
        assert got == want or want == "" and set(got) <= {"\ufffd"}
    long = [
        i for _ in range(40) for i in bytes_of(t, "日")
    ]  # characters of bytes alone: the window begins with one
    d = IncrementalDecoder(t, True, long)
    assert "".join([*map(d.add, bytes_of(t, "本")), d.finish()]) == "本"


@pytest.mark.parametrize("name", ALL)
def test_prompt_and_answer_together_are_the_decoding_of_all_tokens(name):
    t, rng = engine(name).tokenizer, random.Random(1)
    safe = [
        i
        for i in range(len(t))
        if not t.convert_ids_to_tokens(i).startswith("<0x")
        and "\ufffd" not in vocabulary_of(t).text(i)
    ]
    for skip in (True, False):
        for _ in range(60):
            prompt, ids = (rng.choices(safe, k=rng.randrange(k)) for k in (20, 30))
            d = IncrementalDecoder(t, skip, prompt)
            decode = lambda ids: t.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
            assert decode(prompt) + "".join([*map(d.add, ids), d.finish()]) == decode(prompt + ids)


@pytest.mark.parametrize("name", ["byte", "llama", "gemma"])
def test_texts_of_log_probabilities_are_the_text_and_bytes_their_own(name):
    llm = engine(name)
    t, v = llm.tokenizer, vocabulary_of(llm.tokenizer)
    for text, cut in (("the cat é😀!", 0), ("é😀", 1), ("日本", 4), ("cat\n", 0)):
        ids = ids_of_text(t, text, False)
        ids = ids[: len(ids) - cut]
        c = answered(llm, [5, t.eos_token_id, 6], ids)
        told = [step[i] for i, step in zip(ids, c.logprobs)]
        assert "".join(l.decoded_token for l in told) == c.text and b"".join(
            l.token_bytes for l in told
        ) == b"".join(map(v.bytes_of, ids))
        chat, plain = chat_logprobs(c, 0), text_logprobs(c)
        assert bytes(b for x in chat["content"] for b in x["bytes"]) == b"".join(
            map(v.bytes_of, ids)
        )
        assert "".join(plain["tokens"]) == c.text
        ends = [*plain["text_offset"][1:], len(c.text)]
        assert [c.text[a:b] for a, b in zip(plain["text_offset"], ends)] == plain["tokens"]


@pytest.mark.parametrize("name", ALL)
def test_tokens_of_a_prompt_are_its_text(name):
    llm = engine(name)
    t = llm.tokenizer
    ids = t.convert_tokens_to_ids(
        dict(
            wordpiece=["the", "cat", "##s", "!"],
            byte=list("the") + ["Ġ", "c"],
            llama=["<0x0A>", "▁the", "▁cat", "▁sat", "!", "<0xC3>", "<0xA9>"],
            gemma=["▁the", "▁cat", "!"],
        )[name]
    )
    for start in range(2):
        out = llm.generate(
            [[5, *ids]],
            SamplingParams(
                temperature=0, max_tokens=1, prompt_logprobs=1, prompt_logprob_start=start
            ),
        )[0]
        told = [step[i].decoded_token for i, step in zip([5, *ids], out.prompt_logprobs) if step]
        assert t.decode([5, *ids[:start]]) + "".join(told) == t.decode([5, *ids])
    if name == "llama":
        assert told == [" cat", " sat", "!", "", "é"] or told[0] == " the" or told[0] == " cat"


def test_no_two_candidates_have_one_name():
    llm = engine("byte")
    params = SamplingParams(
        temperature=0, max_tokens=3, allowed_token_ids=[*range(131, 259)], logprobs=5
    )
    c = llm.generate([[5, 6]], params)[0].outputs[0]
    found = text_logprobs(c)
    for name, top, value, step in zip(
        found["tokens"], found["top_logprobs"], found["token_logprobs"], c.logprobs
    ):
        assert top[name] == value and len(top) == len(step)
    named = token_names(
        {
            7: Logprob(-1.0, 1, "", b"\xf0"),
            8: Logprob(-2.0, 2, "\ufffd", b"\x9f"),
            9: Logprob(-2.0, 2, "a", b"a"),
            10: Logprob(-3.0, 3, "a", b"a"),
            11: Logprob(-3.0, 3, "a", b"a"),
            12: Logprob(-4.0, 4, "", b""),
            13: Logprob(-4.0, 4, None),
        }
    )
    assert named == {
        7: "",
        8: "bytes:\\x9f",
        9: "a",
        10: "bytes:\\x61",
        11: "token_id:11",
        12: "token_id:12",
        13: "13",
    }
    [chat] = [x for x in chat_logprobs(c, 5)["content"][:1]]
    assert len({x["token"] for x in chat["top_logprobs"]}) == 5 and all(
        len(x["bytes"]) <= 1 for x in chat["top_logprobs"]
    )


def test_offsets_point_into_an_echo_and_a_stream():
    llm = engine("llama")
    t = llm.tokenizer
    cat = t.convert_tokens_to_ids("▁cat")
    prompt = [t.bos_token_id, t.convert_tokens_to_ids("▁the"), *bytes_of(t, "😀")]
    out = llm.generate(
        [prompt],
        SamplingParams(
            temperature=0, max_tokens=2, allowed_token_ids=[cat], logprobs=1, prompt_logprobs=1
        ),
    )[0]
    whole = echoed(out, "the😀").outputs[0]
    found = text_logprobs(whole, first="<s>")
    assert whole.text == "the😀 cat cat" and found["tokens"] == [
        "<s>",
        "the",
        "",
        "",
        "",
        "😀",
        " cat",
        " cat",
    ]
    assert found["text_offset"] == [0, 0, 3, 3, 3, 3, 4, 8]
    parts, offsets, tokens = Parts("text", "x", "m", 1), [], []
    for n in (1, 2):
        c = replace(
            out.outputs[0],
            text=" cat" * n,
            token_ids=[cat] * n,
            logprobs=out.outputs[0].logprobs[:n],
            finish_reason="length" if n == 2 else None,
        )
        for line in parts.since([c]).decode().split("\n\n")[:-1]:
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                offsets += choice["logprobs"]["text_offset"]
                tokens += choice["logprobs"]["tokens"]
    assert (tokens, offsets) == ([" cat", " cat"], [0, 4])
    assert token_offsets("ab<eos>c", ["ab", "<eos>", "c"]) == [0, 2, 7, 8] and token_offsets(
        "abc", ["<s>", "ab", "<eos>", "c"]
    ) == [0, 0, 2, 2, 3]
    stopped = llm.generate(
        [prompt],
        SamplingParams(
            temperature=0, max_tokens=4, allowed_token_ids=[cat], logprobs=0, stop="t ca"
        ),
    )[0].outputs[0]
    assert stopped.text == " ca" and all(at <= 3 for at in text_logprobs(stopped)["text_offset"])


# --- a tokenizer of one's own


def test_what_others_do_with_the_tokenizer_reaches_no_prompt():
    t = tiny_tokenizer()
    llm, stop, every = (
        LLM(tiny_model("llama"), t, max_num_seqs=64),
        threading.Event(),
        sys.getswitchinterval(),
    )

    def cut():
        while not stop.is_set():
            t(["hello world, this is long", "a"], truncation=True, max_length=3, padding=True)

    threads = [threading.Thread(target=cut) for _ in range(2)]
    sys.setswitchinterval(1e-5)
    for x in threads:
        x.start()
    try:
        texts = [f"prompt number {i} of some length" for i in range(40)]
        for _ in range(4):
            assert [
                len(o.prompt_token_ids)
                for o in llm.generate(texts, SamplingParams(temperature=0, max_tokens=1))
            ] == [*map(len, texts)]
            assert [
                len(o.prompt_token_ids)
                for o in llm.embed(texts, pooling_params=dict(truncate_prompt_tokens=9))
            ] == [9] * 40
            assert [len(o.prompt_token_ids) for o in llm.embed(texts)] == [*map(len, texts)]
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
    assert (
        twin is not t and len(twin) == len(t) and twin._tokenizer.to_str() == t._tokenizer.to_str()
    )
    for text in ("the cat", " a!\n", "<tool> é😀</s>", ""):
        assert ids_of_text(t, text) == t(text)["input_ids"] == twin(text)["input_ids"]


def test_tokens_and_a_template_that_a_user_gives_his_tokenizer_later_count():
    t = tiny_tokenizer()
    llm = LLM(tiny_model("llama", vocab_size=300), t)
    assert len(llm.generate("<tool>", SamplingParams(max_tokens=1))[0].prompt_token_ids) == 6
    t.add_tokens(["<tool>"])
    assert len(llm.generate("<tool>", SamplingParams(max_tokens=1))[0].prompt_token_ids) == 1
    t.chat_template = "{{ messages[0]['content'] }}#"
    assert (
        llm.chat([dict(role="user", content="ab")], SamplingParams(max_tokens=1))[0].prompt == "ab#"
    )


# --- stop strings, and processes that are forked


def test_a_long_stop_string_costs_no_more_than_the_text_is_long():
    from batchlab.core.text import StopScanner, _begun

    class Counting(str):
        looks = 0

        def startswith(self, *a):
            Counting.looks += len(a[0])
            return super().startswith(*a)

    long = Counting("ab" * 50_000)
    scanner = StopScanner([long])
    assert (
        "".join(scanner.add(x) for x in ["x", "a", "b", "aa", "y"] * 20) + scanner.finish()
        == "xabaay" * 20
        and Counting.looks < 10_000
    )
    rng = random.Random(0)
    for _ in range(3000):
        text, words = (
            ("".join(rng.choices("ab", k=rng.randrange(12))) for _ in "1"),
            ["".join(rng.choices("ab", k=rng.randrange(1, 8))) for _ in "12"],
        )
        [text] = text
        assert _begun(text, words) == max(
            (k for w in words for k in range(1, len(w)) if text.endswith(w[:k])), default=0
        )


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
         lambda: llm.add_request('x'), lambda: llm.cancel('0'), lambda: asyncio.run(one()), lambda: asyncio.run(shared.shutdown()), lambda: llm.beam_search('x', dict(beam_width=2))]
asyncio.run(one())
for held in (False, True):
    if held: llm.progress.acquire()
    if not (pid := os.fork()):
        faulthandler.dump_traceback_later(60, exit=True)
        said = []
        for call in calls:
            try: call()
            except EngineError as e: said.append('forked' in str(e))
        os._exit(said != [True] * len(calls))
    if held: llm.progress.release()
    assert os.waitpid(pid, 0)[1] == 0, held
assert len(llm.generate('x')[0].outputs[0].token_ids) and not asyncio.run(shared.shutdown())
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
