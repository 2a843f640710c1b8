"""langchain-tests' standard suite for chat models, unchanged, with langchain-openai's `ChatOpenAI`.

What the suite asks of a model's mind a model of 135M parameters need not have: such tests may fail, each for the reason given."""

import os

import pytest
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

URL, MODEL, TOOLS = (
    os.environ["BATCHLAB_URL"] + "/v1",
    os.environ["BATCHLAB_SERVED"],
    os.environ["BATCHLAB_TOOLS"] == "1",
)


class Ours:
    chat_model_class = ChatOpenAI
    # greedy, but not over and over the same; one call at a time, as the small model goes on otherwise
    chat_model_params = dict(
        model=MODEL,
        base_url=URL,
        api_key="any",
        temperature=0,
        frequency_penalty=0.8,
        max_completion_tokens=200,
        timeout=300,
        stream_usage=True,
        model_kwargs=dict(parallel_tool_calls=False),
    )
    has_tool_calling = has_tool_choice = TOOLS
    has_structured_output = supports_json_mode = supports_model_override = True
    structured_output_kwargs = {} if TOOLS else dict(method="json_schema")
    model_override_value = MODEL
    init_from_env_params = (
        dict(OPENAI_API_KEY="any", OPENAI_API_BASE=URL),
        dict(model=MODEL),
        dict(openai_api_key="any", openai_api_base=URL),
    )


class TestClass(Ours, ChatModelUnitTests):
    pass


class TestServed(Ours, ChatModelIntegrationTests):
    @pytest.mark.xfail(reason="JSON mode has no schema: the model chooses keys of its own")
    def test_json_mode(self, model):
        super().test_json_mode(model)

    @pytest.mark.xfail(
        not TOOLS,
        reason="ChatOpenAI asks by a tool call where the schema is one of pydantic 1, and the template knows no tools",
    )
    def test_structured_output_pydantic_2_v1(self, model):
        super().test_structured_output_pydantic_2_v1(model)

    @pytest.mark.xfail(TOOLS, reason="the model answers in words where a call is left to it")
    def test_agent_loop(self, model):
        super().test_agent_loop(model)
