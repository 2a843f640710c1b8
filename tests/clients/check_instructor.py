"instructor, unchanged: objects of pydantic by a schema, by JSON and by tools."

import instructor, openai, pytest
from instructor.core import InstructorRetryException
from pydantic import BaseModel, Field

MODES = dict(
    schema=instructor.Mode.JSON_SCHEMA, json=instructor.Mode.JSON, tools=instructor.Mode.TOOLS
)


class Colour(BaseModel):
    red: int = Field(ge=0, le=255)


@pytest.mark.parametrize("mode", MODES)
def test_an_object(url, model, tools, mode):
    if mode == "tools" and not tools:
        pytest.skip("the model's template knows no tools")
    own = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=300)
    client = instructor.from_openai(own, mode=MODES[mode])
    ask = dict(model=model, messages=[dict(role="user", content="Is red bright?")])
    how = dict(response_model=Colour, max_tokens=200, temperature=0, max_retries=0)
    try:
        assert isinstance(client.chat.completions.create(**ask, **how), Colour)
    except InstructorRetryException as e:  # JSON, of another form
        assert mode == "json" and "1 validation error for Colour" in str(e)
