"""Codex, unchanged: `codex exec` asks /v1/responses in a stream, with its own tools, and what it asks is answered.

Its hosted search and its agents are turned off, as these tools are no functions, and its instructions are short, as the
default model holds 8,192 tokens."""

import json, os, subprocess


CONFIG = """model = "{model}"
model_provider = "batchlab"
model_instructions_file = "{folder}/instructions.md"
web_search = "disabled"
[features]
multi_agent = false
goals = false
apps = false
plugins = false
[model_providers.batchlab]
name = "batchlab"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "BATCHLAB_KEY"
request_max_retries = 0
stream_max_retries = 0
"""


def test_exec(url, model, tmp_path):
    (tmp_path / "home").mkdir()
    config = CONFIG.format(url=url, model=model, folder=tmp_path)
    (tmp_path / "home" / "config.toml").write_text(config)
    (tmp_path / "instructions.md").write_text("Say one word.")
    env = os.environ | dict(CODEX_HOME=str(tmp_path / "home"), BATCHLAB_KEY="any")
    codex = os.path.join(os.environ["BATCHLAB_NODE"], "node_modules", ".bin", "codex")
    command = [
        codex,
        "exec",
        "--json",
        "--skip-git-repo-check",
        "--sandbox",
        "read-only",
        "Say hello.",
    ]
    how = dict(cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, **how)
    events = [json.loads(x) for x in done.stdout.splitlines() if x.startswith("{")]
    kinds = [e["type"] for e in events]
    assert done.returncode == 0 and "turn.completed" in kinds, (events[-3:], done.stderr[-2000:])
    assert not [e for e in events if e["type"] in ("error", "turn.failed")], events[-3:]
