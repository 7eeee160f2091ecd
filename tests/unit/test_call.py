"""A call as messages show it."""

from __future__ import annotations

from dualdist.core.agreement.call import Call
from dualdist.core.training.parameters import BROADCAST_PARAMETERS


def make_call(num_parameters: int) -> Call:
    parameters = tuple((f"layer{number}.weight", (64, 64), "float32") for number in range(num_parameters))
    return Call(BROADCAST_PARAMETERS, (("parameters", parameters),), None, ("train.py", 7))


def test_a_message_shows_a_short_call_whole() -> None:
    assert make_call(1).brief == f"{make_call(1)} at train.py:7"


def test_a_message_does_not_show_all_parameters_of_a_model() -> None:
    brief = make_call(300).brief
    assert brief.startswith("broadcast_parameters(parameters=(('layer0.weight', (64, 64), 'float32'), ")
    assert brief.endswith("...) at train.py:7") and len(brief) < 500
