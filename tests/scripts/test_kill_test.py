#!/usr/bin/env python3
"""scripts/kill_test.py: each part of a save is told from the files that a kill leaves, also while a rank renames them."""
import os
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

SCRIPTS = pathlib.Path(__file__).resolve().parents[2] / "scripts"
sys.dont_write_bytecode = True
sys.path.insert(0, str(SCRIPTS))
import kill_test  # noqa: E402

FIRST, SECOND = (f"shard-0000{rank}-of-00002.h5" for rank in range(2))
STATES = [
    ([], "before any save"),
    (["step-00000001.7f.tmp/"], "before the first shard"),
    ([f"step-00000001.7f.tmp/{FIRST}"], "shards under way"),
    ([f"step-00000001.7f.tmp/{FIRST}", f"step-00000001.7f.tmp/{SECOND}"], "all shards begun, nothing committed"),
    ([f"step-00000001.7f.tmp/{FIRST}", "step-00000001.7f.tmp/model.h5"], "between model.h5 and the manifest"),
    (["step-00000001.7f.tmp/manifest.json.1"], "while the manifest was written"),
    (["step-00000001.7f.tmp/manifest.json"], "manifest there, folder not yet renamed"),
    (["step-00000001/manifest.json"], "renamed, `latest` not yet there"),
    (["step-00000001/", "step-00000002/", "latest=step-00000001"], "renamed, `latest` not yet replaced"),
    (["step-00000001/", "step-00000002/", "latest=step-00000002"], "between two saves"),
    (["step-00000001.old/", "step-00000001.7f.tmp/"], "while a checkpoint was replaced"),
    (["step-00000001.removed-7f.tmp/", "step-00000002.7f.tmp/"], "while an old checkpoint was removed"),
]


class Parts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = os.path.join(folder.name, "run")

    def make(self, entries):
        root = pathlib.Path(tempfile.mkdtemp(dir=os.path.dirname(self.folder)))
        for entry in entries:
            name, _, text = entry.partition("=")
            path = root / name
            (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
            if not name.endswith("/"):
                path.write_text(text, encoding="utf-8")
        return str(root)

    def test_each_part_is_told_from_its_files(self):
        self.assertEqual(kill_test.what_was_hit(self.folder), "before any save", "no folder yet")
        for entries, part in STATES:
            with self.subTest(part):
                self.assertEqual(kill_test.what_was_hit(self.make(entries)), part)

    def test_a_folder_that_is_renamed_during_a_look_is_looked_at_again(self):
        folder = self.make(["step-00000001.7f.tmp/manifest.json"])
        listdir, looks = os.listdir, []

        def renamed_first(path):
            looks.append(path)
            if path.endswith(".tmp"):
                os.rename(path, path.removesuffix(".7f.tmp"))
            return listdir(path)

        with mock.patch("os.listdir", renamed_first):
            self.assertEqual(kill_test.what_was_hit(folder), "renamed, `latest` not yet there")
        self.assertEqual(looks, [folder, os.path.join(folder, "step-00000001.7f.tmp"), folder])


if __name__ == "__main__":
    unittest.main()
