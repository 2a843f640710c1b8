"Texts that are too long are refused by their length, and none that is not."

import asyncio, random, threading

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from batchlab.api.aio import AsyncLLM
from batchlab.errors import PromptTooLongError
from batchlab.llm.inputs import prompt_ids_of
from batchlab.api import LLM
from batchlab.models import lengths, tiny_model, tiny_tokenizer

PIECES = [
    *"abcABC 123.,!\n\t\u00e9e\u0301\u00df\u4e2d\ufb01\u0302\u200b\U0001f600",
    "<|x|>",
    "<m>",
    "\r\n",
    "  ",
    "aaa ",
    " " * 9,
    "!" * 20,
    "7" * 13,
]
GPT4 = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)


def drawn(rand, n):
    return "".join(rand.choice(PIECES) * rand.choice([1, 1, 1, 1, 5, 30]) for _ in range(n))


def trained(trainer, vocab_size, **how):
    return trainer(vocab_size=vocab_size, special_tokens=["?"], show_progress=False, **how)


def bpe(pre, normalizer=None, **how):
    alphabet = pre_tokenizers.ByteLevel.alphabet() if "unk_token" not in how else []
    return (
        models.BPE(**how),
        trained(trainers.BpeTrainer, 400, initial_alphabet=alphabet),
        pre,
        normalizer,
    )


KINDS = dict(
    gpt2=lambda: bpe(BYTES),
    gpt4=lambda: bpe(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(GPT4), "isolated"),
                pre_tokenizers.ByteLevel(False, use_regex=False),
            ]
        ),
        normalizers.NFC(),
    ),
    digits=lambda: bpe(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), BYTES]), normalizers.NFKC()
    ),
    few_bytes=lambda: (
        models.BPE(),
        trained(trainers.BpeTrainer, 100, limit_alphabet=20),
        BYTES,
        None,
    ),  # others are dropped
    unknown_bytes=lambda: (
        models.BPE(unk_token="?", fuse_unk=True),
        trained(trainers.BpeTrainer, 100, limit_alphabet=20),
        BYTES,
        None,
    ),
    llama=lambda: bpe(pre_tokenizers.Metaspace(split=False), unk_token="?"),
    joins=lambda: bpe(pre_tokenizers.Metaspace(split=False), unk_token="?", fuse_unk=True),
    bert=lambda: (
        models.WordPiece(unk_token="?"),
        trained(trainers.WordPieceTrainer, 200),
        pre_tokenizers.BertPreTokenizer(),
        normalizers.BertNormalizer(),
    ),
    t5=lambda: (
        models.Unigram(
            [
                ("?", -9.0),
                *((c, -3.0) for c in "abcABC123▁.!"),
                ("ab", -4.0),
                ("▁a", -4.0),
                ("!!!", -4.0),
            ],
            0,
            False,
        ),
        None,
        pre_tokenizers.Metaspace(),
        normalizers.NFKC(),
    ),
    words=lambda: (
        models.WordLevel(unk_token="?"),
        trained(trainers.WordLevelTrainer, 100),
        pre_tokenizers.Whitespace(),
        None,
    ),
)


@pytest.mark.parametrize("greedy", [False, True], ids=["", "swallows-spaces"])
@pytest.mark.parametrize("kind", KINDS)
def test_bounds_hold_for_drawn_texts(monkeypatch, kind, greedy):
    "What is refused has more tokens. `greedy`: added tokens take the whitespace beside them."
    monkeypatch.setattr(lengths, "SHORT", 200)
    rand = random.Random(kind)
    model, trainer, pre, normalizer = KINDS[kind]()
    inner = Tokenizer(model)
    inner.pre_tokenizer = pre
    if normalizer:
        inner.normalizer = normalizer
    if trainer:
        inner.train_from_iterator([drawn(rand, 200) for _ in range(8)], trainer)
    inner.add_tokens(
        [
            AddedToken("<|x|>", normalized=False, lstrip=greedy, rstrip=greedy),
            AddedToken("<m>", normalized=True, lstrip=greedy, rstrip=greedy),
        ]
    )
    tokenizer, refused = PreTrainedTokenizerFast(tokenizer_object=inner), 0
    for _ in range(60):
        text, most = drawn(rand, rand.choice([300, 1500])), rand.choice([3, 20, 100])
        ids = tokenizer(text)["input_ids"]
        n = lengths.least_tokens(tokenizer, text, most)
        assert n <= len(ids)
        refused += n > 0
    assert (refused > 5) == (kind not in ("joins", "bert", "t5", "words"))  # which give no bound


