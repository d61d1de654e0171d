#!/usr/bin/env python3
"""Compares the program's conversations, as tokens and as marks of what is learned, with transformers' apply_chat_template.

usage: compare_chat_templates.py [PROGRAM] [--conversations N] [--seed N] [--only NAME ...]
       compare_chat_templates.py [PROGRAM] [--conversations N] [--seed N] --published FILE.jinja ...

For each of chatml, llama3, mistral and qwen a small tokenizer is trained on the repository's own pages, and the template that
the models of that name are published with goes into its tokenizer_config.json (Qwen 2.5's without its part for tools). N random
conversations (200 by default), with and without system messages, of one to eight messages, of words, all scripts, emoji, blanks
at both ends, special tokens in the text and empty contents, are given to both. Learned are the tokens that begin in what the
assistant says, the mark of its end included; transformers marks a token that begins before it, too, which is taken into account.
What a template refuses (other roles, or out of turn) has to be refused by the program. The same is asked of the template in the
folder (--chat-template own), whose tokens and learned parts have to be those of the built-in one.

--published compares templates in files instead, such as those in models/templates of llama.cpp, which the source package
llama-cpp-python has, or in trl's chat_templates: the tokens of conversations with tools, calls of tools, thoughts and variables, in
full and with what asks for an answer; and, where a template marks it ({% generation %}), what is learned. None of these files lies
here. A conversation that transformers refuses has to be refused.
PROGRAM is build/release/bin/tranche by default. Needs the Python packages transformers and tokenizers, installed by hand.
Exit status: 0 all equal, 1 differences (the first of each template is shown), 2 a package is missing.
"""
import argparse
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile

import compare_tokenizers

CHATML = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
LLAMA3 = ("{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + "
          "'<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
          "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}")
MISTRAL = ("{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
           "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
           "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
           "{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}"
           "{% endif %}{% endfor %}")
QWEN = ("{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}{%- else %}"
        "{{- '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n' }}{%- endif %}"
        "{%- for message in messages %}{%- if (message.role == \"user\") or (message.role == \"system\" and not loop.first) or "
        "(message.role == \"assistant\") %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}"
        "{%- endif %}{%- endfor %}")
# Name of the templates, each with tokenizer, special tokens and template.
TEMPLATES = {
    "chatml": ("gpt2", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], CHATML),
    "llama3": ("llama3", ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"], LLAMA3),
    "mistral": ("mistral", ["<unk>", "<s>", "</s>"], MISTRAL),
    "qwen": ("qwen", ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], QWEN),
}
# The same templates with the assistant's part marked, as pairs (text in the template, replacement).
MARKS = {
    "chatml": [("{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}",
                "{{'<|im_start|>' + message['role'] + '\n'}}{% if message['role'] == 'assistant' %}{% generation %}"
                "{{message['content'] + '<|im_end|>'}}{% endgeneration %}{% else %}{{message['content'] + '<|im_end|>'}}{% endif %}{{'\n'}}")],
    "llama3": [("+ message['content'] | trim + '<|eot_id|>' %}", "%}"),
               ("{{ content }}", "{{ content }}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | trim + '<|eot_id|>' }}"
                "{% endgeneration %}{% else %}{{ message['content'] | trim + '<|eot_id|>' }}{% endif %}")],
    "mistral": [("{{ message['content'] + eos_token}}", "{% generation %}{{ message['content'] + eos_token}}{% endgeneration %}")],
    "qwen": [("{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}",
              "{{- '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}{% generation %}"
              "{{- message.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{- message.content + '<|im_end|>' }}{% endif %}{{- '\n' }}")],
}
BLANKS = [" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\u2028", "\x1c", "\u200b", "\x0b"]


def marked(name):
    template = TEMPLATES[name][2]
    for old, new in MARKS[name]:
        assert template.count(old) == 1, (name, old)
        template = template.replace(old, new)
    return template


class Conversations:
    def __init__(self, seed, name, text):
        self.random = random.Random(seed)
        self.name = name
        self.strings = compare_tokenizers.Strings(seed, TEMPLATES[name][1], text)

    def content(self):
        kind = self.random.random()
        if kind < 0.08:
            return ""
        if kind < 0.12:
            return self.random.choice(BLANKS)
        text = self.strings.draw()
        if kind < 0.5:
            text = self.random.choice(["", *BLANKS]) + text + self.random.choice(["", *BLANKS])
        return text

    def draw(self):
        messages, turns = [], self.random.randint(1, 8)
        if self.name != "mistral" and self.random.random() < 0.5:
            messages.append("system")
        messages += ["user" if turn % 2 == 0 else "assistant" for turn in range(turns)]
        if self.name != "mistral" and self.random.random() < 0.2:
            self.random.shuffle(messages)  # all templates but mistral's accept messages in any order
        return [{"role": role, "content": self.content()} for role in messages]

    def refused(self):
        """Conversations that mistral's template refuses."""
        while True:
            roles = [self.random.choice(["user", "assistant", "system"]) for _ in range(self.random.randint(1, 5))]
            if any(role != ("user" if turn % 2 == 0 else "assistant") for turn, role in enumerate(roles)):
                return [{"role": role, "content": self.content()} for role in roles]


