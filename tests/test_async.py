"""`AsyncLLM`: what coroutines get is what `LLM` gives, whatever is cancelled, aborted, slow or closed meanwhile."""

import asyncio, gc, random, threading, time, weakref

import pytest

from batchlab.api.aio import AsyncLLM
from batchlab.errors import EngineError, ParamError
from batchlab.api import LLM
from batchlab.models import tiny_model, tiny_tokenizer
from batchlab.core.params import SamplingParams
from batchlab.models.lengths import SHORT
from helpers import greedy, ids, oracle, paused_after, same

LONG = SamplingParams(max_tokens=400, ignore_eos=True)


@pytest.fixture
def llm():
    llm = AsyncLLM(tiny_model("llama"), tiny_tokenizer(), max_num_seqs=4)
    yield llm
    llm.llm.close()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def few(max_pending):
    return AsyncLLM(tiny_model("llama"), max_pending=max_pending)


async def until(f):
    while not f():
        await asyncio.sleep(0.001)


async def each(outputs):
    return [o async for o in outputs]


async def last(outputs):
    async for o in outputs:
        pass
    return o


async def idle(llm):
    await until(lambda: not llm.llm.has_unfinished)


def nothing_left(llm):
    s = llm.stats()
    held = s.running, s.waiting, s.slots_in_use, llm.answers, llm.llm.loop.groups
    return not any(held) and llm.llm.loop.thread is not None


@pytest.mark.parametrize("seed", range(3))
def test_a_hundred_tasks_a_third_cancelled(llm, seed):
    rand = random.Random(seed)
    prompts = [[rand.randrange(5, 250) for _ in range(rand.randint(1, 90))] for _ in range(100)]
    params = [greedy(rand.randint(1, 40)) for _ in prompts]
    expected = ids(llm.llm.generate(prompts, params, use_tqdm=False))
    doomed = set(rand.sample(range(100), 33))
    before = sum(llm.stats().requests.values())

    async def task(i):
        "Its tokens; if it is `doomed`, it is cancelled before it begins, after some turns of the loop, or after some tokens."
        if i in doomed and (n := rand.randint(0, 3)):
            wait, loop = rand.random() * 0.05 * n, asyncio.get_running_loop()
            loop.call_later(wait, asyncio.current_task().cancel)
        read, stop = [], rand.randint(1, 20)
        async for o in llm.generate(prompts[i], params[i]):
            assert o.outputs[0].token_ids[: len(read)] == read
            read = o.outputs[0].token_ids
            if i in doomed and len(read) >= stop:
                return None
        return read

    async def crowd():
        tasks = [asyncio.create_task(task(i)) for i in range(100)]
        got = await asyncio.gather(*tasks, return_exceptions=True)
        del tasks
        gc.collect()
        await asyncio.sleep(0)
        await idle(llm)
        assert nothing_left(llm)
        return got

    got = run(crowd())
    for i, x in enumerate(got):
        if isinstance(x, asyncio.CancelledError) or x is None:
            assert i in doomed
        else:
            assert x == expected[i]
    ended = llm.stats().requests
    assert sum(ended.values()) - before <= 100
    assert ended.get("error", 0) == ended.get("timeout", 0) == 0


def test_the_loop_ends_in_the_middle(llm):
    async def leave():
        waiting = [asyncio.create_task(last(llm.generate([7] * n, LONG))) for n in range(1, 12)]
        await anext(llm.generate([5, 6], LONG))
        return len(waiting)  # asyncio.run cancels them

    assert run(leave()) == 11

    async def after():
        await idle(llm)
        assert nothing_left(llm)
        return await last(llm.generate([5, 6], greedy(9)))

    assert ids([run(after())]) == oracle(llm.llm.model, [[5, 6]], 9)
    assert "error" not in llm.stats().requests


def test_cancelled_while_its_prompt_is_tokenised(llm):
    "The engine never hears of the request."
    begun, go, real = threading.Event(), threading.Event(), llm.llm.admit

    def slow(*args):
        begun.set()
        go.wait(60)
        return real(*args)

    llm.llm.admit = slow

    async def cancelled():
        task = asyncio.create_task(last(llm.generate([7], LONG)))
        # waits for the queuer, and is never queued
        behind = asyncio.create_task(last(llm.generate([8], LONG)))
        await until(begun.is_set)
        task.cancel(), behind.cancel()
        gone = await asyncio.gather(task, behind, return_exceptions=True)
        assert [type(x) for x in gone] == [asyncio.CancelledError] * 2
        go.set()
        llm.queuer.submit(int).result(60)
        await idle(llm)
        assert not llm.answers and not llm.llm.loop.groups and llm.llm.loop.thread is None

    run(cancelled())
    assert llm.stats().requests == {}