def test_a_tokenizer_in_python_is_asked_for_all():
    class Spelling:
        def __len__(self):
            return 1

        def __call__(self, text, **_):
            return dict(input_ids=[5] * len(text))

    long = "a" * 10**6
    assert lengths.least_tokens(Spelling(), long, 5) == 0


def test_new_tokens_count():
    tokenizer, text = tiny_tokenizer(), "ab" * 10**5
    assert lengths.least_tokens(tokenizer, text, 1000) == 40_000
    tokenizer.add_tokens(["ab" * 100])
    assert len(tokenizer(text)["input_ids"]) == 1000
    assert lengths.least_tokens(tokenizer, text, 1000) == 0


class Counting:
    "A tokenizer that notes how long the texts are that it is given."

    def __init__(self, tokenizer):
        self.inner, self.seen = tokenizer, []

    def __getattr__(self, name):
        if name == "inner":
            raise AttributeError(name)  # of a copy that has nothing yet
        return getattr(self.inner, name)

    def __len__(self):
        return len(self.inner)

    def __call__(self, text, *args, **kw):
        self.seen.append(len(text))
        return self.inner(text, *args, **kw)


@pytest.fixture(scope="module")
def llm():
    return LLM(tiny_model("llama"), tiny_tokenizer())


def test_what_is_too_long_is_not_tokenised(llm, monkeypatch):
    counting = Counting(llm.tokenizer)
    monkeypatch.setattr(llm.loaded, "tokenizer", counting)
    long = "word " * 200_000
    talk = dict(messages=[dict(role="user", content=long)])
    a, b, ok = llm.generate([long, talk, "short"], dict(max_tokens=1))
    assert "at least 200,000 tokens" in a.error and "255 tokens" in a.error
    assert "at least 200,0" in b.error and not ok.error and a.outputs[0].finish_reason == "too_long"
    for outs in (
        llm.choose([long], ["a", "b"]),
        llm.logprobs([long]),
        llm.embed([long, "short"]),
    ):
        assert "at least 200,000 tokens" in outs[0].error
    assert max(counting.seen) < 100


def test_what_is_nearly_too_long_is_counted(llm):
    "The message says how long it is, as before."
    with pytest.raises(PromptTooLongError):
        prompt_ids_of(llm.model, llm.tokenizer, "a" * 70_000, False, 256)
    assert "300 tokens" in llm.generate("a" * 300)[0].error
    assert prompt_ids_of(llm.model, llm.tokenizer, "a" * 70_000, False, 70_001)[1] == [100] * 70_000


def test_long_prompts_do_not_stop_short_ones(monkeypatch):
    "One that is not refused by its length is tokenised beside the others; who leaves meanwhile never comes to the engine."
    llm = AsyncLLM(tiny_model("llama"), tiny_tokenizer(), max_num_seqs=4)
    inside, go = threading.Event(), threading.Event()
    real, queued = llm.llm.admit, []

    def slow(prompts, *args):
        queued.append(len(prompts[0].text))
        if queued[-1] > 1000:
            inside.set()
            assert go.wait(60)
        return real(prompts, *args)

    monkeypatch.setattr(llm.llm, "admit", slow)

    async def last(prompt):
        async for o in llm.generate(prompt, dict(max_tokens=2, temperature=0)):
            pass
        return o

    async def all_of():
        long = [asyncio.create_task(last("word " * n)) for n in (50_000, 60_000, 70_000)]
        await asyncio.to_thread(inside.wait, 60)
        short = [await last("hi") for _ in range(5)]
        long[0].cancel(), long[1].cancel()  # one is being tokenised, one waits for it
        await asyncio.sleep(0)
        go.set()
        return short, await asyncio.gather(*long, return_exceptions=True)

    try:
        short, long = asyncio.run(all_of())
    finally:
        go.set()
        llm.llm.close()
    assert all(not o.error and o.outputs[0].token_ids for o in short)
    assert queued == [250_000, *[2] * 5, 350_000]  # what was left is not even looked at
    assert all(isinstance(x, asyncio.CancelledError) for x in long[:2])
    assert "at least 70,000" in long[2].error
    assert (
        llm.stats().requests.get("cancelled", 0) == 0
        and not llm.answers
        and not llm.llm.loop.groups
    )
