"litellm's proxy, unchanged, between OpenAI's client and the server: chats, whole and streamed, responses, and files and batches that it passes on."

import json, os, re, secrets, socket, subprocess, sys, time
from pathlib import Path

import httpx, openai, pytest

CONFIG = """model_list:
  - model_name: small
    litellm_params: {{model: openai/{model}, api_base: {url}/v1, api_key: any}}
files_settings:
  - {{custom_llm_provider: openai, api_base: {url}/v1, api_key: any}}
litellm_settings: {{telemetry: false}}
"""
TALK = [dict(role="user", content="Name three colours.")]
SHORT = dict(messages=TALK, max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def proxy(url, model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("proxy")
    (folder / "config.yaml").write_text(CONFIG.format(url=url, model=model))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    key = f"sk-{secrets.token_hex(32)}"  # without one that is hard to guess it does not start
    env = os.environ | dict(
        LITELLM_LOCAL_MODEL_COST_MAP="True",
        LITELLM_MASTER_KEY=key,
        OPENAI_API_KEY="any",
        OPENAI_BASE_URL=f"{url}/v1",
    )
    litellm = str(Path(sys.executable).parent / "litellm")
    command = [litellm, "--config", "config.yaml", "--port", str(port), "--host", "127.0.0.1"]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log) as p,
    ):
        for _ in range(600):
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health/liveliness").status_code == 200:
                    break
            except httpx.TransportError:
                assert p.poll() is None, (folder / "log").read_text()[-2000:]
                time.sleep(0.5)
        yield openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}", api_key=key, max_retries=0, timeout=300
        )
        p.terminate()


@pytest.fixture(scope="module")
def direct(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=300) as c:
        yield c


def test_chat(proxy, direct, model):
    want = direct.chat.completions.create(model=model, **SHORT).choices[0].message.content
    assert proxy.chat.completions.create(model="small", **SHORT).choices[0].message.content == want
    parts = proxy.chat.completions.create(model="small", **SHORT, stream=True)
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == want


def test_responses(proxy, direct, model):
    # it asks for at least 16 tokens, which is the least that OpenAI takes
    own = dict(input="Name three colours.", max_output_tokens=20, temperature=0)
    want = direct.responses.create(model=model, **own).output_text
    assert proxy.responses.create(model="small", **own).output_text == want


def test_files_and_batches(proxy, model):
    lines = [
        dict(
            custom_id=f"r{i}",
            method="POST",
            url="/v1/chat/completions",
            body=dict(model=model, **SHORT),
        )
        for i in range(2)
    ]
    data = "".join(json.dumps(d) + "\n" for d in lines).encode()
    how = dict(extra_body=dict(custom_llm_provider="openai"))
    file = proxy.files.create(file=("in.jsonl", data), purpose="batch", **how)
    batch = proxy.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", **how
    )
    for _ in range(600):
        batch = proxy.batches.retrieve(batch.id, extra_query=dict(provider="openai"))
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            break
        time.sleep(0.5)
    assert batch.status == "completed" and batch.request_counts.completed == 2
    text = proxy.files.content(batch.output_file_id, extra_query=dict(provider="openai")).text
    assert re.findall('"custom_id": *"(r.)"', text)
