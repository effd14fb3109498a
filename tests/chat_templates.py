"""Chat templates in the shape of the supported families': shorter than theirs, with the same text around each turn.

Only the instructions about tools and the default system prompts are left out; the rest of a conversation renders as by
the published templates.
"""

from __future__ import annotations

_TOOLS_AND_SYSTEM = (
    "{%- if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "# Tools\n{{ tools | tojson }}<|im_end|>\n"
    "{%- elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
)
_LAST_QUERY = (
    "{%- set ns = namespace(last=messages | length - 1, found=false) %}"
    "{%- for m in messages[::-1] %}{% set text = m.content | trim %}"
    "{%- if not ns.found and m.role == 'user' "
    "and not (text.startswith('<tool_response>') and text.endswith('</tool_response>')) %}"
    "{%- set ns.found = true %}{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}"
)
_SPLIT_REASONING = (
    "{%- set reasoning = '' %}{% set content = m.content if m.content is string else '' %}"
    "{%- if m.reasoning_content is string %}{% set reasoning = m.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)
_JSON_CALLS = (
    "{%- for call in m.tool_calls or [] %}{% if content or not loop.first %}{{ '\n' }}{% endif %}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{{- '}\n</tool_call>' }}{% endfor %}"
)
_TOOL_RESULTS = (
    "{%- elif m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)


def _chatml(assistant: str, opening: str, before: str = "", filters: str = "") -> str:
    template = (
        f"{_TOOLS_AND_SYSTEM}{before}"
        "{%- for m in messages %}"
        "{%- if m.role == 'user' or m.role == 'system' and not loop.first %}"
        "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        f"{{%- elif m.role == 'assistant' %}}{assistant}{{{{- '<|im_end|>\n' }}}}{_TOOL_RESULTS}"
        f"{{%- endif %}}{{% endfor %}}{{% if add_generation_prompt %}}{opening}{{% endif %}}"
    )
    return template.replace("m.content + ", f"m.content{filters} + ")


_PLAIN = "{{- '<|im_start|>assistant\n' + content }}"
_THINKING = (
    "{{- '<|im_start|>assistant\n<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
)
_QWEN3 = (
    f"{_SPLIT_REASONING}{{%- if loop.index0 > ns.last and (loop.last or reasoning) %}}{_THINKING}"
    f"{{%- else %}}{_PLAIN}{{% endif %}}{_JSON_CALLS}"
)
_OPEN = "{{- '<|im_start|>assistant\n' }}"
_EMPTY_THOUGHT = "{{- '<think>\n\n</think>\n\n' }}"

QWEN_2_5 = _chatml(
    "{%- set content = m.content or '' %}{% if m.tool_calls %}{{ '<|im_start|>assistant' }}"
    "{%- if content %}{{ '\n' + content }}{% endif %}"
    "{%- for call in m.tool_calls %}"
    '{{- \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments | tojson }}{{- '}\n</tool_call>' }}{% endfor %}"
    f"{{%- else %}}{_PLAIN}{{% endif %}}",
    _OPEN,
)
QWEN_3 = _chatml(
    _QWEN3,
    f"{_OPEN}{{%- if enable_thinking is defined and not enable_thinking %}}{_EMPTY_THOUGHT}{{% endif %}}",
    _LAST_QUERY,
)
QWEN_3_INSTRUCT = _chatml(
    f"{{%- set content = m.content if m.content is string else '' %}}{_PLAIN}{_JSON_CALLS}", _OPEN
)
QWEN_3_THINKING = _chatml(_QWEN3, "{{- '<|im_start|>assistant\n<think>\n' }}", _LAST_QUERY)
QWEN_3_5 = _chatml(
    "{%- macro text(content) %}{% if content is string %}{{- content }}{% else %}"
    "{%- for part in content or [] %}{{- part.text }}{% endfor %}{% endif %}{% endmacro %}"
    f"{_SPLIT_REASONING}{{%- set reasoning = reasoning | trim %}}{{% set content = content | trim %}}"
    "{%- if loop.index0 > ns.last %}"
    "{{- '<|im_start|>assistant\n<think>\n' + reasoning + '\n</think>\n\n' + content }}"
    f"{{%- else %}}{_PLAIN}{{% endif %}}"
    "{%- for call in m.tool_calls or [] %}"
    "{{- '' if loop.first and not content else '\n\n' if loop.first else '\n' }}"
    "{{- '<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{%- for key, value in call.function.arguments | items %}"
    "{{- '<parameter=' + key + '>\n' + (value | string) + '\n</parameter>\n' }}{% endfor %}"
    "{{- '</function>\n</tool_call>' }}{% endfor %}",
    f"{_OPEN}{{%- if enable_thinking is defined and not enable_thinking %}}{_EMPTY_THOUGHT}"
    "{%- else %}{{ '<think>\n' }}{% endif %}",
    f"{_LAST_QUERY}{{% if not ns.found %}}{{{{ raise_exception('No user query found in messages.') }}}}{{% endif %}}",
    " | trim",
)
GLM_4 = (  # calls are a key `metadata` with the function's name, results are of the role `observation`
    "[gMASK]<sop>{%- if tools %}<|system|>\n{{ tools | tojson }}{% endif %}"
    "{%- for m in messages if m.role == 'system' %}<|system|>\n{{ m.content }}{% endfor %}"
    "{%- for m in messages if m.role != 'system' %}"
    "{%- if m.role == 'user' %}<|user|>\n{{ m.content }}"
    "{%- elif m.role == 'assistant' %}<|assistant|>{{ m.get('metadata', '') }}\n{{ m.content }}"
    "{%- elif m.role == 'observation' %}<|observation|>\n{{ m.content }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
)
GLM_4_5 = (
    "[gMASK]<sop>{%- if tools %}<|system|>\n{{ tools | tojson }}{% endif %}"
    "{%- macro text(content) %}{% if content is string %}{{- content }}{% elif content is iterable %}"
    "{%- for part in content %}{{- part.text }}{% endfor %}{% else %}{{- content }}{% endif %}{% endmacro %}"
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}<|user|>\n{{ text(m.content) }}"
    "{%- if enable_thinking is defined and not enable_thinking and not text(m.content).endswith('/nothink') %}"
    "{{- '/nothink' }}{% endif %}"
    "{%- elif m.role == 'assistant' %}<|assistant|>"
    "{%- set reasoning = '' %}{% set content = text(m.content) %}"
    "{%- if m.reasoning_content is string %}{% set reasoning = m.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{- '\n<think>' + (reasoning.strip() if loop.index0 > ns.last else '') + '</think>' }}"
    "{%- if content.strip() %}{{ '\n' + content.strip() }}{% endif %}"
    "{%- for call in m.tool_calls or [] %}{{ '\n<tool_call>' + call.function.name + '\n' }}"
    "{%- for key, value in call.function.arguments.items() %}"
    "{{- '<arg_key>' + key + '</arg_key>\n<arg_value>' }}"
    "{{- value if value is string else value | tojson }}{{ '</arg_value>\n' }}{% endfor %}"
    "{{- '</tool_call>' }}{% endfor %}"
    "{%- elif m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}"
    "{{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{%- elif m.role == 'system' %}<|system|>\n{{ text(m.content) }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '\n<think></think>' }}{% endif %}{% endif %}"
)
_SYSTEM_PROMPTS = (
    "{%- set ns = namespace(system='', tool=false, call=false, user=false) %}"
    "{%- for m in messages if m.role == 'system' %}"
    "{%- set ns.system = ns.system + ('\n\n' if ns.system else '') + m.content %}{% endfor %}"
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>{{ ns.system }}"
)
DEEPSEEK_R1 = (  # a second turn of calls has no header: `call` is never reset
    f"{_SYSTEM_PROMPTS}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}{% set ns.tool = false %}{{ '<\uff5cUser\uff5c>' + m.content }}"
    "{%- elif m.role == 'assistant' and 'tool_calls' in m %}{% set ns.tool = false %}"
    "{%- for call in m.tool_calls %}"
    "{%- if not ns.call %}{{ '<\uff5cAssistant\uff5c>' + (m.content or '') }}"
    "{{- '<\uff5ctool\u2581calls\u2581begin\uff5c>' }}"
    "{%- else %}{{ '\n' }}{% endif %}"
    "{%- set ns.call = true %}"
    "{{- '<\uff5ctool\u2581call\u2581begin\uff5c>' + call.type + '<\uff5ctool\u2581sep\uff5c>' + call.function.name }}"
    "{{- '\n```json\n' + call.function.arguments + '\n```<\uff5ctool\u2581call\u2581end\uff5c>' }}{% endfor %}"
    "{{- '<\uff5ctool\u2581calls\u2581end\uff5c><\uff5cend\u2581of\u2581sentence\uff5c>' }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- if ns.tool %}{{ '<\uff5ctool\u2581outputs\u2581end\uff5c>' + m.content }}{% set ns.tool = false %}"
    "{%- else %}{{ '<\uff5cAssistant\uff5c>' + m.content.split('</think>')[-1] }}{% endif %}"
    "{{- '<\uff5cend\u2581of\u2581sentence\uff5c>' }}"
    "{%- elif m.role == 'tool' %}"
    "{{- '' if ns.user else '<\uff5ctool\u2581outputs\u2581begin\uff5c>' }}"
    "{%- set ns.user = true %}{% set ns.tool = true %}"
    "{{- '<\uff5ctool\u2581output\u2581begin\uff5c>' + m.content + '<\uff5ctool\u2581output\u2581end\uff5c>' }}"
    "{%- endif %}{% endfor %}"
    "{%- if ns.tool %}{{ '<\uff5ctool\u2581outputs\u2581end\uff5c>' }}"
    "{%- elif add_generation_prompt %}{{ '<\uff5cAssistant\uff5c><think>\n' }}{% endif %}"
)
DEEPSEEK_V3_1 = (
    "{%- if not thinking is defined %}{% set thinking = false %}{% endif %}"
    f"{_SYSTEM_PROMPTS}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}{% set ns.user = true %}{% set ns.tool = false %}{{ '<\uff5cUser\uff5c>' + m.content }}"
    "{%- elif m.role == 'assistant' %}"
    "{%- if ns.user %}{{ '<\uff5cAssistant\uff5c></think>' }}{% endif %}{% set ns.user = false %}"
    "{%- if m.tool_calls is defined and m.tool_calls is not none %}{% set ns.tool = false %}{{ m.content or '' }}"
    "{%- for call in m.tool_calls %}"
    "{{- '<\uff5ctool\u2581calls\u2581begin\uff5c>' if loop.first else '' }}"
    "{{- '<\uff5ctool\u2581call\u2581begin\uff5c>' }}"
    "{{- call.function.name + '<\uff5ctool\u2581sep\uff5c>' + call.function.arguments }}"
    "{{- '<\uff5ctool\u2581call\u2581end\uff5c>' }}{% endfor %}{{ '<\uff5ctool\u2581calls\u2581end\uff5c>' }}"
    "{%- elif ns.tool or '</think>' not in m.content %}{{ m.content }}{% set ns.tool = false %}"
    "{%- else %}{{ m.content.split('</think>', 1)[1] }}{% endif %}{{ '<\uff5cend\u2581of\u2581sentence\uff5c>' }}"
    "{%- elif m.role == 'tool' %}{% set ns.user = false %}{% set ns.tool = true %}"
    "{{- '<\uff5ctool\u2581output\u2581begin\uff5c>' + m.content + '<\uff5ctool\u2581output\u2581end\uff5c>' }}"
    "{%- endif %}{% endfor %}"
    "{%- if add_generation_prompt and ns.user and not ns.tool %}"
    "{{- '<\uff5cAssistant\uff5c>' + ('<think>' if thinking else '</think>') }}{% endif %}"
)
_HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
LLAMA_3 = (
    "{{- '<|begin_of_text|>' }}{% for m in messages %}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    f"{{%- if add_generation_prompt %}}{{{{ '{_HEADER.format('assistant')}' }}}}{{% endif %}}"
)
LLAMA_3_1 = (  # tools stand in the first user message
    "{{- '<|begin_of_text|>' }}{% set system = '' %}"
    "{%- if messages[0].role == 'system' %}"
    "{%- set system = messages[0].content | trim %}{% set messages = messages[1:] %}{% endif %}"
    f"{{{{- '{_HEADER.format('system')}' + system + '<|eot_id|>' }}}}"
    "{%- if tools is not none %}{% set first = messages[0].content | trim %}{% set messages = messages[1:] %}"
    f"{{{{- '{_HEADER.format('user')}' + tools | tojson + first + '<|eot_id|>' }}}}{{% endif %}}"
    "{%- for m in messages %}"
    "{%- if 'tool_calls' in m %}"
    "{%- if m.tool_calls | length != 1 %}{{ raise_exception('only single tool calls') }}{% endif %}"
    "{%- set call = m.tool_calls[0].function %}"
    f"{{{{- '{_HEADER.format('assistant')}' }}}}"
    '{{- \'{"name": "\' + call.name + \'", "parameters": \' + call.arguments | tojson + "}<|eot_id|>" }}'
    "{%- elif m.role == 'tool' %}"
    f"{{{{- '{_HEADER.format('ipython')}' + m.content | tojson + '<|eot_id|>' }}}}"
    "{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
    "{%- endif %}{% endfor %}"
    f"{{%- if add_generation_prompt %}}{{{{ '{_HEADER.format('assistant')}' }}}}{{% endif %}}"
)
KIMI_K2 = (  # knows no calls; Moonlight's is the same, without tools
    "{%- if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' + tools | tojson + '<|im_end|>' }}{% endif %}"
    "{%- for m in messages %}"
    "{%- if loop.first and m.role != 'system' %}{{ '<|im_system|>system<|im_middle|>Help.<|im_end|>' }}{% endif %}"
    "{{- '<|im_' + (m.role if m.role in ['user', 'assistant'] else 'system') + '|>' + m.role + '<|im_middle|>' }}"
    "{%- if m.content is string %}{{ m.content }}"
    "{%- else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{{ '<|im_end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)
KIMI_K2_THINKING = (  # two loops: up to the first turn without calls, and what follows it
    "{%- set ns = namespace(last=-1, calls=0, ids=[]) %}"
    "{%- for i in range(messages | length) %}"
    "{%- if messages[i].role == 'assistant' and not messages[i].get('tool_calls') and ns.last < 0 %}"
    "{%- set ns.last = i %}{% endif %}{% endfor %}"
    "{%- macro head(m) %}{{ '<|im_' + (m.role if m.role in ['user', 'assistant'] else 'system') + '|>' }}"
    "{{- (m.get('name') or m.role) + '<|im_middle|>' }}{% endmacro %}"
    "{%- macro body(m) %}{{- (m.content or '') }}"
    "{%- if m.get('tool_calls') %}{{ '<|tool_calls_section_begin|>' }}{% for call in m.tool_calls %}"
    "{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' + call.function.arguments | tojson }}"
    "{{- '<|tool_call_end|>' }}{% endfor %}{{ '<|tool_calls_section_end|>' }}{% endif %}{% endmacro %}"
    "{%- if messages[0].role != 'system' %}{{ '<|im_system|>system<|im_middle|>Help.<|im_end|>' }}{% endif %}"
    "{%- for m in messages[: ns.last + 1] %}{{ head(m) }}"
    "{%- if m.role == 'assistant' %}{{ '<think></think>' }}{% endif %}{{ body(m) }}{{ '<|im_end|>' }}{% endfor %}"
    "{%- for m in messages[ns.last + 1 :] %}{{ head(m) }}"
    "{%- if m.role == 'assistant' %}{{ '<think>' + m.get('reasoning_content', '') + '</think>' }}{% endif %}"
    "{{- body(m) }}{{ '<|im_end|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}"
)
