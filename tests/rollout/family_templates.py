"""Chat templates of our own, each of the kind of a family's: how it writes calls, thoughts, results and ends."""

from __future__ import annotations

import copy

from chat_tokenizers import bpe_tokenizer

_CALLS = "{% for c in m.tool_calls or [] %}"
_SPECS = "{% for t in tools %}{{ '\n' + t | tojson }}{% endfor %}"
_SYSTEM = "{% if tools %}{{ '<|im_start|>system\n# Tools' }}" + _SPECS + "{{ '<|im_end|>\n' }}{% endif %}"
_RESULTS = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
_LAST_QUESTION = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
_XML_VALUES = (
    "{% for k, v in c.function.arguments.items() %}{{ '<parameter=' + k + '>\n' }}"
    "{{ v if v is string else v | tojson }}{{ '\n</parameter>\n' }}{% endfor %}"
)
_XML_CALLS = (
    _CALLS + "{% if not loop.first or content %}{{ '\n' }}{% endif %}"
    "{{ '<tool_call>\n<function=' + c.function.name + '>\n' }}" + _XML_VALUES + "{{ '</function>\n</tool_call>' }}"
    "{% endfor %}"
)
# Prompts open the thought; what was thought before the last question is left out (Qwen3.5).
OPENS_XML = (
    _SYSTEM + _LAST_QUESTION + "{% for m in messages %}{% if m.role == 'tool' %}" + _RESULTS + "{% elif m.role == "
    "'assistant' %}{% set content = m.content | trim %}{% set thought = m.reasoning_content or '' %}"
    "{% if '</think>' in content %}{% set thought = content.split('</think>')[0].split('<think>')[-1] | trim %}"
    "{% set content = content.split('</think>')[-1] | trim %}{% endif %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + thought | trim + '\n</think>\n\n' }}{% endif %}{{ content }}"
    + _XML_CALLS
    + "{{ '<|im_end|>\n' }}{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# The same with earlier thoughts kept (Qwen3.8).
OPENS_AND_KEEPS = OPENS_XML.replace("{% if loop.index0 > ns.last %}", "{% if true %}")
# A response without a thought is shown with an empty one, which prompts don't open so (Nemotron 3).
OPENS_OR_EMPTY = OPENS_XML.replace(
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + thought | trim + '\n</think>\n\n' }}{% endif %}",
    "{{ '<think>\n' + thought + '\n</think>\n' if thought else '<think></think>' }}",
)
# No token ends a turn, thoughts have blanks that no content has (GLM-4.5).
PAIRS = (
    "{{ '[gMASK]' }}{% if tools %}{{ '<|system|>\n# Tools' }}" + _SPECS + "{% endif %}" + _LAST_QUESTION +
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>' }}{% set content = m.content %}"
    "{% set thought = m.reasoning_content or '' %}{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1] | trim %}"
    "{% set content = content.split('</think>')[-1] | trim %}{% endif %}"
    "{{ '\n<think>' + (thought if loop.index0 > ns.last else '') + '</think>' }}"
    "{% if content %}{{ '\n' + content }}{% endif %}" + _CALLS + "{{ '\n<tool_call>' + c.function.name + '\n' }}"
    "{% for k, v in c.function.arguments.items() %}{{ '<arg_key>' + k + '</arg_key>\n<arg_value>' }}"
    "{{ v if v is string else v | tojson }}{{ '</arg_value>\n' }}{% endfor %}{{ '</tool_call>' }}{% endfor %}"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% else %}{{ '<|' + m.role + '|>\n' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)  # fmt: skip
_INSTRUCT = (
    "{{ '<s>' }}{% if tools %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{% elif m.role == 'assistant' %}{{ m.content }}CALLS{{ '</s>' }}"
    "{% else %}{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}{% endif %}{% endfor %}"
)
# A name after the mark (Mistral v11 with ids, v13 without), and before that a list.
NAMED_MARK = _INSTRUCT.replace(
    "CALLS", _CALLS + "{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}{% endfor %}"
)
NAMED_MARK_WITH_IDS = NAMED_MARK.replace("+ '[ARGS]'", "+ '[CALL_ID]' + c.id + '[ARGS]'")
LISTED_MARK = _INSTRUCT.replace(
    "CALLS",
    "{% if m.tool_calls %}{{ '[TOOL_CALLS] [' }}" + _CALLS + "{{ '{\"name\": ' + c.function.name | tojson + "
    "', \"arguments\": ' + c.function.arguments | tojson + ', \"id\": \"' + c.id + '\"}' }}"
    "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ']' }}{% endif %}",
)
# Keys without quotes, results only after calls and in the same turn, calls with an end of their own (Gemma 4).
UNQUOTED = (
    "{% macro value(v) %}{% if v is string %}{{ '<|\"|>' + v + '<|\"|>' }}{% elif v is mapping %}{{ '{' }}"
    "{% for k, x in v | dictsort %}{{ k + ':' + value(x) }}{% if not loop.last %},{% endif %}{% endfor %}{{ '}' }}"
    "{% elif v is iterable %}{{ '[' }}{% for x in v %}{{ value(x) }}{% if not loop.last %},{% endif %}{% endfor %}"
    "{{ ']' }}{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
    "{% if tools %}{{ '<|turn>system\n' }}{% for t in tools %}{{ '<|tool>' + t.function.name + '<tool|>' }}{% endfor %}"
    "{{ '<turn|>\n' }}{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|turn>model\n' }}{% endif %}"
    "{% if m.reasoning_content %}{{ '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}{% endif %}"
    + _CALLS + "{{ '<|tool_call>call:' + c.function.name + value(c.function.arguments) + '<tool_call|>' }}{% endfor %}"
    "{% if m.tool_calls %}{{ '<|tool_response>' }}{% else %}{{ m.content | trim + '<turn|>\n' }}{% endif %}"
    "{% elif m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].tool_calls or messages[loop.index0 - 1].role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role == 'tool' %}{{ '<|tool_response>' }}{% endif %}"
    "{{ 'response{value:' + m.content + '}<tool_response|>' }}{% endif %}"
    "{% else %}{{ '<|turn>' + m.role + '\n' + m.content | trim + '<turn|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|turn>model\n' }}{% endif %}"
)  # fmt: skip
# Channels; the thought has a key of its own, one call per message, and a call ends otherwise than a text (gpt-oss).
CHANNELS = (
    "{% if tools %}{{ '<|start|>developer<|message|># Tools' }}" + _SPECS + "{{ '<|end|>' }}{% endif %}"
    "{% set ns = namespace(name='') %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.thinking %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{% endif %}"
    "{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}{% set ns.name = c.name %}"
    "{{ '<|start|>assistant to=functions.' + c.name + '<|channel|>commentary json<|message|>' }}"
    "{{ c.arguments | tojson + '<|call|>' }}{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}{% elif m.role == 'tool' %}"
    "{% if not ns.name %}{{ raise_exception('a result without a call') }}{% endif %}"
    "{{ '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson }}"
    "{{ '<|end|>' }}{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
_CHATML_CALLS = _SYSTEM + (
    "{% for m in messages %}{% if m.role == 'tool' %}" + _RESULTS + "{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}CALLS{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SEED = _CHATML_CALLS.replace(
    "CALLS", _XML_CALLS.replace("tool_call>", "seed:tool_call>").replace("content", "m.content")
)
# Arguments are joined as text; the first with a kind and a fence, the second without (DeepSeek V3, V3.1).
FENCED = _CHATML_CALLS.replace(
    "CALLS",
    "{% if m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}"
    + _CALLS
    + "{{ '<｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>'"
    " + c.function.name + '\n```json\n' + c.function.arguments + '\n```<｜tool▁call▁end｜>' }}{% endfor %}"
    "{{ '<｜tool▁calls▁end｜>' }}{% endif %}",
)
MARKED = FENCED.replace(
    "c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' + ", "c.function.name + '<｜tool▁sep｜>' + "
)
MARKED = MARKED.replace("'\n```<｜tool▁call▁end｜>'", "'<｜tool▁call▁end｜>'")
# The id stands for the name (Kimi K2).
BY_ID = _CHATML_CALLS.replace(
    "CALLS",
    "{% if m.tool_calls %}{{ '<|tool_calls_section_begin|>' }}" + _CALLS + "{{ '<|tool_call_begin|>' + c.id + "
    "'<|tool_call_argument_begin|>' + c.function.arguments | tojson + '<|tool_call_end|>' }}{% endfor %}"
    "{{ '<|tool_calls_section_end|>' }}{% endif %}",
)
# As Python writes calls (LFM2): no parser reads it.
PYTHONIC = _CHATML_CALLS.replace(
    "CALLS",
    _CALLS + "{{ '<|tool_call_start|>[' + c.function.name + '(' }}{% for k, v in c.function.arguments.items() %}"
    "{{ k + '=' + v | string + ', ' }}{% endfor %}{{ ')]<|tool_call_end|>' }}{% endfor %}",
)
TELLS_ONLY = _CHATML_CALLS.replace("CALLS", "")

FAMILIES = {
    "qwen3.5": (OPENS_XML, "qwen_coder"),
    "qwen3.8": (OPENS_AND_KEEPS, "qwen_coder"),
    "nemotron3": (OPENS_OR_EMPTY, "qwen_coder"),
    "glm4.5": (PAIRS, "glm"),
    "mistral v13": (NAMED_MARK, "mistral"),
    "mistral v11": (NAMED_MARK_WITH_IDS, "mistral"),
    "mistral v3": (LISTED_MARK, "mistral"),
    "gemma4": (UNQUOTED, "gemma"),
    "gpt-oss": (CHANNELS, "harmony"),
    "seed-oss": (SEED, "seed_oss"),
    "deepseek v3": (FENCED, "deepseek"),
    "deepseek v3.1": (MARKED, "deepseek"),
    "kimi k2": (BY_ID, "kimi"),
}
"""Family -> template of its kind, and the parser of its calls."""

MARKS = (
    "<s>", "</s>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "<|turn>", "<turn|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>', "<|channel>",
    "<channel|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
    "<|tool_call_argument_begin|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "[gMASK]",
    "<tool_call>", "</tool_call>", "<|python_tag|>",
)  # fmt: skip


def marked_tokenizer(template):
    """A tokenizer with a family's marks as special tokens."""
    tokenizer = copy.deepcopy(bpe_tokenizer(template))
    tokenizer.add_special_tokens({"extra_special_tokens": list(MARKS)})
    return tokenizer
