"""How the chat templates that people use are built, in small templates of our own."""

from __future__ import annotations

from dataclasses import dataclass

GENERATION = "{% if add_generation_prompt %}"
RAISE_ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
)
BOS = "{{ bos_token }}"
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}"
)


@dataclass(frozen=True)
class Structure:
    """One template and what it allows."""

    name: str
    template: str
    takes_system: bool = True
    """Whether it takes a system turn."""
    splits: str = ""
    """Which chats become one sample per answer: `all`, those with a `system` turn, or none."""


def headed(name: str, head: str, end: str, reply: str, *, before: str = "", **more: object) -> Structure:
    """Every turn the same: a head with its role, its content, an end."""
    loop = f"{{% for m in messages %}}{head}{{{{ m.content | trim }}}}{end}{{% endfor %}}"
    return Structure(name, f"{before}{loop}{GENERATION}{reply}{{% endif %}}", **more)  # type: ignore[arg-type]


def cased(
    name: str, user: str, assistant: str, system: str, *, reply: str = "", before: str = "", **more: object
) -> Structure:
    """Every role with a form of its own, in which `@` is the content."""
    forms = {"user": user, "assistant": assistant, "system": system}
    cases = "".join(
        f"{{% {'el' if i else ''}if m.role == '{role}' %}}{form.replace('@', '{{ m.content }}')}"
        for i, (role, form) in enumerate(forms.items())
    )
    loop = f"{{% for m in messages %}}{cases}{{% endif %}}{{% endfor %}}"
    return Structure(name, f"{before}{loop}{GENERATION}{reply}{{% endif %}}", **more)  # type: ignore[arg-type]


def thinking(name: str, reply: str, *, no_thought: str = "<think>\n\n</think>\n\n", **more: object) -> Structure:
    """Answers show their thoughts only after the last question."""
    return Structure(
        name,
        "{% set ns = namespace(last=0) %}{% for m in messages[::-1] %}{% if m.role == 'user' and not ns.last %}"
        "{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}{% set content = m.content.split('</think>')[-1].lstrip('\\n') %}"
        "{% if loop.index0 > ns.last %}"
        + (no_thought and "{{ '" + no_thought.replace("\n", "\\n") + "' }}")
        + "{% endif %}{{ content }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        + f"{GENERATION}{{{{ '{reply}' }}}}{{% endif %}}",
        splits="all",
        **more,  # type: ignore[arg-type]
    )


CHATML_HEAD, CHATML_END = "<|im_start|>{{ m.role }}\n", "<|im_end|>\n"
LLAMA3_HEAD = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
DATED = "{{ bos_token }}Today is {{ strftime_now('%d %b %Y') }}.\n"

PLAIN = [
    headed("chatml", CHATML_HEAD, CHATML_END, "<|im_start|>assistant\n"),
    headed(
        "qwen2.5",
        CHATML_HEAD,
        CHATML_END,
        "<|im_start|>assistant\n",
        before="{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}",
    ),
    headed("qwen3-instruct", CHATML_HEAD, "{{ '<|im_end|>' }}\n", "{{ '<|im_start|>assistant\n' }}"),
    headed("smollm", CHATML_HEAD, CHATML_END, "{{ '<|im_start|>assistant\n' }}", before=BOS),
    headed(
        "llama3",
        LLAMA3_HEAD,
        "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        before=BOS,
    ),
    headed("llama3.2", LLAMA3_HEAD, "<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n", before=DATED),
    headed(
        "llama4",
        "<|header_start|>{{ m.role }}<|header_end|>\n\n",
        "<|eot|>",
        "<|header_start|>assistant<|header_end|>\n\n",
        before=DATED,
    ),
    headed("phi3", "<|{{ m.role }}|>\n", "<|end|>\n", "<|assistant|>\n" + "{% else %}{{ eos_token }}"),
    headed("phi4", "<|im_start|>{{ m.role }}<|im_sep|>", "<|im_end|>", "<|im_start|>assistant<|im_sep|>"),
    headed("phi4-mini", "<|{{ m.role }}|>", "<|end|>", "<|assistant|>{% else %}{{ eos_token }}"),
    headed(
        "granite",
        "<|start_of_role|>{{ m.role }}<|end_of_role|>",
        "<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>",
    ),
    headed(
        "olmo2",
        "<|{{ m.role }}|>\n",
        "{{ eos_token if m.role == 'assistant' }}\n",
        "<|assistant|>\n",
        before=BOS,
    ),
    headed("zephyr", "<|{{ m.role }}|>\n", "{{ eos_token }}\n", "<|assistant|>\n"),
    headed(
        "falcon3",
        "<|{{ m.role }}|>\n",
        "{{ eos_token if m.role == 'assistant' and loop.last }}\n",
        "<|assistant|>\n",
        splits="all",
    ),
    headed("exaone", "[|{{ m.role }}|]", "{{ '[|endofturn|]' if m.role != 'user' }}\n", "[|assistant|]"),
    headed("nemotron", "<extra_id_1>{{ m.role | capitalize }}\n", "\n", "<extra_id_1>Assistant\n"),
    headed("lfm2", CHATML_HEAD, CHATML_END, "<|im_start|>assistant\n", before=BOS),
    headed("jamba", "<|bom|><|{{ m.role }}|> ", "<|eom|>", "<|bom|><|assistant|>", before=BOS),
    headed("seed", "<seed:bos>{{ m.role }}\n", "<seed:eos>", "<seed:bos>assistant\n"),
    headed(
        "kimi", "<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>", "<|im_end|>", "<|im_assistant|>assistant<|im_middle|>"
    ),
    headed("glm4", "<|{{ m.role }}|>\n", "", "<|assistant|>\n", before="[gMASK]<sop>"),
    headed(
        "chatglm-rounds",
        "{{ '[Round ' ~ loop.index ~ ']\n' if m.role == 'user' }}{{ m.role }}: ",
        "\n\n",
        "assistant: ",
    ),
]

