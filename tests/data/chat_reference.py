"""What transformers makes of conversations: the reference of tests/data/test_chat.py.

The templates are short ones in the formats of the supported families, with marks around what the assistant says. In an
environment with transformers 5 and tokenizers:

    python -m tests.data.chat_reference tests/data/conversations.json

Recorded with transformers 5.24.0.
"""

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

TOOLS = """{%- macro described(tools) %}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
{%- endmacro %}
"""
CHATML = """{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
        THOUGHTS
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- if loop.first and tools %}{{- '\\n# Tools' + described(tools) }}{%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
THOUGHTS = """{%- set last = loop.last or messages[loop.index0 + 1].role == 'tool' %}
        {%- if last and message.reasoning_content %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}"""
TEMPLATES = {
    "llama3": TOOLS
    + """{{- bos_token }}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
    {%- if message.tool_calls %}
        {%- set call = message.tool_calls[0].function %}
        {%- if message.tool_calls | length > 1 %}{{ raise_exception('only one call at once') }}{%- endif %}
        {%- generation %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
        {%- endgeneration %}
    {%- elif message.role == 'assistant' %}
        {%- generation %}{{- message.content | trim + '<|eot_id|>' }}{% endgeneration %}
    {%- else %}
        {%- if loop.first and tools %}{{- 'Tools:' + described(tools) + '\\n\\n' }}{%- endif %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    "mistral": """{{ bos_token }}
{%- if messages[0].role == 'system' %}{% set first = messages[0].content + '\\n\\n' %}{% set turns = messages[1:] %}
{%- else %}{% set first = '' %}{% set turns = messages %}{% endif %}
{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {%- set is_last = message == users[-1] %}
        {%- if tools and is_last %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
        {{- '[INST] ' + (first if is_last else '') + message.content + '[/INST]' }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}' }}
        {{- '[/TOOL_RESULTS]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {%- generation %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (']' if loop.last else ', ') }}
        {%- endfor %}
        {{- eos_token }}
        {%- endgeneration %}
    {%- else %}
        {%- generation %}{{- ' ' + message.content + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}""",
    "qwen2": TOOLS + CHATML.replace("        THOUGHTS\n", ""),
    "qwen3": TOOLS + CHATML.replace("THOUGHTS", THOUGHTS),
    # An answer may be several messages, with a header each; the header of a result has the name of the function.
    "harmony": """{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') | list %}
        {{- '<|start|>assistant' }}
        {%- generation %}
        {%- if message.reasoning_content and not later | rejectattr('tool_calls', 'defined') | list %}
            {{- '<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|><|start|>assistant' }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- if message.content %}{{ raise_exception('content beside a call') }}{%- endif %}
            {%- set call = message.tool_calls[0].function %}
            {{- ' to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
            {{- call.arguments | tojson + '<|call|>' }}
        {%- else %}
            {{- '<|channel|>final<|message|>' + message.content + ('<|return|>' if loop.last else '<|end|>') }}
        {%- endif %}
        {%- endgeneration %}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + messages[loop.index0 - 1].tool_calls[0].function.name }}
        {{- ' to=assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}""",
    # The last answer only.
    "last": """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if loop.last %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{%- else %}{{ message.content }}<|im_end|>{% endif %}
{%- endfor %}""",
}  # fmt: skip
SPECIAL = ["<s>", "</s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>"]
SPECIAL += ["[INST]", "[/INST]"]
HARMONY = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>"]
OTHER = ["<tool_call>", "</tool_call>", "<think>", "</think>"]  # tokens that a text may contain

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü"}}}
RESULT = {"role": "tool", "content": "3", "tool_call_id": "abcdefghi"}
SYSTEM, ASK = {"role": "system", "content": "Be short."}, {"role": "user", "content": "One?"}
TWO = {"role": "user", "content": " Two? "}


def said(content: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "unicode": {"messages": [{"role": "user", "content": "What is naïve?"}, said("Simple, 😀 without malice.")]},
    "turns": {"messages": [SYSTEM, ASK, said("<think>one</think>\n\n1"), TWO, said("2")]},
    "empty": {"messages": [ASK, said(""), ASK, said("")]},
    "call": {"messages": [SYSTEM, ASK, said(None, tool_calls=[CALL]), RESULT, said("3")], "tools": [TOOL]},
    "last call": {"messages": [SYSTEM, ASK, said("", tool_calls=[CALL])], "tools": [TOOL]},
    "two calls": {"messages": [SYSTEM, ASK, said("Both.", tool_calls=[CALL, CALL]), RESULT, RESULT, said("4")]},
    "calls with thoughts": {
        "messages": [
            ASK, said(None, tool_calls=[CALL], reasoning_content="hm"), RESULT, said("3"),
            ASK, said(None, tool_calls=[CALL], reasoning_content="so"), RESULT,
        ],
        "tools": [TOOL],
    },
    "thoughts": {"messages": [ASK, said("1", reasoning_content="hm"), ASK, said("2", reasoning_content="so")]},
}  # fmt: skip


def without_marks(template: str) -> str:
    return re.sub(r"({%-? )(end)?generation", lambda tag: tag[1] + ("endif" if tag[2] else "if true"), template)


def write_tokenizer(template: str, place: Path, **settings: str) -> None:
    """Bytes, a few merges of them, and special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    place.mkdir(parents=True, exist_ok=True)
    merges = [("t", "h"), ("o", "n"), ("on", "e"), ("Ċ", "Ċ"), ("Ġ", "2")]
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in OTHER])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in HARMONY])
    tokenizer.save(str(place / "tokenizer.json"))
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (place / "tokenizer_config.json").write_text(json.dumps({**own, "chat_template": template, **settings}))


def record(template: str) -> dict[str, Any]:
    """For each conversation that the template supports its tokens, which of them the assistant says, and the text that
    asks for the last answer."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as place:
        write_tokenizer(template, Path(place))
        tokenizer = AutoTokenizer.from_pretrained(place)
    found = {}
    for name, line in CONVERSATIONS.items():
        messages, own = line["messages"], {"tools": line.get("tools")}
        if "tool_calls" in str(line) and "tool_calls" not in template:
            continue
        try:
            marked = tokenizer.apply_chat_template(messages, **own, return_dict=True, return_assistant_tokens_mask=True)
            asked = tokenizer.apply_chat_template(messages[:-1], **own, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # noqa: BLE001, the template's own
            print(f"{name}: {error}", file=sys.stderr)
            continue
        found[name] = {"ids": marked["input_ids"], "targets": marked["assistant_masks"], "asked": asked}
    return found


if __name__ == "__main__":
    recorded = {name: record(template) for name, template in TEMPLATES.items()}
    lines = [f"{json.dumps(name)}: {json.dumps(found, ensure_ascii=False)}" for name, found in recorded.items()]
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
