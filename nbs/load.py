"""What chapters 49 and 61 load a server with: the server as a process of its own, and a client that does no more than it must."""

import asyncio, contextlib, itertools, json, re, subprocess, sys, threading, time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple


class Reply(NamedTuple):
    "`sent`: seconds on this process's clock; `status`: of HTTP; `times`: when each part of the answer came."

    sent: float
    status: int
    times: list[float]


@contextlib.contextmanager
def serving(*flags: object) -> Iterator[tuple[str, int]]:
    "`batchlab serve` with the default model: its address."
    command = [sys.executable, "-m", "batchlab.cli", "serve", "--port", "0", "--no-request-log"]
    p = subprocess.Popen([*command, *map(str, flags)], stderr=subprocess.PIPE, text=True)
    try:
        address = next(m for line in p.stderr if (m := re.search(r"http://([\d.]+):(\d+)", line)))
        # what the server says later must not fill the pipe
        threading.Thread(target=p.stderr.read, daemon=True).start()
        yield address[1], int(address[2])
    finally:
        p.terminate()
        p.wait()


async def stream_from(address: tuple, prompt: list[int], tokens: int, after: float = 0) -> Reply:
    "A streamed completion of `tokens` tokens, asked for `after` seconds from now."
    await asyncio.sleep(after)
    asked = dict(prompt=prompt, max_tokens=tokens, temperature=0, ignore_eos=True, stream=True)
    body, sent, status, times = json.dumps(asked).encode(), time.perf_counter(), 0, []
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    reader, writer = await asyncio.open_connection(*address)
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    async for line in reader:
        if not status:
            status = int(line.split()[1])
        elif line.startswith(b"data: {"):
            times.append(time.perf_counter())
    writer.close()
    return Reply(sent, status, times)


def streams(
    address: tuple, prompts: Sequence[list[int]], tokens: int, starts: Iterable[float] = ()
) -> list[Reply]:
    "The `Reply` to each of `prompts`, all at once or `starts` seconds from now. In a thread, as a notebook has a loop of its own."
    starts = list(starts) or [0.0] * len(prompts)

    async def all_of_them():
        asked = zip(prompts, starts, strict=True)
        return await asyncio.gather(*(stream_from(address, p, tokens, s) for p, s in asked))

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, all_of_them()).result()


def seconds_of(replies: Sequence[Reply]) -> float:
    "From the first request to the last part of an answer."
    return max(r.times[-1] for r in replies) - min(r.sent for r in replies)


def new_prompts(n: int, seen: Iterator[int] = itertools.count()) -> list[list[int]]:
    "`n` prompts of 64 token ids that no cache knows."
    rows = itertools.islice(seen, n)
    return [[1000 + i, *(100 + (7 * i + j) % 800 for j in range(63))] for i in rows]