BY_ROLE = [
    cased("vicuna", "USER: @ ", "ASSISTANT: @{{ eos_token }}", "@ ", reply="ASSISTANT:"),
    cased("alpaca", "### Instruction:\n@\n\n", "### Response:\n@{{ eos_token }}\n\n", "@\n\n", reply="### Response:\n"),
    cased("deepseek2", "User: @\n\n", "Assistant: @{{ eos_token }}", "@\n\n", reply="Assistant:", before=BOS),
    cased("deepseek3", "<|User|>@", "<|Assistant|>@{{ eos_token }}", "@", reply="<|Assistant|>", before=BOS),
    cased(
        "command-r",
        "<|USER_TOKEN|>@<|END_OF_TURN_TOKEN|>",
        "<|CHATBOT_TOKEN|>@<|END_OF_TURN_TOKEN|>",
        "<|SYSTEM_TOKEN|>@<|END_OF_TURN_TOKEN|>",
        reply="<|CHATBOT_TOKEN|>",
    ),
    cased("falcon", "User: @\n\n", "Falcon: @\n\n", "@\n\n", reply="Falcon:"),
    cased(
        "openchat",
        "GPT4 Correct User: @<|end_of_turn|>",
        "GPT4 Correct Assistant: @<|end_of_turn|>",
        "@<|end_of_turn|>",
        reply="GPT4 Correct Assistant:",
    ),
    cased("solar", "### User:\n@\n\n", "### Assistant:\n@\n\n", "### System:\n@\n\n", reply="### Assistant:\n"),
    cased(
        "orion", "Human: @\n\n", "Assistant: {{ eos_token }}@{{ eos_token }}", "@\n", reply="Assistant: {{ eos_token }}"
    ),
    cased(
        "gemma2",
        "<start_of_turn>user\n@<end_of_turn>\n",
        "<start_of_turn>model\n@<end_of_turn>\n",
        "{{ raise_exception('System role not supported') }}",
        reply="<start_of_turn>model\n",
        before=BOS + RAISE_ALTERNATE,
        takes_system=False,
    ),
    Structure(
        "gemma3",
        BOS + FIRST_SYSTEM + "{% for m in messages %}<start_of_turn>"
        "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ system ~ '\n\n' if loop.first and system }}"
        "{{ m.content | trim }}<end_of_turn>\n{% endfor %}" + GENERATION + "<start_of_turn>model\n{% endif %}",
    ),
    Structure(
        "llama2",
        FIRST_SYSTEM + RAISE_ALTERNATE + "{% for m in messages %}{% if m.role == 'user' %}"
        "{{ bos_token }}[INST] {{ '<<SYS>>\n' ~ system ~ '\n<</SYS>>\n\n' if loop.first and system }}"
        "{{ m.content | trim }} [/INST]{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}",
    ),
    Structure(
        "mistral-v1",
        BOS + RAISE_ALTERNATE + "{% for m in messages %}{% if m.role == 'user' %}"
        " [INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
        takes_system=False,
    ),
    Structure(
        "mistral-v7",
        "{{ bos_token }}{% set today = strftime_now('%Y-%m-%d') %}{% if messages[0].role != 'system' %}"
        "[SYSTEM_PROMPT]Today is {{ today }}.[/SYSTEM_PROMPT]{% endif %}{% for m in messages %}"
        "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'system' %}"
        "[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
    ),
    # Opens an answer whether or not it is requested.
    Structure(
        "command-a",
        "{% for m in messages %}<|START|><|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
        "<|START|><|assistant|>",
    ),
    Structure(
        "olmo3-generation",
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
        "{% endfor %}" + GENERATION + "<|im_start|>assistant\n{% endif %}",
    ),
]