def test_abort(llm):
    async def aborted():
        with paused_after(llm.llm, 12):
            outputs = llm.generate([7, 8], LONG, request_id="mine")
            first = await anext(outputs)
            assert await llm.abort("mine") and not await llm.abort("yours")
        *_, rest = await each(outputs)
        assert rest.finished and rest.outputs[0].finish_reason == "cancelled"
        begun, whole = ids([first, rest])
        assert whole[: len(begun)] == begun and len(whole) < 400
        assert not await llm.abort("mine")

    run(aborted())


def test_abort_before_its_turn():
    llm = few(1)

    async def aborted():
        async with llm:
            with paused_after(llm.llm, 12):
                first = llm.generate([5], LONG)
                await anext(first)
                second = asyncio.create_task(last(llm.generate([6], LONG, request_id="second")))
                await asyncio.sleep(0)
                assert await llm.abort("second")
            await first.aclose()
            return (await second).outputs[0]

    out = run(aborted())
    assert out.finish_reason == "cancelled" and not out.token_ids


def test_a_slow_reader_gets_all_in_few_outputs(llm):
    async def slow():
        outputs = llm.generate([7, 8], greedy(60, logprobs=1))
        first = await anext(outputs)
        await idle(llm)
        return [first, *await each(outputs)]

    outs = run(slow())
    parts = [o.outputs[0] for o in outs]
    whole = parts[-1].logprobs
    assert len(outs) <= 3 and len(ids(outs)[-1]) == len(whole) == 60 and outs[-1].finished
    assert all(c.logprobs == whole[: len(c.token_ids)] for c in parts)


@pytest.mark.parametrize("n", [1, 3])
def test_log_probabilities_grow_with_the_answer(llm, n):
    params = SamplingParams(n=n, seed=4, max_tokens=20, logprobs=2, ignore_eos=True)

    async def read():
        outputs = llm.generate("a b", params, lora_request=None)
        with paused_after(llm.llm, 12):
            first = await anext(outputs)
        return [first, *await each(outputs)]

    *outs, whole = run(read())
    prompts = {(o.prompt, *o.prompt_token_ids) for o in outs}
    assert prompts == {("a b", *whole.prompt_token_ids)}
    for a in (a for o in outs for a in o.outputs):
        final, k = whole.outputs[a.index], len(a.token_ids)
        assert (a.token_ids, a.logprobs) == (final.token_ids[:k], final.logprobs[:k])
        told = [l[t].logprob for l, t in zip(a.logprobs, final.token_ids)]
        assert len(told) == k and a.cumulative_logprob == sum(told)
    [alone] = llm.llm.generate("a b", params, use_tqdm=False)
    sums = [o.outputs[0].cumulative_logprob for o in (whole, alone)]
    assert same(*sums, llm.llm.backend)
    plain = run(each(llm.generate([7, 8], SamplingParams(max_tokens=4))))
    assert all(a.logprobs is a.cumulative_logprob is None for o in plain for a in o.outputs)


def test_wrong_calls_raise_where_they_are_awaited(llm):
    async def wrong():
        with pytest.raises(ParamError, match="max_tokens"):
            await anext(llm.generate([7], dict(max_tokens=-1)))
        with paused_after(llm.llm, 12):
            outputs = llm.generate([7], LONG, request_id="a")
            await anext(outputs)
            with pytest.raises(EngineError, match="'a' is not done yet"):
                await anext(llm.generate([7], request_id="a"))
            await outputs.aclose()
        assert (await last(llm.generate([]))).error
        await idle(llm)
        assert nothing_left(llm)

    run(wrong())
    with pytest.raises(ParamError, match="max_pending"):
        AsyncLLM(llm.llm, max_pending=0)


def test_long_prompts_hold_up_no_others(llm):
    of = lambda n: llm.queuer_for("a" * n)
    assert of(9) is llm.queuer and of(SHORT) is llm.long_queuer


def test_weights_are_read_anew():
    "A change that no call can notice, written past torch: what was kept of the old weights goes, and nobody's answer with it."
    own = AsyncLLM(LLM(tiny_model("llama", seed=5), compile=False))
    model, prompt = own.llm.model, [5, 6, 7] * 9

    async def change():
        async with own:
            before = await last(own.generate(prompt, greedy(6)))
            with paused_after(own.llm, 12):
                task = asyncio.create_task(last(own.generate([7], LONG)))
                await until(lambda: own.llm.loop.groups)
                with pytest.raises(EngineError, match="under way"):
                    await own.reload_weights()
            task.cancel()
            await until(lambda: not own.llm.loop.groups)
            model.get_input_embeddings().weight.data.mul_(-1)
            await own.reload_weights()
            return before, await last(own.generate(prompt, greedy(6)))

    before, after = ids(run(change()))
    assert [after] == oracle(model, [prompt], 6) and after != before


