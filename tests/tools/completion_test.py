#!/usr/bin/env python3
"""completion_test.py PROGRAM: asks shells for completions, as a user who presses a key, with the scripts that PROGRAM prints.

bash and zsh run in a terminal of their own, and insert all that they propose into the line; fish prints it. zsh and fish are left
out where they are not installed, with a line that says so. Manual pages are read by groff, which may have no complaint.
"""
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time

PROGRAM = os.path.abspath(sys.argv[1])
FOLDER = tempfile.TemporaryDirectory(prefix="tranche-completion-")
failures = []

# A line, and words that are proposed for it: (line, all of them), or (line, some of them, words that are not).
LINES = [
    ("tranche pl", ["plan"]),
    ("tranche train --off", ["--offload-optimizer", "--offload-param", "--offload-ratio", "--offload-activations"]),
    ("tranche train --dtype ", ["fp32", "bf16", "fp16"]),
    ("tranche checkpoint export x --dtype ", ["fp32", "bf16"]),
    ("tranche train --steps 3 --stage ", ["0", "1", "2", "3"]),
    ("tranche train --offload-param n", ["none", "nvme"]),
    ("tranche checkpoint v", ["verify"]),
    ("tranche checkpoint diff --j", ["--json"]),
    ("tranche schedule zb", ["zb-h1", "zb-v"]),
    ("tranche schedule check --model ", ["async", "channels", "stream"]),
    ("tranche schedule zb-v --wr", ["--write"]),
    ("tranche train --mesh ten", ["tensor="]),
    ("tranche train --mesh replicate=2,sh", ["replicate=2,shard="]),
    ("tranche plan --mesh se", ["search"]),
    ("tranche plan --machine dgx-h", ["dgx-h100", "dgx-h200"]),
    ("tranche train --model gpt2-x", ["gpt2-xl"]),
    ("tranche train --set zero_optimization.overlap", ["zero_optimization.overlap_comm="]),
    ("tranche completion ", ["bash", "zsh", "fish"]),
    ("tranche train --config ./se", ["./settings.json"]),
    ("tranche train --checkpoint-dir ./r", ["./run"]),
    ("tranche train --seed ", []),
]
WITH_EQUALS = [("tranche train --dtype=b", ["--dtype=bf16"]), ("tranche train --mesh=shard=2,ten", ["--mesh=shard=2,tensor="])]


def script(shell):
    path = os.path.join(FOLDER.name, f"tranche.{shell}")
    with open(path, "w", encoding="utf-8") as file:
        subprocess.run([PROGRAM, "completion", shell], stdout=file, check=True)
    return path


class Terminal:
    """An interactive shell. ask() types a line, has all proposals inserted, and returns the words that then stand there."""

    def __init__(self, command, setup, insert):
        self.insert = insert
        self.master, slave = pty.openpty()
        environment = {**os.environ, "TERM": "dumb", "PS1": "", "COLUMNS": "2000", "INPUTRC": "/dev/null", "HOME": FOLDER.name, "ZDOTDIR": FOLDER.name}
        subprocess.run(["stty", "-echo", "cols", "2000", "rows", "50"], stdin=slave, check=True)
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, cwd=FOLDER.name, env=environment, start_new_session=True)
        os.close(slave)
        self.count = 0
        # The prompt appears only when the shell's line editor is ready for input.
        self.type(f"{setup}; PS1=READY''_\n")
        self.read_until("READY_")

    def type(self, text):
        os.write(self.master, text.encode())

    def read_until(self, pattern):
        text, end = "", time.monotonic() + 30
        while not re.search(pattern, text, re.DOTALL):
            if time.monotonic() > end or not select.select([self.master], [], [], 30)[0]:
                sys.exit(f"no answer to be found by {pattern} in: {text!r}")
            text += os.read(self.master, 65536).decode(errors="replace")
        return re.search(pattern, text, re.DOTALL)

    def ask(self, line):
        self.count += 1
        self.type(f"{line}{self.insert}\x01show{self.count} \x05\n")  # moves to the line's beginning and types, then to its end
        return re.findall("<([^>]*)>", self.read_until(f"BEGIN{self.count}_(.*)END{self.count}_.*READY_").group(1))

    def close(self):
        os.close(self.master)
        self.process.kill()
        self.process.wait()


