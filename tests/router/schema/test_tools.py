from __future__ import annotations

import msgspec
import pytest

from tgi.router.schema.tools import NamedTool, Tool, ToolChoice


@pytest.mark.parametrize(
    "body",
    [
        '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": true}}',
        '{"type": "function", "function": {"name": "f", "description": null, "parameters": null, "strict": null}}',
        '{"function": {"name": "f", "arguments": "{}"}, "unknown": 1}',
        '{"function": {"name": "f"}}',
    ],
)
def test_tools_in_openais_shape_and_tgis(body: str) -> None:
    tool = msgspec.json.decode(body, type=Tool)
    assert (tool.type, tool.function.name) == ("function", "f")


@pytest.mark.parametrize("body", ['{"function": {}}', '{"type": "function"}', '"f"', '{"function": {"name": 1}}'])
def test_a_tool_without_a_name_is_none(body: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(body, type=Tool)


def test_choices() -> None:
    assert msgspec.json.decode('"auto"', type=ToolChoice) == "auto"
    for body in ('{"type": "function", "function": {"name": "f"}}', '{"function": {"name": "f"}}'):
        choice = msgspec.json.decode(body, type=ToolChoice)
        assert isinstance(choice, NamedTool)
        assert choice.function.name == "f"