@pytest.mark.parametrize("max_pending", [1, 8])
def test_shutdown_meets_those_that_wait_and_are_tokenised(max_pending):
    llm = few(max_pending)
    real = llm.llm.admit

    def slow(*args):
        time.sleep(0.03)
        return real(*args)

    llm.llm.admit = slow

    async def shut():
        with paused_after(llm.llm, 12):
            async with llm:
                tasks = [asyncio.create_task(last(llm.generate([7 + i], LONG))) for i in range(5)]
                await until(lambda: llm.llm.loop.groups)
        outs = await asyncio.gather(*tasks)
        assert {o.outputs[0].finish_reason for o in outs} == {"cancelled"}
        assert llm.llm.loop.thread is None and not llm.llm.loop.groups and not llm.answers
        again = await last(llm.generate([7], greedy(2)))
        assert again.outputs[0].finish_reason == "length"

    run(shut())
    llm.llm.close()


def test_answers_that_nobody_reads_leave_room_for_others():
    llm = few(2)

    async def held():
        outputs = [llm.generate([5 + i], greedy(3)) for i in range(6)]
        firsts = [await anext(o) for o in outputs]  # one after the other, none read to its end
        return [first if first.finished else await last(o) for o, first in zip(outputs, firsts)]

    assert [len(tokens) for tokens in ids(run(held()))] == [3] * 6
    llm.llm.close()


def test_two_share_one_engine():
    own = LLM(tiny_model("llama"))

    async def both():
        a, b = AsyncLLM(own), AsyncLLM(own)
        assert a.llm is b.llm is own
        asked = [x.generate([5 + i], greedy(9)) for x in (a, b) for i in range(6)]
        return await asyncio.gather(*map(last, asked))

    outs = run(both())
    assert ids(outs[:6]) == ids(outs[6:]) and len({o.request_id for o in outs}) == 12
    own.close()


def test_somebody_waits_for_what_an_event_loop_asks(llm):
    "The scheduler is told so of these requests alone: a job's steps stay large."
    queued = []
    llm.llm.watchers.append(lambda _, event, x: event == "queued" and queued.append(x.online))
    run(last(llm.generate([5, 6], greedy(1))))
    llm.llm.generate([[5, 7]], greedy(1))
    assert queued == [True, False]


def test_a_timeout_counts_from_the_call():
    llm = few(1)

    async def late():
        with paused_after(llm.llm, 12):
            first = llm.generate([5], LONG)
            await anext(first)
            second = asyncio.create_task(last(llm.generate([6], LONG, timeout=0.05)))
            await asyncio.sleep(0.1)
            await first.aclose()
        return (await second).outputs[0]

    out = run(late())
    assert out.finish_reason == "timeout" and not out.token_ids
    llm.llm.close()


def test_a_loop_that_is_closed_ends_its_requests(llm):
    loop, outputs = asyncio.new_event_loop(), llm.generate([5, 6], LONG)
    with paused_after(llm.llm, 12):
        loop.run_until_complete(anext(outputs))
        loop.close()
    while llm.llm.has_unfinished:
        time.sleep(0.01)
    assert llm.stats().requests == dict(cancelled=1)


def test_loops_that_are_closed_are_let_go():
    llm, loops = few(1), []

    async def some():
        loops.append(weakref.ref(asyncio.get_running_loop()))
        asked = [llm.generate([5 + i], SamplingParams(max_tokens=2)) for i in range(3)]
        await asyncio.gather(*map(last, asked))

    for _ in range(3):
        run(some())
    gc.collect()
    assert sum(loop() is not None for loop in loops) <= 1
    llm.llm.close()


def test_only_the_last_output_is_made_if_no_other_is_wanted(llm):
    params = SamplingParams(n=2, seed=4, max_tokens=20, ignore_eos=True)

    read = lambda grow: run(each(llm.generate([7, 8], params, grow=grow)))
    [one], [*_, whole] = read(False), read(True)
    tokens = lambda o: [c.token_ids for c in o.outputs]
    assert one.finished and tokens(one) == tokens(whole)


def test_the_loop_is_woken_once_a_step(llm):
    "Not once for each event: here 4 requests get one in each step."

    async def count():
        loop, calls = asyncio.get_running_loop(), []
        real = loop.call_soon_threadsafe

        def counted(f, *args, **kw):
            if getattr(f, "__name__", "") == "look":
                calls.append(f)
            return real(f, *args, **kw)

        loop.call_soon_threadsafe = counted
        await asyncio.gather(*(last(llm.generate([5 + i], greedy(30))) for i in range(4)))
        return len(calls)

    before = llm.stats().steps
    woken = run(count())
    assert 0 < woken <= llm.stats().steps - before
    assert llm.stats().requests["length"] == 4


def test_a_refusal_is_told_from_a_failure(llm):
    async def both():
        bad = await last(llm.generate([10**6]))

        def fail():
            raise RuntimeError("no more memory")

        await last(llm.generate([7], SamplingParams(max_tokens=2)))
        for e in llm.llm.engines.values():
            e.step = fail
        return bad, await last(llm.generate([7], LONG))

    bad, failed = run(both())
    assert bad.error and bad.refused and failed.error and not failed.refused