def tokenizer_of(name, text, folder):
    """A folder in transformers' format; returns the tokenizer with the published template and the one with marks."""
    import transformers
    kind, special, template = TEMPLATES[name]
    compare_tokenizers.SPECIAL[kind] = special
    compare_tokenizers.Tokenizer(kind, text, 4000, folder)
    begin, end = {"llama3": ("<|begin_of_text|>", "<|eot_id|>"), "mistral": ("<s>", "</s>")}.get(name, (None, special[-1]))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin, "eos_token": end, "chat_template": template,
         "clean_up_tokenization_spaces": False}))
    return transformers.AutoTokenizer.from_pretrained(folder)


def answer(tokenizer, name, messages):
    """Returns transformers' tokens, a 1 for each that begins in learned text, and the number of tokens that cross the beginning of learned
    text."""
    from transformers.utils.chat_template_utils import render_jinja_template
    tokens = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    (text,), (spans,) = render_jinja_template(conversations=[messages], chat_template=marked(name), return_assistant_tokens_mask=True,
                                              **tokenizer.special_tokens_map)
    assert text == tokenizer.apply_chat_template(messages, tokenize=False), "the template with marks writes another text"
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    learned = [int(any(begin <= at < end for begin, end in spans)) for at, _ in offsets]
    crosses = [any(at < begin < to for begin, _ in spans) for at, to in offsets]
    theirs = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
                                           chat_template=marked(name))["assistant_masks"]
    assert all(own == other or cross for own, other, cross in zip(learned, theirs, crosses, strict=True)), (text, learned, theirs)
    return tokens, learned, sum(crosses)


def refused_by(tokenizer, messages):
    import jinja2
    try:
        tokenizer.apply_chat_template(messages, tokenize=False)
    except jinja2.exceptions.TemplateError:
        return True
    return False


TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Tells \"it\" for é <b>", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "description": "the city"}, "days": {"type": "integer"}}, "required": ["city"]}}}
ARGUMENTS = {"city": "Zürich", "days": 2, "part": 1.5, "none": None, "yes": True, "list": [1, "x"]}
VARIABLES = [{"enable_thinking": False}, {"enable_thinking": True}, {"date_string": "1 May 2025"}, {"tools_in_user_message": False}]
DATE = "2026-11-27"


class PublishedConversations:
    """Conversations with everything that templates read; with tools only for templates that write them."""

    def __init__(self, seed, template, text):
        self.random = random.Random(seed)
        self.template = template
        self.strings = compare_tokenizers.Strings(seed, ["<think>", "</think>", "<tool_response>", "<|im_end|>"], text)

    def content(self):
        text = self.strings.draw() if self.random.random() > 0.05 else ""
        kind = self.random.random()
        if kind < 0.1:
            return "<think>\nsome thought\n</think>\n\n" + text
        return "<tool_response>" + text + "</tool_response>" if kind < 0.15 else text

    def draw(self):
        draw = self.random.random
        messages = [{"role": "system", "content": self.content()}] if draw() < 0.5 else []
        for turn in range(self.random.randint(1, 6)):
            message = {"role": "assistant" if turn % 2 else "user", "content": self.content()}
            if turn % 2 and draw() < 0.2:
                message["reasoning_content"] = self.content()
            messages.append(message)
        conversation = {"messages": messages}
        if "tools" in self.template and draw() < 0.3:
            conversation["tools"] = [TOOL]
            if draw() < 0.6:
                if messages[-1]["role"] != "user":
                    messages.append({"role": "user", "content": "weather?"})
                call = {"id": "abcdef123", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
                messages.append({"role": "assistant", "tool_calls": [call], **({"content": self.content()} if draw() < 0.5 else {})})
                messages.append({"role": "tool", "content": "12 C", "tool_call_id": "abcdef123", "name": "get_weather"})
                if draw() < 0.6:
                    messages.append({"role": "assistant", "content": self.content()})
        # With tools Llama 3.1 writes the first message as the user's, whatever its role.
        if "tools" not in conversation and draw() < 0.1:
            self.random.shuffle(messages)
        if draw() < 0.2:
            conversation["chat_template_kwargs"] = self.random.choice(VARIABLES)
        return conversation


def fix_date():
    """Makes transformers use DATE as today's date."""
    import datetime

    import transformers.utils.chat_template_utils as utilities

    class Fixed(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls.fromisoformat(DATE)
    utilities.datetime = Fixed


def compare_published(program, file, options, text, folder):
    """Returns the number of conversations that differ."""
    import transformers
    template = file.read_text(encoding="utf-8")
    specials = sorted({"<s>", "</s>", *re.findall(r"<\|[a-z_]+\|>|\[/?[A-Z_]+\]|</?think>", template)})
    compare_tokenizers.SPECIAL["gpt2"] = specials
    compare_tokenizers.Tokenizer("gpt2", text, 4000, folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
                                                              "clean_up_tokenization_spaces": False}))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    draw = PublishedConversations(options.seed, template, text)
    marked_itself = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
    taken, refused, answers = [], [], []
    for _ in range(options.conversations):
        conversation = draw.draw()
        try:
            result = tokenizer.apply_chat_template(conversation["messages"], tools=conversation.get("tools"), tokenize=True, return_dict=True,
                                                   return_assistant_tokens_mask=marked_itself, **conversation.get("chat_template_kwargs", {}))
            answers.append((result["input_ids"], result.get("assistant_masks")))
            taken.append(conversation)
        except Exception:  # jinja2's errors, and Python's own for operations on a value in a template
            refused.append(conversation)
    flags = ("--chat-template", "own", "--chat-date", DATE)
    try:
        ours = compare_tokenizers.documents_of(program, folder, taken, *flags)
    except subprocess.CalledProcessError:
        lines = [subprocess.run([program, "tokenize", "--data", folder / "documents.jsonl", "--tokenizer", folder, "--out", folder / "x.safetensors", *flags],
                                capture_output=True, text=True).stderr.strip()]
        print(f"{file.name}: refused: {lines[0]}", flush=True)
        return 1
    wrong = sum(own[0] != other[0] for own, other in zip(ours, answers, strict=True))
    # transformers also marks a token that begins before learned text.
    unlike = sum(other[1] is not None and sum(own[1]) > sum(other[1]) for own, other in zip(ours, answers))
    missed = 0
    for conversation in refused:
        (folder / "refused.jsonl").write_text(json.dumps(conversation) + "\n", encoding="utf-8")
        result = subprocess.run([program, "tokenize", "--data", folder / "refused.jsonl", "--tokenizer", folder, "--out", folder / "x.safetensors", *flags],
                                capture_output=True)
        missed += result.returncode == 0
    print(f"{file.name}: {len(taken)} conversations, {sum(len(own) for own, _ in ours)} tokens, {sum(sum(own) for _, own in ours)} learned; "
          f"{wrong} differ" + (f"; more are learned in {unlike}" if marked_itself else "") +
          f"; of {len(refused)} that transformers refuses {missed} are taken", flush=True)
    return wrong + unlike + missed


