"""Run by the engine environment's Python: what transformers makes of conversations, and vLLM's parsers of outputs.

Reads JSON from stdin (``folder``, ``conversations``, ``outputs``), writes JSON to stdout.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer


def rendered(tokenizer: Any, case: dict[str, Any]) -> dict[str, Any]:
    text = tokenizer.apply_chat_template(
        case["messages"],
        tools=case["tools"],
        tokenize=False,
        add_generation_prompt=case["open"],
        **case["more"],
    )
    return {"text": text, "ids": tokenizer(text, add_special_tokens=False).input_ids}


def as_vllm(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Messages and tools in the form in which vLLM's renderer gives them to the template."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.renderers import chat_utils

    config = SimpleNamespace(multimodal_config=None, enable_prompt_embeds=False)
    parser = SimpleNamespace(model_config=config, mm_placeholder_storage=dict, use_unified_vision_chunk=False)
    tracker = SimpleNamespace(create_parser=lambda **_: parser, model_config=config)
    made: list[Any] = []
    for message in messages:
        made += chat_utils._parse_chat_message_content(message, tracker, "string", False)
    chat_utils._postprocess_messages(made)
    dumped = [ChatCompletionToolsParam.model_validate(tool).model_dump() for tool in tools or []]
    return {"messages": made, "tools": dumped or None}


def parsed(tokenizer: Any, output: str) -> dict[str, Any]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager

    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    request = ChatCompletionRequest(
        messages=[{"role": "user", "content": "x"}], tools=[tool], tool_choice="auto"
    )
    kind = ParserManager.get_parser(
        tool_parser_name="hermes", reasoning_parser_name="qwen3", enable_auto_tools=True, tokenizer=tokenizer
    )
    parser = kind(tokenizer, request.tools, chat_template_kwargs={})
    reasoning, content, calls = parser.parse(output, request, enable_auto_tools=True)
    return {
        "reasoning": reasoning,
        "content": content,
        "calls": [[call.name, call.arguments] for call in calls or []],
    }


def main() -> None:
    given = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(given["folder"])
    answer = {
        "rendered": [rendered(tokenizer, case) for case in given["conversations"]],
        "as_vllm": [as_vllm(case["messages"], case["tools"]) for case in given["requests"]],
        "parsed": [parsed(tokenizer, output) for output in given["outputs"]],
    }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
