"What was taken out says, where it is asked for, what to do instead."

import pytest

from batchlab import LLM
from batchlab.errors import ParamError
from batchlab.models import tiny_model

small = tiny_model("llama", num_hidden_layers=1)
REMOVED = [  # the call, what it raises, the name at fault, what the advice names
    (lambda: LLM(small, speculation="owner/draft"), ParamError, "speculation", "lookup"),
    (lambda: LLM(small, speculation=small), ParamError, "speculation", "lookup"),
]


@pytest.mark.parametrize("call, kind, field, instead", REMOVED)
def test_what_to_do_instead(call, kind, field, instead):
    with pytest.raises(kind) as e:
        call()
    assert e.value.field == field and instead in e.value.advice
    assert instead in str(e.value) and "\n" not in str(e.value)
