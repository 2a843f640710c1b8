"lm-eval's `local-completions`, unchanged, gives the scores that `LLM` gives in this process: likelihoods of choices, of whole texts, and answers that end at words."

import datasets, pytest
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.api.task import ConfigurableTask

from batchlab import LLM, SamplingParams

WORDS = {
    "The opposite of hot is": [" cold", " wet", " round"],
    "A week has": [" seven days", " nine days", " two days"],
    "Fish live in": [" water", " trees", " stone"],
    "The sun rises in the": [" east", " west", " north"],
    "Two and two make": [" four", " seven", " nothing"],
    "Snow is": [" white", " green", " loud"],
    "A café serves": [" coffee", " gravel", " 雨"],
    "Bees make": [" honey", " glass", " shoes"],
}
TEXTS = [
    "The tide comes in twice a day, and the boats in the harbour rise with it.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. 🐟",
    "a b c d e f g",
]


def rows(docs):
    def build(**_):
        return datasets.DatasetDict(test=datasets.Dataset.from_list(docs))

    return build


def task(name, output_type, docs, metrics, target, **kw):
    return ConfigurableTask(
        config=dict(
            task=name,
            custom_dataset=rows(docs),
            output_type=output_type,
            test_split="test",
            doc_to_text="{{text}}",
            doc_to_target=target,
            metric_list=[dict(metric=m) for m in metrics],
            **kw,
        )
    )


def tasks():
    choices = [dict(text=k, choices=v, gold=0) for k, v in WORDS.items()]
    return [
        task(
            "choose",
            "multiple_choice",
            choices,
            ["acc", "acc_norm"],
            "gold",
            doc_to_choice="choices",
            target_delimiter="",
        ),
        task(
            "go_on",
            "generate_until",
            [dict(text=f"{k}", answer=v[0]) for k, v in WORDS.items()],
            ["exact_match"],
            "answer",
            generation_kwargs=dict(until=["\n", ".", " the"], max_gen_toks=12),
        ),
        task(
            "whole",
            "loglikelihood_rolling",
            [dict(text=t) for t in TEXTS],
            ["word_perplexity", "bits_per_byte"],
            "text",
        ),
    ]


class InProcess(TemplateLM):
    "`LLM` as lm-eval asks for it."

    def __init__(self, llm, max_length):
        super().__init__()
        self.llm, self.tok, self.max_length = llm, llm.get_tokenizer(), max_length

    @property
    def eot_token_id(self):
        return self.tok.eos_token_id

    @property
    def prefix_token_id(self):
        return self.tok.bos_token_id  # what local-completions puts before a text

    def tok_encode(self, string, add_special_tokens=None, **_):
        return self.tok(string, add_special_tokens=False).input_ids

    def _loglikelihood_tokens(self, requests, **_):
        prompts = [[*context, *going_on] for _, context, going_on in requests]
        outs = self.llm.generate(
            prompts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
        )

        def of(o, n):
            steps = [
                (step[t], step) for t, step in zip(o.prompt_token_ids[n:], o.prompt_logprobs[n:])
            ]
            return sum(l.logprob for l, _ in steps), all(
                l.logprob == max(x.logprob for x in step.values()) for l, step in steps
            )

        return [of(o, len(context)) for o, (_, context, _) in zip(outs, requests)]

    def loglikelihood_rolling(self, requests, **_):
        ids = [self.tok_encode(r.args[0]) for r in requests]
        assert all(len(i) < self.max_length for i in ids)  # one window each
        return [
            x
            for x, _ in self._loglikelihood_tokens([(None, [self.prefix_token_id], i) for i in ids])
        ]

    def generate_until(self, requests, **_):
        outs = self.llm.generate(
            [r.args[0] for r in requests],
            [
                SamplingParams(
                    max_tokens=r.args[1]["max_gen_toks"], temperature=0, stop=r.args[1]["until"]
                )
                for r in requests
            ],
        )
        return [o.outputs[0].text for o in outs]


def of_results(r):
    "Scores, and what each is made of: the answers of the model."
    answers = {
        name: [s["resps"] for s in sorted(samples, key=lambda s: s["doc_id"])]
        for name, samples in r["samples"].items()
    }
    return {
        name: {k: v for k, v in d.items() if isinstance(v, float) and "stderr" not in k}
        for name, d in r["results"].items()
    }, answers


def numbers(x):
    if isinstance(x, (list, tuple)):
        return [n for y in x for n in numbers(y)]
    return [x] if isinstance(x, float) else []


def words(x):
    if isinstance(x, (list, tuple)):
        return [w for y in x for w in words(y)]
    return [] if isinstance(x, float) else [str(x)]


@pytest.fixture(scope="module")
def at_home():
    llm = LLM()
    yield of_results(simple_evaluate(InProcess(llm, 2047), tasks=tasks(), bootstrap_iters=0))
    llm.close()


@pytest.mark.parametrize(
    "how",
    [dict(batch_size=1), dict(num_concurrent=4, batch_size=2)],
    ids=["one by one", "four times two"],
)
@pytest.mark.parametrize("tokenizer", ["remote", "huggingface"])
def test_scores_are_those_of_llm(url, model, folder, at_home, how, tokenizer):
    args = dict(
        model=model,
        base_url=f"{url}/v1/completions",
        tokenizer_backend=tokenizer,
        max_length=2048,
        max_retries=1,
        **({} if tokenizer == "remote" else dict(tokenizer=folder)),
    )
    scores, answers = of_results(
        simple_evaluate(
            "local-completions",
            model_args=args | {k: v for k, v in how.items() if k != "batch_size"},
            batch_size=how["batch_size"],
            tasks=tasks(),
            bootstrap_iters=0,
        )
    )
    expected, said = at_home
    assert words(answers["go_on"]) == words(said["go_on"]) and words(answers["choose"]) == words(
        said["choose"]
    )
    for name in answers:
        assert numbers(answers[name]) == pytest.approx(numbers(said[name]), rel=1e-6, abs=1e-6)
    for name in expected:
        assert scores[name] == pytest.approx(expected[name], rel=1e-6)
    assert expected["choose"]["acc,none"] > 0.5 and any(words(said["go_on"]))