SHOW = "for i in {1..60}; do eval \"show$i() { echo BEGIN''${i}_; printf '<%s>' \\\"\\$@\\\"; echo END''${i}_; }\"; done"


def compare(shell, line, proposed, expected):
    proposed = sorted(word.rstrip("/") for word in proposed)  # fish writes folders with one
    if proposed != sorted(expected):
        failures.append(f"{shell}: '{line}' has the completions {proposed}, and not {expected}")


def check_terminal(shell, terminal, lines):
    for line, expected in lines:
        words = line.split(" ")
        given = len(words) - 1  # the last one is completed
        answer = terminal.ask(line)
        if answer[:given] != words[:given]:
            failures.append(f"{shell}: '{line}' became {answer}")
        # Words for which nothing is proposed stay unchanged.
        compare(shell, line, [word for word in answer[given:] if word], expected)
    terminal.close()


def bash():
    setup = f"set +o history; {SHOW}; source {script('bash')}"
    terminal = Terminal(["bash", "--norc", "--noprofile", "-i"], setup, "\x1b*")
    quoted = [("tranche train --mesh 'pipeline=2,sh", ["pipeline=2,shard="]), ("tranche train --mesh 'pipeline=2, sh", ["pipeline=2, shard="])]
    check_terminal("bash", terminal, LINES + WITH_EQUALS)
    terminal = Terminal(["bash", "--norc", "--noprofile", "-i"], setup, "\t")
    for line, expected in quoted:  # bash closes the quote
        compare("bash", line, terminal.ask(line)[3:], expected)
    terminal.close()


def zsh():
    setup = ("autoload -Uz compinit && compinit -u -d $HOME/dump; unsetopt zle_bracketed_paste prompt_sp prompt_cr; bindkey -e; "
             "zstyle ':completion:all-matches::::' completer _all_matches _complete; zstyle ':completion:all-matches:*' old-matches false; "
             "zstyle ':completion:all-matches:*' insert true; autoload -Uz _generic; zle -C all-matches complete-word _generic; "
             f"bindkey '^Xa' all-matches; source {script('zsh')}; {SHOW}")
    check_terminal("zsh", Terminal(["zsh", "-f", "-i"], setup, "\x18a"), LINES + WITH_EQUALS)


def fish():
    path = script("fish")
    for line, expected in LINES + WITH_EQUALS:
        result = subprocess.run(["fish", "--no-config", "-c", f"source {path}; complete -C \"{line}\""], capture_output=True, text=True, check=False,
                                cwd=FOLDER.name, env={**os.environ, "HOME": FOLDER.name})
        if result.stderr:
            failures.append(f"fish: '{line}' printed {result.stderr}")
        compare("fish", line, [entry.split("\t")[0] for entry in result.stdout.splitlines()], expected)


def pages():
    for name in subprocess.run([PROGRAM, "man", "--list"], capture_output=True, text=True, check=True).stdout.split():
        text = subprocess.run([PROGRAM, "man", name], capture_output=True, text=True, check=True).stdout
        result = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-rLL=100n", "-P-cbou"], input=text, capture_output=True, text=True, check=False)
        if result.stderr or "SYNOPSIS" not in result.stdout:
            failures.append(f"groff has a complaint about the page {name}: {result.stderr or result.stdout}")


def main():
    with open(os.path.join(FOLDER.name, "settings.json"), "w", encoding="utf-8") as file:
        file.write("{}")
    os.mkdir(os.path.join(FOLDER.name, "run"))
    bash()
    for needed, check in (("zsh", zsh), ("fish", fish), ("groff", pages)):
        if shutil.which(needed):
            check()
        else:
            print(f"left out: {needed} is not installed")
    print("\n".join(failures) or "every line was completed as expected")
    sys.exit(1 if failures else 0)


main()
