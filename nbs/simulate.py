"""What chapters 09, 73 and 76 and the tests try schedulers with: a model that costs nothing, the loop around it, and pictures of what each step did."""

import sys
from array import array
from collections import Counter, namedtuple
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from zlib import crc32

from batchlab.core.batch import make_batch
from batchlab.core.request import Request, RowOutput
from grids import grid

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from invariants import check_invariants, check_pool  # noqa: F401


class FakeModel:
    """Token ids in place of keys and values. The next token is a checksum of all that a row can read through its block table, and of
    its adapter: with a stale block or a forgotten copy it is another one, and a place that was never written raises TypeError.

    `block_size=0`: no blocks, each row's tokens lie in its slot."""

    def __init__(self, block_size=64, vocab=50):
        self.block_size, self.vocab, self.kv = block_size, vocab, {}

    def next_token(self, ids, adapter=0):
        return crc32(array("q", ids).tobytes(), adapter) % self.vocab

    def alone(self, request):
        "The oracle: the tokens that `request` gets with no other request around."
        ids = list(request.prompt_ids)
        for _ in range(request.max_tokens):
            ids.append(self.next_token(ids, request.adapter))
        return ids[len(request.prompt_ids) :]

    def read(self, batch, i):
        "What row i can read."
        table = batch.block_table[i] if self.block_size else [batch.slots[i]]
        return list(chain.from_iterable(self.kv.get(b, ()) for b in table))

    def write(self, batch, i, ids, start):
        if not self.block_size:
            self.kv.setdefault(batch.slots[i], [])[start:] = ids
        else:
            for at, t in zip(batch.slot_mapping[batch.cu_seqlens[i] :], ids):
                block = self.kv.setdefault(at // self.block_size, [None] * self.block_size)
                block[at % self.block_size] = t

    def execute(self, batch):
        "Do what `batch` says: a next token for each of its `logits_at`."
        for found, block in batch.loads:
            self.kv[block] = list(found.data)
        for a, b, n in batch.copies:
            self.kv[b] = self.kv[a][:n] + [None] * (self.block_size - n)
        spans = list(zip(batch.cu_seqlens, batch.cu_seqlens[1:], batch.starts))
        for i, (first, end, start) in enumerate(spans):
            self.write(batch, i, batch.ids[first:end], start)
        found = {}
        for i, (first, end, start) in enumerate(spans):
            lies, due = self.read(batch, i), [at for at in batch.logits_at if first <= at < end]
            for at in due:
                found[at] = self.next_token(lies[: start + at - first + 1], batch.adapters[i])
        return [found[at] for at in batch.logits_at]


def outputs(plan, tokens):
    "A `RowOutput` for each row of `plan`, of the model's `tokens`."
    found, tokens = [], iter(tokens)
    for row in plan.rows:
        due = [next(tokens) for _ in range(row.num_logits)]
        found.append(RowOutput(due[-1:]))
    return found


def one_step(s, model, check=None):
    "One step of scheduler `s`: what it did."
    plan = s.schedule()
    if check:
        check(s, plan)
    did = record(s, plan)
    s.update(plan, outputs(plan, model.execute(make_batch(plan, s.block_size))))
    return did


Did = namedtuple("Did", "slot name n samples is_prompt again")


def record(s, plan):
    "What step `plan` does, a `Did` for each row; `again` counts positions that were computed before."
    rows = [
        Did(
            row.request.slot,
            row.request.request_id,
            row.n_tokens,
            row.samples,
            row.start < len(row.request.prompt_ids),
            max(0, min(row.request.num_seen, row.start + row.n_tokens) - row.start),
        )
        for row in plan.rows
    ]
    return SimpleNamespace(
        plan=plan,
        rows=rows,
        num_tokens=plan.num_tokens,
        waiting=len(s.waiting),
        again=sum(row.again for row in rows),
        blocks=snapshot(s),
    )


def snapshot(s):
    "For each block of a small pool, who holds it: for pictures."
    if not s.block_size or len(s.pool) > 64:
        return []
    holders = [[r.request_id for r in s.running if i in r.block_table] for i in range(len(s.pool))]
    return [
        ("s", "") if len(h) > 1 else ("h", h[0]) if h else "c" if b.listed else "·"
        for h, b in zip(holders, s.pool.blocks)
    ]


def simulate(s, requests, at=None, check=None, limit=20_000):
    "Run `requests` (number i arrives at step `at[i]`) to the end and compare with the oracle: what each step did."
    model, history, at = FakeModel(s.block_size), [], at or [0] * len(requests)
    todo = sorted(zip(at, range(len(requests))))[::-1]
    while todo or s.has_unfinished:
        while todo and todo[-1][0] <= len(history):
            s.add(requests[todo.pop()[1]])
        history.append(one_step(s, model, check))
        assert len(history) < limit, "it does not end"
    assert all(r.output_ids == model.alone(r)[: len(r.output_ids)] for r in requests)
    return history


run = partial(simulate, check=check_invariants)  # all books are read at every step


def beside_a_batch(s, pace, clients, prompt, line, seconds=60):
    """Clients that each send a prompt of so many tokens and read 30, one after the other, beside lines of `(prompt, answer)` tokens.

    `pace`: of the lines, on a clock that goes 7.5 ms a step and half a millisecond a position. Counts, and the lines' part of the time, by their part of each step's positions."""
    waits, lines, done, late, clock = [None] * clients, [], Counter(), 0.0, 0.0
    new = lambda n, *how, **more: s.add(Request(str(s.arrivals), [s.arrivals] * n, *how, **more))
    while clock < seconds:
        for i, r in enumerate(waits):
            if r is None or r.finish_reason:
                done["online requests answered"] += r is not None
                waits[i] = new(prompt, 30, online=True)
        done["lines answered"] += sum(r.finish_reason is not None for r in lines)
        lines = [r for r in lines if not r.finish_reason]
        while len(lines) < s.max_num_seqs + 1:
            lines.append(new(*line, priority=10**6, preemptible=True))
        s.allowance = pace.allowance(s.has_others)
        if pace.owed > 0:
            s.lift()
        plan = s.schedule()
        s.update(plan, [RowOutput([7] * row.samples) for row in plan.rows])
        pace.note(*s.shares, took := 0.0075 + 0.0005 * plan.num_tokens)
        clock += took
        late += took * s.shares[2] / max(1, plan.num_tokens)
    return {**done, "part of the time for lines": late / clock}


def ids(rng, low, high):
    "Random token ids, between `low` and `high` of them."
    return [rng.randrange(50) for _ in range(rng.randint(low, high))]


def longest_gap(history, request_id):
    "Between two tokens of a request, at the longest: steps, and positions that were computed in them."
    total, at = 0, []
    for i, step in enumerate(history):
        total += step.num_tokens
        if any(row.name == request_id and row.samples for row in step.rows):
            at.append((i, total))
    return tuple(max(b - a for a, b in zip(c, c[1:])) for c in zip(*at))


DOES = {
    "p": ("prefill", "its prompt"),
    "d": ("decode", "decodes"),
    "a": ("again", "computed again"),
    "w": ("blocked", "waits"),
    "·": ("idle", "empty"),
}
BLOCK = {
    "h": ("held", "held by a request"),
    "s": ("decode", "shared"),
    "c": ("cached", "cached"),
    "·": ("idle", "free"),
}


def box(row, text):
    return "a" if row.again else "p" if row.is_prompt else "d", text


def by_slot(history, num_slots):
    "A row for each slot, a box for each step, with the name of the request in it."
    rows = [["·"] * len(history) for _ in range(num_slots)]
    for i, step in enumerate(history):
        for row in step.rows:
            rows[row.slot][i] = box(row, row.name)
    return rows


def by_request(history, arrivals):
    "A row for each request, a box for each step, with the positions it got. `arrivals`: name → step."
    rows = []
    for name, at in arrivals.items():
        mine = {i: row for i, step in enumerate(history) for row in step.rows if row.name == name}
        end, steps = max(mine, default=-1), range(len(history))
        rows.append(
            [
                box(mine[i], mine[i].n) if i in mine else "w" if at <= i <= end else " "
                for i in steps
            ]
        )
    return rows


def show(history, title, arrivals=None):
    "A picture of a short run: which requests are in each step with how many positions, and how many all together."
    arrivals = dict(arrivals or {})
    for i, step in enumerate(history):
        for row in step.rows:
            arrivals.setdefault(row.name, i)
    rows = [*by_request(history, arrivals), " ", [("s", step.num_tokens) for step in history]]
    return grid(
        rows,
        {**DOES, "s": ("held", "")},
        [*arrivals, "", "all"],
        columns=range(len(history)),
        title=title,
    )


def by_block(history, title):
    "A picture of the pool: a row for each block, a box for each step."
    steps = [step.blocks for step in history]
    rows = [[b[i] if i < len(b) else " " for b in steps] for i in range(max(map(len, steps)))]
    return grid(
        rows,
        BLOCK,
        [f"block {i}" for i in range(len(rows))],
        columns=range(len(steps)),
        title=title,
    )


def counts(s, history):
    "How a run of scheduler `s` went, in numbers."
    rows = sum(len(step.rows) for step in history)
    return {
        "steps": len(history),
        "rows a step": round(rows / len(history), 1),
        "preemptions": s.num_preemptions,
        "positions computed": s.ledger.useful + s.ledger.recomputed,
        "of them again": s.ledger.recomputed,
    }


def prefill(model, ids, cache=None):
    "Run `ids` through `model`, behind what `cache` holds: logits `[V]` of the last, and the cache."
    import torch
    from transformers import DynamicCache

    from batchlab.basics.prefill import SoloEngine

    cache = DynamicCache() if cache is None else cache
    with torch.inference_mode():
        return SoloEngine(model).extend(cache, [*ids])[0], cache