REWRITING = [
    thinking("qwen3", "<|im_start|>assistant\\n"),
    thinking("qwen3-thinking", "<|im_start|>assistant\\n<think>\\n"),
    thinking("qwen3.5", "<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n"),
    thinking("stepfun", "<|im_start|>assistant\\n<think>\\n", no_thought="<think>\n\n</think>\n"),
    # The empty thought stands in the generation prompt and in no turn.
    cased(
        "gemma4",
        "<|turn>user\n@<turn|>\n",
        "<|turn>model\n@<turn|>\n",
        "<|turn>system\n@<turn|>\n",
        reply="<|turn>model\n<|channel>thought\n<channel|>",
        splits="all",
    ),
    headed("qwq", CHATML_HEAD, CHATML_END, "<|im_start|>assistant\n<think>\n</think>", splits="all"),
    # Ends a text once, and turns not at all.
    cased(
        "metharme", "<|user|>@", "<|model|>@", "<|system|>@", reply="<|model|>{% else %}{{ eos_token }}", splits="all"
    ),
    Structure(
        "gpt-oss",
        "{% for m in messages %}<|start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' }}"
        "<|message|>{{ m.content }}{{ '<|return|>' if m.role == 'assistant' and loop.last else '<|end|>' }}{% endfor %}"
        + GENERATION
        + "<|start|>assistant{% endif %}",
        splits="all",
    ),
    # The system prompt stands in the last question, and only while that is unanswered.
    Structure(
        "mistral-v3",
        FIRST_SYSTEM + RAISE_ALTERNATE + "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
        "[INST] {{ system ~ '\n\n' if loop.last and system }}{{ m.content }}[/INST]{% else %} {{ m.content | trim }}"
        "{{ eos_token }}{% endif %}{% endfor %}",
        splits="system",
    ),
    Structure(
        "mistral-v2",
        FIRST_SYSTEM + "{% set asked = messages | selectattr('role', 'equalto', 'user') | list %}"
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] "
        "{{ system ~ '\n\n' if m == asked[-1] and system }}{{ m.content }}[/INST]{% else %} {{ m.content | trim }}"
        "{{ eos_token }}{% endif %}{% endfor %}",
        splits="system",
    ),
]

OPENING = [
    cased(
        "deepseek-r1",
        "<|User|>@",
        "<|Assistant|>@{{ eos_token }}",
        "@",
        reply="<|Assistant|><think>\n",
        before=BOS,
        splits="all",
    ),
    headed("minimax", "]~b]{{ m.role }}\n", "[e~[\n", "]~b]assistant\n<think>\n", splits="all"),
    cased(
        "nemotron-3",
        "<|im_start|>user\n@<|im_end|>\n",
        "<|im_start|>assistant\n<think></think>@<|im_end|>\n",
        "<|im_start|>system\n@<|im_end|>\n",
        reply="<|im_start|>assistant\n<think>\n",
        splits="all",
    ),
    cased(
        "cohere2",
        "<|USER|>@<|END|>",
        "<|CHATBOT|><|START_TEXT|>@<|END_TEXT|>",
        "<|SYSTEM|>@<|END|>",
        reply="<|CHATBOT|><|START_THINKING|>",
        splits="all",
    ),
    headed(
        "apriel",
        "<|begin_{{ m.role }}|>\n",
        "{{ '\n' if m.role != 'assistant' else '<|end|>' }}",
        "<|begin_assistant|>\nHere are my reasoning steps:\n",
        splits="all",
    ),
]

STRUCTURES = {structure.name: structure for structure in (*PLAIN, *BY_ROLE, *REWRITING, *OPENING)}
