"""Chat templates shaped like well-known ones for tools: Qwen3's, Llama 3.1's, Mistral's, and some that rewrite."""

from __future__ import annotations

_CHATML_END = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_HERMES_TOOLS = "{{ '# Tools\n<tools>' }}{% for t in tools %}{{ '\n' + t | tojson }}{% endfor %}{{ '\n</tools>' }}"
_HERMES_CALLS = (
    "{% for c in m.tool_calls or [] %}{% if not loop.first or m.content %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}"
    "{{ '}\n</tool_call>' }}{% endfor %}"
)
_MERGED_RESULTS = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)

# What earlier responses thought is left out, tools stand in the system message, results that follow each other merge.
QWEN3 = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}"
    "{% endif %}" + _HERMES_TOOLS + "{{ '<|im_end|>\n' }}{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}" + _MERGED_RESULTS + "{% elif m.role == 'assistant' %}"
    "{% set content = m.content %}{% if '</think>' in content and loop.index0 < ns.last %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>assistant\n' + content }}" + _HERMES_CALLS + "{{ '<|im_end|>\n' }}"
    "{% elif not (tools and loop.first and m.role == 'system') %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}" + _CHATML_END
)
# Tools in the first question, one call per response, results in a role of their own, contents without blanks.
LLAMA31 = (
    "{{ '<|begin_of_text|>' }}{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
    "{% elif m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('only one call at once') }}{% endif %}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + m.tool_calls[0].function.name }}'
    "{{ '\", \"parameters\": ' }}{{ m.tool_calls[0].function.arguments | tojson }}{{ '}<|eot_id|>' }}"
    "{% else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{% if loop.first and tools %}{% for t in tools %}{{ t | tojson + '\n' }}{% endfor %}{% endif %}"
    "{{ m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Results are taken only after calls, and calls have no text beside them.
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.last %}"
    "{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' and "
    "not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('a result without a call') }}{% endif %}"
    "{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS][' }}{% for c in m.tool_calls %}{{ c.function | tojson }}"
    "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']<|endoftext|>' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + '<|endoftext|>' }}{% else %}{{ m.content + '\n' }}{% endif %}"
    "{% endfor %}"
)
# Messages have numbers from the end: what was written changes with every message that follows.
COUNTS_BACK = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + loop.revindex | string + '\n' + m.content }}"
    + _HERMES_CALLS
    + "{{ '<|im_end|>\n' }}{% endfor %}"
    + _CHATML_END
)
# Numbers from the beginning, which hold.
NUMBERS = COUNTS_BACK.replace("revindex", "index").replace(
    "'<|im_start|>assistant\n'", "'<|im_start|>assistant ' + (messages | length + 1) | string + '\n'"
)
ENDS = {QWEN3: "<|im_end|>", LLAMA31: "<|eot_id|>", MISTRAL: "<|endoftext|>"}


def end_of(template: str) -> str:
    """What closes a response."""
    return ENDS.get(template, "<|im_end|>")