def compare(program, name, options, text, folder):
    tokenizer = tokenizer_of(name, text, folder)
    draw = Conversations(options.seed, name, text)
    conversations = [draw.draw() for _ in range(options.conversations)]
    ours = compare_tokenizers.documents_of(program, folder, [{"messages": messages} for messages in conversations],
                                           "--chat-template", name)
    assert len(ours) == len(conversations), f"{len(ours)} documents for {len(conversations)} conversations"
    own = compare_tokenizers.documents_of(program, folder, [{"messages": messages} for messages in conversations], "--chat-template", "own")
    unlike = sum(one != other for one, other in zip(ours, own, strict=True))
    answers = [answer(tokenizer, name, messages) for messages in conversations]
    wrong = [(messages, own, other) for messages, own, other in zip(conversations, ours, answers) if own != other[:2]]
    print(f"{name}: {len(conversations)} conversations, {sum(len(tokens) for tokens, _ in ours)} tokens, "
          f"{sum(sum(learned) for _, learned in ours)} learned; {len(wrong)} differ; {unlike} differ by the template in the folder; {sum(other[2] for other in answers)} tokens begin "
          "before what the assistant says and end in it", flush=True)
    for messages, own, other in wrong[:1]:
        print(f"  {messages!r}\n  tranche: {own}\n  library: {other[:2]}")
    return len(wrong) + unlike + (compare_refusals(program, tokenizer, draw, folder) if name == "mistral" else 0)


def compare_refusals(program, tokenizer, draw, folder):
    conversations = [draw.refused() for _ in range(20)]
    assert all(refused_by(tokenizer, messages) for messages in conversations)
    lines, taken = folder / "refused.jsonl", 0
    for messages in conversations:
        lines.write_text(json.dumps({"messages": messages}) + "\n")
        result = subprocess.run([program, "tokenize", "--data", lines, "--tokenizer", folder, "--out", folder / "x.safetensors",
                                 "--chat-template", "mistral"], capture_output=True, text=True)
        if result.returncode == 0 or "user and assistant take turns" not in result.stderr:
            taken += 1
    print(f"mistral: {len(conversations)} conversations that its template refuses, {taken} not refused", flush=True)
    return taken


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="?", type=pathlib.Path, default=compare_tokenizers.ROOT / "build/release/bin/tranche")
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--published", nargs="+", type=pathlib.Path, default=[], metavar="FILE.jinja")
    parser.add_argument("--only", nargs="+", choices=TEMPLATES, default=list(TEMPLATES))
    options = parser.parse_args()
    try:
        import tokenizers  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as problem:
        print(f"compare_chat_templates: {problem}; install transformers in an environment outside of the repository", file=sys.stderr)
        return 2
    text = compare_tokenizers.training_text()
    with tempfile.TemporaryDirectory() as work:
        if options.published:
            fix_date()
            differences = sum(compare_published(options.program, file, options, text, pathlib.Path(work) / str(i))
                              for i, file in enumerate(options.published))
        else:
            differences = sum(compare(options.program, name, options, text, pathlib.Path(work) / name) for name in options.only)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
