#!/usr/bin/env python3
"""scripts/quoted_outputs.py: the quotations that it recognises, those that it finds stale, and those that it writes, with a fake program.
"""
import pathlib
import stat
import subprocess
import sys
import tempfile
import unittest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "quoted_outputs.py"

PROGRAM = """case $1 in
  plan) printf 'peak 28.11 GiB\\nin backward\\nof %s\\nwire 7\\nend   \\n' "$2" ;;
  table) printf '| a | b |\\n|---|---|\\n| 1 | %s |\\n' "$2" ;;
  fail) echo 'no such model' >&2; exit 2 ;;
esac
"""
PLAN = "peak 28.11 GiB\nin backward\nof gpt2\nwire 7\nend"
TABLE = "| a | b |\n|---|---|\n| 1 | 2 |"


class Quotations(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.page = self.folder / "page.md"
        self.program = self.folder / "pretends"
        self.program.write_text("#!/usr/bin/env bash\n" + PROGRAM, encoding="utf-8")
        self.program.chmod(self.program.stat().st_mode | stat.S_IXUSR)

    def check(self, text, *flags):
        self.page.write_text(text, encoding="utf-8")
        result = subprocess.run([sys.executable, SCRIPT, self.program, self.page, *flags], capture_output=True, text=True,
                                check=False, timeout=60)
        return result.returncode, result.stdout + result.stderr

    def holds(self, text, quotations=1):
        status, said = self.check(text)
        self.assertEqual(status, 0, said)
        self.assertIn(f"{quotations} quotations, 0 differ", said)

    def differs(self, text, *parts):
        status, said = self.check(text)
        self.assertEqual(status, 1, said)
        for part in parts:
            self.assertIn(part, said)

    def updated(self, text):
        status, said = self.check(text, "--update")
        self.assertEqual(status, 0, said)
        after = self.page.read_text(encoding="utf-8")
        self.holds(after, after.count("$ tranche"))
        return after

    def test_what_the_program_prints_holds(self):
        self.holds(f"text\n\n```console\n$ tranche plan gpt2\n{PLAN}\n```\nmore text\n")
        self.holds(f"```console\n$ tranche plan \\\n  gpt2\n{PLAN}\n$ tranche table 2\n{TABLE}\n```\n", 2)
        self.holds(f"<!-- $ tranche table 2 -->\n{TABLE}\n\nmore text\n")
        self.holds(f"<!-- $ tranche plan gpt2 -->\n```\n{PLAN}\n```\n")

    def test_a_stale_figure_is_shown_beside_the_new_one(self):
        stale = PLAN.replace("28.11", "28.21")
        self.differs(f"```console\n$ tranche plan gpt2\n{stale}\n```\n", "page.md:2: $ tranche plan gpt2",
                     "-peak 28.21 GiB", "+peak 28.11 GiB", "1 of 1 quotations differ", "--update")
        self.differs("text\n<!-- $ tranche table 3 -->\n" + TABLE + "\n", "page.md:2: $ tranche table 3", "+| 1 | 3 |")
        self.differs(f"```console\n$ tranche plan gpt2\n{PLAN}\nand a line too many\n```\n", "-and a line too many")

    def test_dots_stand_for_any_lines(self):
        for quoted in ("peak 28.11 GiB\n...\nend", "...\nof gpt2\n...", "peak 28.11 GiB\n...\nof gpt2\n...\nend", "..."):
            self.holds(f"```console\n$ tranche plan gpt2\n{quoted}\n```\n")
        for quoted in ("peak 28.21 GiB\n...\nend", "...\nof gpt3\n...", "...\nwire 7\n...\nof gpt2\n...", "...\nwire 7",
                       PLAN + "\n...\nend"):
            self.differs(f"```console\n$ tranche plan gpt2\n{quoted}\n```\n", "$ tranche plan gpt2")

    def test_numbers_of_the_machine_are_masked_and_words_are_not(self):
        other = PLAN.replace("peak 28.11 GiB", "peak  7 MiB").replace("wire 7", "wire -1,234.5")
        self.holds(f"```console numbers\n$ tranche plan gpt2\n{other}\n```\n")
        self.holds(f"<!-- $ numbers: tranche plan gpt2 -->\n```\n{other}\n```\n")
        self.holds("<!-- $ numbers: echo compute 343, copies -->\ncompute 82.8, copies\n")
        self.holds("<!-- $ numbers: echo 1 min 05 s, 0123456789abcdef of gpt2 -->\n3 s, fedcba9876543210 of gpt2\n")
        self.differs(f"```console\n$ tranche plan gpt2\n{other}\n```\n", "-peak  7 MiB")
        self.differs(f"```console numbers\n$ tranche plan gpt2\n{other.replace('backward', 'forward')}\n```\n", "-in forward")
        self.differs("<!-- $ numbers: echo of gpt2 -->\nof gpt3\n", "-of gpt3", "+of gpt2")
        masked = "<!-- $ numbers: echo 7 s -->\n{} s\n"
        for flag, number in (("--update", 8), ("--renew", 7)):
            self.assertEqual(self.check(masked.format(8), flag)[0], 0)
            self.assertEqual(self.page.read_text(encoding="utf-8"), masked.format(number))

    def test_update_writes_what_is_printed_and_nothing_else(self):
        stale = PLAN.replace("28.11", "28.21")
        self.assertEqual(self.updated(f"a\n```console\n$ tranche plan gpt2\n{stale}\n$ tranche table 2\n```\nb\n"),
                         f"a\n```console\n$ tranche plan gpt2\n{PLAN}\n$ tranche table 2\n{TABLE}\n```\nb\n")
        self.assertEqual(self.updated("<!-- $ tranche table 2 -->\n| old |\n\nb\n"),
                         f"<!-- $ tranche table 2 -->\n{TABLE}\n\nb\n")
        self.assertEqual(self.updated("```console\n$ tranche plan gpt2\npeak 1\nin forward\n...\nend\n```"),
                         "```console\n$ tranche plan gpt2\npeak 28.11 GiB\nin backward\n...\nend\n```")

    def test_commands_of_a_page_share_a_folder_that_others_do_not(self):
        self.holds("```console\n$ echo 1 > file\n$ cat file; test -x scripts/quoted_outputs.py && echo 2\n1\n2\n```\n", 2)
        self.differs("```console\n$ cat file\n1\n```\n", "cat: file: No such file")

    def test_a_command_that_fails_says_so(self):
        self.differs("```console\n$ tranche fail\nno such model\n```\n", "+(ended with status 2)")
        self.holds('```console\n$ tranche fail || echo "status $?"\nno such model\nstatus 2\n```\n')

    def test_what_is_no_quotation_is_left_alone(self):
        self.differs("```\n$ tranche plan gpt2\n```\n\n    $ tranche fail\n", "no quotation was found")
        self.differs("```console\ntranche plan gpt2\n```\n", "line 2: a console block begins with a command")
        self.differs("```console\n$ tranche plan gpt2\n", "line 1: a fence without an end")


if __name__ == "__main__":
    unittest.main()
